"""`thinwire lab`: real training over real links of a stated speed, on one machine.

1. Run all arms over links without a limit: what a step costs beyond the wire (`links`, `rounds`).
2. Run them again at the stated rate, arms in turn.
3. Compare step times with the first arm, bytes with the interfaces' own counters, and the speed-up
   with what the arm's bytes allow:

       ideal = (C + D / rate) / (C + W / rate)

   C: the first arm's step without a limit, s. D, W: the first arm's bytes of a step and this
   arm's, by the ledger. It leaves out this arm's own arithmetic, overlap and framing.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thinwire.errors import ConfigError, RunError
from thinwire.lab.arms import Arm, arm_config, parse_arm, parse_settings
from thinwire.lab.links import INTERFACE, parse_rate, shaped_links
from thinwire.train.arguments import Arguments
from thinwire.train.axes import check_ranks
from thinwire.train.launch import Place, launch
from thinwire.train.metrics import versions
from thinwire.train.parse import from_dict

__all__ = ["main", "summarise"]

# A compressed arm that costs more than this over the first arm's step doesn't pay there.
COSTLY = 1.25


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        arms: the arms, the reference first.
        nproc: ranks.
        rates: bits per second of each rank; 0 for no limit.
        warmup: steps of each arm before the first round.
        rounds: how often each arm has its turn.
        steps: steps of a turn.
        compute_scale: factor by which a step's compute is stretched, by sleeping; at least 1.
        sync_every: per arm, steps of an outer round; 1 for arms that have none.
    """

    arms: tuple[Arm, ...]
    nproc: int
    rates: tuple[float, ...]
    warmup: int
    rounds: int
    steps: int
    compute_scale: float
    sync_every: tuple[int, ...]


def _configs(plan: Plan, data: str, out: Path) -> list[dict[str, Any]]:
    configs = []
    for arm in plan.arms:
        # One more than is taken: a run's last step ends its outer round early.
        steps = plan.warmup + plan.rounds * plan.steps + 1
        words = ["--data.source", data, "--out", str(out / arm.folder), "--steps", str(steps)]
        configs.append(arm_config(arm, words))
    return configs


def _measure(
    plan: Plan, configs: list[dict[str, Any]], rates: Sequence[float], pad_s: float
) -> list[Any]:
    payload = {
        "configs": configs,
        "interface": INTERFACE,
        "warmup": plan.warmup,
        "rounds": plan.rounds,
        "steps": plan.steps,
        "pad_s": pad_s,
        "threads": configs[0]["compute"]["threads"],
    }
    with shaped_links(rates) as links:
        places = [Place(tuple(links.prefix(r)), links.environment) for r in range(plan.nproc)]
        return launch(plan.nproc, "thinwire.lab.rounds:measure", payload, places)


def _slowest(ranks: list[Any], arm: int) -> list[list[float]]:
    """Return the seconds of each step of each round, of the rank that took longest."""
    rounds = [[r["step_s"] for r in rank[arm]] for rank in ranks]
    return [
        [max(seconds) for seconds in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*rounds, strict=True)
    ]


def _mean_bytes(ranks: list[Any], arm: int, key: str) -> float:
    """Return a rank's bytes of all rounds, averaged over the ranks."""
    return statistics.mean(sum(r[key] for r in rank[arm]) for rank in ranks)


def _typical(plan: Plan, arm: int, ranks: list[Any]) -> float:
    """Return the seconds of an arm's step, of the slowest rank.

    The mean over rounds of their medians, so that arms whose bytes change are covered whole. With
    outer rounds, steps that exchange and steps that don't have medians of their own, weighted.
    """
    every, found = plan.sync_every[arm], []
    for index, steps in enumerate(_slowest(ranks, arm)):
        first = plan.warmup + index * plan.steps + 1
        kinds: dict[bool, list[float]] = {}
        for place, seconds in enumerate(steps):
            kinds.setdefault((first + place) % every == 0, []).append(seconds)
        found.append(
            sum(len(kind) * statistics.median(kind) for kind in kinds.values()) / len(steps)
        )
    return statistics.mean(found)


def summarise(plan: Plan, free: list[Any], shaped: list[Any], pad_s: float) -> list[dict[str, Any]]:
    """Return a row per arm.

    Args:
        plan: what was measured.
        free: answers of `rounds.measure` by rank, without a limit.
        shaped: likewise at the plan's rates.
        pad_s: seconds of sleep inside every step of `shaped`.
    """
    rate = min((r for r in plan.rates if r), default=0.0)
    number = plan.rounds * plan.steps
    compute_s = _typical(plan, 0, free) + pad_s
    dense_s = _typical(plan, 0, shaped)
    dense_bytes = _mean_bytes(shaped, 0, "ledger_bytes") / number
    rows = []
    for i, arm in enumerate(plan.arms):
        flat = sorted(s for of_round in _slowest(shaped, i) for s in of_round)
        quarters = statistics.quantiles(flat, n=4)
        booked = _mean_bytes(shaped, i, "ledger_bytes")
        seen = _mean_bytes(shaped, i, "interface_bytes")
        ideal = 1.0
        if rate:
            ideal = (compute_s + 8 * dense_bytes / rate) / (compute_s + 8 * booked / number / rate)
        typical_s, free_s = _typical(plan, i, shaped), _typical(plan, i, free)
        speedup = dense_s / typical_s
        rows.append(
            {
                "recipe": arm.name,
                "step_s_median": statistics.median(flat) if plan.sync_every[i] == 1 else typical_s,
                "step_s_iqr": quarters[2] - quarters[0],
                "speedup": speedup,
                "ideal_speedup": ideal,
                "of_ideal": speedup / ideal,
                "ledger_bytes": booked / number,
                "interface_bytes": seen / number,
                "interface_ratio": seen / booked if booked else None,
                "unshaped_step_s": free_s,
                "unshaped_cost": free_s / _typical(plan, 0, free),
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'arm':<24}{'step':>9}{'iqr':>8}{'speed-up':>10}{'ideal':>8}{'of it':>7}"
        f"{'ledger':>11}{'interface':>11}{'ratio':>7}{'no limit':>10}"
    ]
    for row in rows:
        ratio = f"{row['interface_ratio']:.3f}" if row["interface_ratio"] else "-"
        lines.append(
            f"{row['recipe']:<24}{row['step_s_median']:8.3f}s{row['step_s_iqr']:7.3f}s"
            f"{row['speedup']:9.2f}x{row['ideal_speedup']:7.2f}x{row['of_ideal']:7.0%}"
            f"{row['ledger_bytes'] / 1e6:8.2f} MB{row['interface_bytes'] / 1e6:8.2f} MB"
            f"{ratio:>7}{row['unshaped_cost']:9.2f}x"
        )
    return "\n".join(lines)


def _verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Say in words which arms don't pay, here and on a link without a limit."""
    said = []
    for row in rows[1:]:
        if row["speedup"] < 1.05:
            said.append(f"{row['recipe']} doesn't pay at this rate: {row['speedup']:.2f}x")
        if row["unshaped_cost"] > COSTLY:
            said.append(
                f"{row['recipe']} costs {row['unshaped_cost']:.2f}x the first arm's step on a "
                "link without a limit: it doesn't pay there"
            )
    return said


def _sync_every(arm: Arm, nproc: int, steps: int) -> int:
    """Return the steps of an arm's outer round, 1 if it has none, once it fits ranks and turns."""
    config = from_dict(arm_config(arm, []))
    check_ranks(config, nproc)
    outer = config.systems.outer
    if outer.method == "none":
        return 1
    if steps % outer.sync_every:
        raise ConfigError(
            f"systems.outer syncs every {outer.sync_every} steps: set --steps to a multiple, so "
            "that each turn holds its share of syncs"
        )
    return outer.sync_every


def _legend(plan: Plan) -> str:
    padded = ""
    if plan.compute_scale != 1:
        padded = f"\ncompute stretched {plan.compute_scale:g}-fold by sleeping, in every arm"
    return (
        "\nstep: the median; with outer rounds, those of steps with and without an exchange,\n"
        "weighted. ideal = (C + D/rate) / (C + W/rate): C the first arm's step without a limit,\n"
        "D its bytes, W this arm's. ledger, interface: a rank's bytes of a step; ratio: framing.\n"
        "no limit: this arm's step over the first arm's on the unshaped link." + padded
    )


def _parser() -> Arguments:
    parser = Arguments(
        prog="thinwire lab",
        description="Train arms in turn over shaped links; needs root and Debian's iproute2.",
    )
    add = parser.add_argument
    add("arms", nargs="+", metavar="ARM", help="recipe or recipe:key=value,...; the first is the "
        "reference")  # fmt: skip
    add("--rate", required=True, help="100mbit, 1gbit, ...; or one per rank: 1gbit,100mbit")
    add("--nproc", type=int, default=2, help="ranks, a namespace each (default 2)")
    add("--rounds", type=int, default=4, help="how often each arm has its turn")
    add("--steps", type=int, default=5, help="steps of a turn")
    add("--warmup", type=int, default=2, help="steps of each arm before the first round (default "
        "2; at least a whole outer round)")  # fmt: skip
    add("--compute-scale", type=float, default=1.0, help="stretch compute by sleeping, factor >= 1")
    add("--data", default="synthetic", help="text (default: synthetic)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all arms")
    add("--out", default="runs/lab", help="folder of lab.json")
    return parser


def _plan(given: argparse.Namespace) -> Plan:
    for name, least in (("nproc", 2), ("rounds", 1), ("steps", 2), ("warmup", 1)):
        if getattr(given, name) < least:
            raise ConfigError(f"--{name} must be at least {least}")
    if not given.compute_scale >= 1:
        raise ConfigError("--compute-scale must be at least 1: compute can't be made faster")
    rates = tuple(parse_rate(text) for text in given.rate.split(","))
    if len(rates) == 1:
        rates *= given.nproc
    if len(rates) != given.nproc:
        raise ConfigError(f"--rate has {len(rates)} rates for --nproc {given.nproc} ranks")
    settings = parse_settings(given.set)
    arms = tuple(parse_arm(text, settings) for text in given.arms)
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError("two arms are the same: give each once")
    every = tuple(_sync_every(arm, given.nproc, given.steps) for arm in arms)
    # The first exchange compiles what it needs: it belongs to the warm-up.
    warmup = max(given.warmup, *(steps if steps > 1 else 0 for steps in every))
    return Plan(
        arms, given.nproc, rates, warmup, given.rounds, given.steps, given.compute_scale, every
    )


def main(args: Sequence[str]) -> int:
    """Measure, print the table, write lab.json."""
    given = _parser().parse_intermixed_args(list(args))
    plan = _plan(given)
    out = Path(given.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    with TemporaryDirectory(prefix="thinwire-lab-") as scratch:
        configs = _configs(plan, given.data, Path(scratch))
        free = _measure(plan, configs, [0.0] * plan.nproc, 0.0)
        pad_s = (plan.compute_scale - 1) * _typical(plan, 0, free)
        shaped = _measure(plan, configs, plan.rates, pad_s)
    rows = summarise(plan, free, shaped, pad_s)
    report = {
        "command": "thinwire lab " + " ".join(args),
        "rate_bits_per_s": list(plan.rates),
        "num_ranks": plan.nproc,
        "compute_scale": plan.compute_scale,
        "rounds": plan.rounds,
        "steps_per_round": plan.steps,
        "model": configs[0]["model"],
        "versions": versions(),
        "arms": rows,
        "step_s": {arm.name: _slowest(shaped, i) for i, arm in enumerate(plan.arms)},
    }
    try:
        (out / "lab.json").write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{out / 'lab.json'} cannot be written: {error.strerror}") from error
    with suppress(BrokenPipeError):
        text = [_table(rows), *_verdicts(rows), _legend(plan), f"\nnumbers in {out / 'lab.json'}"]
        sys.stdout.write("\n".join(text) + "\n")
    return 0
