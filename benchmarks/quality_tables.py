"""Tables of quality runs that hold one record per arm and seed, for `benchmarks/results.py`."""

import statistics
from collections.abc import Iterable
from typing import Any

from thinwire.lab.statistics import paired, std_err

Losses = dict[str, dict[int, float]]  # arm -> seed -> held-out loss, nats


def spread(values: Iterable[float]) -> str:
    found = list(values)
    error = std_err(found)
    return f"{statistics.fmean(found):.4f}" + (f" ± {error:.4f}" if error is not None else "")


def gap(arm: dict[int, float], reference: dict[int, float]) -> str:
    """Return the mean paired difference with its 95 % interval."""
    seeds = sorted(set(arm) & set(reference))
    if len(seeds) < 2:
        return f"{arm[seeds[0]] - reference[seeds[0]]:+.4f}" if seeds else ""
    pair = paired([arm[s] for s in seeds], [reference[s] for s in seeds], margin=0.01)
    return f"{pair.mean:+.4f} ({pair.low:+.4f} to {pair.high:+.4f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def outer_table(runs: dict[str, Any], tuning_seed: int = 99) -> str:
    """Return the table of `benchmarks/sparseloco_quality.py`; its first arm is the reference."""
    losses = outer_losses(runs, tuning_seed)
    first = next(iter(losses))
    about = {r["arm"]: r for r in runs.values() if r["seed"] != tuning_seed}
    rows = []
    for arm, seeds in losses.items():
        r = about[arm]
        ratio = f"{r['dense_bytes'] / r['wire_bytes']:.0f}×" if r["wire_bytes"] else ""
        rows.append(
            [f"`{arm}`", f"{r['lr']:g}", str(len(seeds)), spread(seeds.values()),
             "reference" if arm == first else gap(seeds, losses[first]), ratio]
        )  # fmt: skip
    head = ["arm", "rate", "seeds", "held-out loss ± s.e., nats", f"to `{first}` (95 % interval)",
            "bytes below dense"]  # fmt: skip
    return table(head, rows) + tuning_table(runs, tuning_seed)


def tuning_table(runs: dict[str, Any], tuning_seed: int) -> str:
    """Return the losses that rates were chosen by, nothing if none were."""
    tuned: dict[str, dict[float, float]] = {}
    for r in runs.values():
        if r["seed"] == tuning_seed:
            tuned.setdefault(r["arm"], {})[r["lr"]] = r["val_loss"]
    if not tuned:
        return ""
    rates = sorted({lr for found in tuned.values() for lr in found})
    shown = [
        [f"`{arm}`", *(f"{found[lr]:.4f}" if lr in found else "" for lr in rates)]
        for arm, found in tuned.items()
    ]
    text = "\n\nRates were chosen on a seed of its own:\n\n"
    return text + table(["arm", *(f"rate {lr:g}" for lr in rates)], shown)


def sparse_name(run: dict[str, Any]) -> str:
    return f"{run['arm']} {run['warmup']}"


def sparse_losses(runs: dict[str, Any], tuning_seed: int = 99) -> dict[int, Losses]:
    """Return number of steps -> arm and warm-up -> seed -> loss."""
    losses: dict[int, Losses] = {}
    for r in runs.values():
        if r["seed"] != tuning_seed:
            arms = losses.setdefault(r["steps"], {})
            arms.setdefault(sparse_name(r), {})[r["seed"]] = r["val_loss"]
    return losses


def outer_losses(runs: dict[str, Any], tuning_seed: int = 99) -> Losses:
    """Return arm -> seed -> loss of `benchmarks/sparseloco_quality.py`."""
    losses: Losses = {}
    for r in runs.values():
        if r["seed"] != tuning_seed:
            losses.setdefault(r["arm"], {})[r["seed"]] = r["val_loss"]
    return losses


def sparse_table(runs: dict[str, Any], tuning_seed: int = 99) -> str:
    """Return the tables of `benchmarks/scape_quality.py`: the longest runs, then other lengths."""
    losses = sparse_losses(runs, tuning_seed)
    if not losses:
        return "no run over seeds yet" + tuning_table(runs, tuning_seed)
    longest = losses[max(losses)]
    about = {sparse_name(r): r for r in runs.values() if r["steps"] == max(losses)}
    adams, adamw = (longest.get(f"dense-{name} none", {}) for name in ("adams", "adamw"))
    rows = []
    for arm, seeds in sorted(longest.items(), key=lambda one: statistics.fmean(one[1].values())):
        r = about[arm]
        ratio = f"{r['dense_bytes'] / r['wire_bytes']:.1f}×" if r["wire_bytes"] else "1×"
        rows.append(
            [f"`{r['arm']}`", r["warmup"], f"{r['lr']:g}", str(len(seeds)), spread(seeds.values()),
             gap(seeds, adams), gap(seeds, adamw), ratio]
        )  # fmt: skip
    head = ["arm", "warm-up", "rate", "seeds", "held-out loss ± s.e., nats",
            "to dense AdamS (95 % interval)", "to dense AdamW",
            "bytes below dense, whole run"]  # fmt: skip
    text = table(head, rows)
    shorter = sorted(set(losses) - {max(losses)})
    if shorter:
        text += "\n\nThe gap to dense AdamS at the same length, by number of steps:\n\n"
        text += lengths_table(losses, [*shorter, max(losses)], list(losses[shorter[0]]))
    return text + tuning_table(runs, tuning_seed)


def lengths_table(losses: dict[int, Losses], lengths: list[int], arms: list[str]) -> str:
    reference = "dense-adams none"
    rows = [
        [f"`{arm}`", *(gap(losses[n].get(arm, {}), losses[n].get(reference, {})) for n in lengths)]
        for arm in arms
        if arm != reference
    ]
    return table(["arm", *(f"{n:,} steps" for n in lengths)], rows)


def mixed_losses(runs: dict[str, Any]) -> tuple[dict[str, Losses], dict[str, str], Losses]:
    """Return losses by mode, the mode that suits each arm, and the losses in that mode."""
    losses: dict[str, Losses] = {"full": {}, "projected": {}}
    own: dict[str, str] = {}
    for r in runs.values():
        arm = r["plan"]["arm"]
        inside = arm["which"] == "uniform" and arm["mode"] == "constrained"
        own[r["name"]] = "projected" if inside or arm["constrain_full"] else "full"
        for mode, found in losses.items():
            found.setdefault(r["name"], {})[r["plan"]["seed"]] = r["losses"][mode]
    return losses, own, {name: losses[mode][name] for name, mode in own.items()}


def mixed_table(runs: dict[str, Any]) -> str:
    """Return the tables of `benchmarks/hetero_quality.py`."""
    losses, own, best = mixed_losses(runs)
    none = best.get("none", {})
    rows = [
        [f"`{name}`", str(len(best[name])), spread(losses["full"][name].values()),
         spread(losses["projected"][name].values()), own[name],
         "reference" if name == "none" else gap(best[name], none)]
        for name in own
    ]  # fmt: skip
    head = ["arm", "seeds", "weights as they are", "projected", "mode that suits it",
            "to `none` (95 % interval)"]  # fmt: skip
    text = table(head, rows)
    duels = []
    for name in own:
        other = name.replace("selective", "uniform")
        if name.startswith("selective") and other in own:
            duels.append([name.removeprefix("selective-"), gap(best[name], best[other])])
    if duels:
        text += "\n\nSelective minus uniform, each in the mode that suits it:\n\n"
        text += table(["compression", "nats (95 % interval)"], duels)
    return text


def peers_table(result: dict[str, Any]) -> str:
    """Return the table of `benchmarks/peers`: losses and speeds beside the first arm's."""
    losses: Losses = {}
    length = f"steps{result['settings']['loss']['steps']}"
    for key, loss in result["losses"].items():
        arm, steps, seed = key.split("/")
        if steps != length:
            continue
        losses.setdefault(arm, {})[int(seed.removeprefix("seed"))] = loss
    first = result["settings"]["speed"]["arms"][0]
    rows = []
    for arm in dict.fromkeys([*losses, *result["speeds"]]):
        seeds, speed = losses.get(arm, {}), result["speeds"].get(arm)
        whose = "peer" if arm in result["peers"] else "thinwire"
        row = [f"`{arm}`", whose, str(len(seeds)), spread(seeds.values()) if seeds else ""]
        if arm == first:
            rows.append([*row, "reference", "1.00×", ""])
            continue
        row.append(gap(seeds, losses.get(first, {})) if seeds else "")
        if speed is not None:
            row += [f"{speed['speedup']:.2f}×", f"{speed['bytes'] / 1e6:.2f}"]
        rows.append(row + [""] * (7 - len(row)))
    rate = result["rate_bits_per_s"] / 1e6
    head = ["arm", "whose", "seeds", "held-out loss ± s.e., nats", f"to `{first}` (95 % interval)",
            f"step, faster than `{first}` at {rate:g} Mbit/s", "MB per rank and step"]  # fmt: skip
    return table(head, rows)
