"""Sums up training runs of several arms and seeds: loss, paired differences, bytes, curves.

`summarise` returns what compare.json holds under the keys below; losses in nats, bytes as sent by
one rank, lists over a curve's points of equal length:

- `measure`: "val_loss" where every run has one, else "train_loss"
- `margin`: the relative equivalence margin; `reference`: the first arm's name
- `arms`: one per arm, in order
  - `name`, `seeds`
  - `loss`: `mean`, `std_err` (null for one seed), `values` (in the order of `seeds`)
  - `difference` (null for the first arm and without a common seed): `num_pairs, mean, std_err,
    low, high, margin, tost_p, verdict`, as in `statistics.Paired`, and `relative` (`mean, low,
    high` over the first arm's mean loss on the common seeds)
  - `words`: the verdict as a sentence (null where `difference` is)
  - `bytes`: `wire`, `dense` (means over seeds), `ratio` (null when nothing was sent)
  - `wall_s`, `step_s_median` (means over seeds, null where not recorded)
  - `curve`: `step`, `tokens`, `wire_bytes` (running sums), and the training loss as `mean`, `low`,
    `high` over the seeds, each point a mean over `window` steps
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from thinwire.errors import ConfigError
from thinwire.lab.statistics import mean, paired, std_err

__all__ = ["TrainedRun", "format_summary", "summarise"]

_MAX_POINTS = 100
_SENTENCES = {
    "equivalent": "equivalent to {ref} within {margin}",
    "worse": "worse than {ref}",
    "better": "better than {ref}",
    "undecided": "undecided against {ref}",
}


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A finished run: its arm, its seed, and the contents of run.json and metrics.jsonl."""

    arm: str
    seed: int
    record: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    def loss(self, measure: str) -> float | None:
        """Return a finite final loss in nats, or None."""
        value = self.record["result"].get(measure)
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else None

    def ledger_sum(self, key: str) -> float:
        """Return a ledger total over all links."""
        return sum(link.get(key, 0) for link in self.record.get("ledger", {}).values())


def summarise(
    runs: Sequence[TrainedRun], *, margin: float = 0.01, arms: Sequence[str] = ()
) -> dict[str, Any]:
    """Sum up runs per arm and compare each arm with the first on the seeds that both have.

    Args:
        runs: finished runs.
        margin: relative difference of loss that still counts as equal (0.01 is one per cent).
        arms: names in the order wanted, the reference first; by default in the order in which they
            appear in `runs`. An arm without a run is left out; without a run of the reference
            nothing is compared.

    Returns:
        The mapping that the head of this file describes.

    Raises:
        ConfigError: no run, the same arm and seed twice, or a margin that is not above zero.
    """
    if not runs:
        raise ConfigError("no finished run to sum up")
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(f"margin must be above 0 (0.01 is one per cent), got {margin}")
    by_arm: dict[str, dict[int, TrainedRun]] = {name: {} for name in arms}
    for run in runs:
        seeds = by_arm.setdefault(run.arm, {})
        if run.seed in seeds:
            raise ConfigError(f"arm {run.arm!r} has two runs of seed {run.seed}")
        seeds[run.seed] = run
    measure = "val_loss" if all(run.loss("val_loss") is not None for run in runs) else "train_loss"
    reference = next(iter(by_arm))
    summaries = []
    for name, seeds in by_arm.items():
        if not seeds:
            continue
        arm = _arm_summary(name, seeds, measure)
        if name != reference:
            arm["difference"] = _difference(seeds, by_arm[reference], measure, margin)
        arm["words"] = _words(arm, reference, margin)
        summaries.append(arm)
    return {"measure": measure, "margin": margin, "reference": reference, "arms": summaries}


def _arm_summary(name: str, seeds: Mapping[int, TrainedRun], measure: str) -> dict[str, Any]:
    runs = [seeds[seed] for seed in sorted(seeds)]
    losses = [_known_loss(run, measure) for run in runs]
    wire = mean([run.ledger_sum("wire_bytes") for run in runs])
    dense = mean([run.ledger_sum("dense_bytes") for run in runs])
    return {
        "name": name,
        "seeds": sorted(seeds),
        "loss": {"mean": mean(losses), "std_err": std_err(losses), "values": losses},
        "difference": None,
        "words": None,
        "bytes": {"wire": wire, "dense": dense, "ratio": dense / wire if wire else None},
        "wall_s": _result_mean(runs, "wall_s"),
        "step_s_median": _result_mean(runs, "step_s_median"),
        "curve": _curve(runs),
    }


def _known_loss(run: TrainedRun, measure: str) -> float:
    loss = run.loss(measure)
    if loss is None:
        raise ConfigError(f"arm {run.arm!r}, seed {run.seed}, has no finite {measure}")
    return loss


def _result_mean(runs: Sequence[TrainedRun], key: str) -> float | None:
    values = [run.record["result"].get(key) for run in runs]
    known = [v for v in values if v is not None]
    return mean(known) if len(known) == len(values) else None


def _difference(
    seeds: Mapping[int, TrainedRun],
    reference: Mapping[int, TrainedRun],
    measure: str,
    margin: float,
) -> dict[str, Any] | None:
    common = sorted(seeds.keys() & reference.keys())
    if not common:
        return None
    base = [_known_loss(reference[seed], measure) for seed in common]
    scale = abs(mean(base))
    result = paired(
        [_known_loss(seeds[s], measure) for s in common], base, margin * scale
    ).to_dict()
    relative = {
        key: None if result[key] is None or scale == 0 else result[key] / scale
        for key in ("mean", "low", "high")
    }
    return result | {"relative": relative}


def _words(arm: Mapping[str, Any], reference: str, margin: float) -> str | None:
    difference = arm["difference"]
    if difference is None:
        return None
    head = _SENTENCES[difference["verdict"]].format(ref=reference, margin=f"{100 * margin:g} %")
    relative = difference["relative"]
    pairs = difference["num_pairs"]
    if relative["low"] is None:
        return f"{head}: {_percent(relative['mean'])} on one seed, which gives no interval"
    interval = f"95 % interval {_percent(relative['low'])} to {_percent(relative['high'])}"
    tail = ""
    if difference["verdict"] == "worse":
        over = difference["low"] > difference["margin"]
        tail = ", beyond the margin" if over else f", not shown to stay within {100 * margin:g} %"
    if difference["verdict"] == "undecided":
        tail = ": more seeds or steps would tell"
    return f"{head}: {_percent(relative['mean'])} ({interval}, {pairs} seeds){tail}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.2f} %".replace("-", "−")


def _curve(runs: Sequence[TrainedRun]) -> dict[str, Any]:
    """Return the training loss over the steps that all seeds logged, in windows of equal width."""
    by_step = [{line["step"]: point for line, point in _points(run)} for run in runs]
    steps = sorted(set.intersection(*(set(points) for points in by_step)))
    window = max(-(-len(steps) // _MAX_POINTS), 1)
    curve: dict[str, Any] = {"window": window}
    curve |= {key: [] for key in ("step", "tokens", "wire_bytes", "mean", "low", "high")}
    for start in range(0, len(steps), window):
        part = steps[start : start + window]
        losses = [mean([points[s][2] for s in part]) for points in by_step]
        curve["step"].append(mean(part))
        for i, key in enumerate(("tokens", "wire_bytes")):
            curve[key].append(mean([points[s][i] for points in by_step for s in part]))
        curve["mean"].append(mean(losses))
        curve["low"].append(min(losses))
        curve["high"].append(max(losses))
    return curve


def _points(run: TrainedRun) -> list[tuple[Mapping[str, Any], tuple[float, float, float]]]:
    """Return each metrics line that has a loss with (tokens, running bytes, loss)."""
    sent = accumulate(sum((line.get("wire") or {}).values()) for line in run.metrics)
    return [
        (line, (float(line.get("tokens") or 0), float(total), float(line["loss"])))
        for line, total in zip(run.metrics, sent, strict=True)
        if isinstance(line.get("loss"), int | float) and math.isfinite(line["loss"])
    ]


def format_summary(summary: Mapping[str, Any]) -> str:
    """Return the table and the verdicts for a terminal."""
    head = [
        "arm",
        "seeds",
        summary["measure"].replace("_", " "),
        "s.e.",
        "difference",
        "95 % interval",
        "sent",
        "ratio",
    ]
    rows = [head] + [_text_row(arm) for arm in summary["arms"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    verdicts = [f"{arm['name']}: {arm['words']}" for arm in summary["arms"] if arm["words"]]
    return "\n".join([*lines, "", *verdicts]).rstrip()


def _text_row(arm: Mapping[str, Any]) -> list[str]:
    loss, difference, sent = arm["loss"], arm["difference"], arm["bytes"]
    interval = "–"
    if difference and difference["low"] is not None:
        interval = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
    return [
        arm["name"],
        str(len(arm["seeds"])),
        f"{loss['mean']:.4f}",
        "–" if loss["std_err"] is None else f"{loss['std_err']:.4f}",
        f"{difference['mean']:+.4f}" if difference else "–",
        interval,
        f"{sent['wire'] / 1e6:,.2f} MB",
        f"{sent['ratio']:.2f}x" if sent["ratio"] else "–",
    ]
