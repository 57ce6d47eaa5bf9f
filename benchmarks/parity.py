"""One verdict per system: its loss beside its reference's, from the kept quality runs.

`benchmarks/results.py pages` renders it as docs/results/parity.md.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.quality_tables import (
    Losses,
    mixed_losses,
    outer_losses,
    sparse_losses,
    table,
)
from thinwire.lab.statistics import paired


@dataclass(frozen=True)
class Pair:
    """An arm to be judged.

    Attributes:
        system: for people.
        kept: name of the kept result.
        arm, reference: names in it.
        margin: largest difference that counts as equal: a share of the reference's loss, or nats.
        nats: whether the margin is in nats.
    """

    system: str
    kept: str
    arm: str
    reference: str
    margin: float
    nats: bool = False


PAIRS = (
    Pair("Aquavit, constant rate", "aquavit-constant", "aquavit", "bf16-fsdp", 0.01),
    Pair("Aquavit, cosine", "aquavit-cosine", "aquavit", "bf16-fsdp", 0.01),
    Pair("Aquavit, fine-tuning", "aquavit-finetune", "aquavit", "bf16-fsdp", 0.01),
    Pair("Aquavit, 4-bit gradients", "aquavit-gradients", "aquavit-grad4", "bf16-fsdp", 0.01),
    Pair("TACO", "taco-quality", "taco", "dense-tp", 0.003),
    Pair("SCAPE 90 %, 8.4x", "scape-quality", "scape-90 none", "dense-adams none", 0.04, True),
    Pair("SCAPE 95 %, 15.9x", "scape-quality", "scape-95 none", "dense-adams none", 0.04, True),
    Pair("SCAPE 99 %, 66.6x", "scape-quality", "scape-99 none", "dense-adams none", 0.04, True),
    Pair("SCAPE 99 %, 7.4x", "scape-quality", "scape-99 ramp", "dense-adams none", 0.04, True),
    Pair("ECO FP8", "eco-quality", "eco-fp8-sr", "master-fp8-rtn", 0.0025),
    Pair("SparseLoCo", "sparseloco-quality", "sparseloco", "ddp", 0.05, True),
    Pair("SparseLoCo", "sparseloco-quality", "sparseloco", "diloco", 0.05, True),
    Pair("Mixed replicas, 8x", "mixed-replicas", "selective-8x", "uniform-8x", 0.05, True),
    Pair("Mixed replicas, 16x", "mixed-replicas", "selective-16x", "uniform-16x", 0.05, True),
    Pair("Mixed replicas, 32x", "mixed-replicas", "selective-32x", "uniform-32x", 0.05, True),
)


def losses_of(result: dict[str, Any]) -> Losses:
    """Return arm -> seed -> held-out loss of a kept result."""
    if "reference" in result:
        return {
            arm["name"]: dict(zip(arm["seeds"], arm["loss"]["values"], strict=True))
            for arm in result["arms"]
        }
    kind = next(iter(result["runs"].values()))
    if "plan" in kind:
        return mixed_losses(result["runs"])[2]
    if "warmup" in kind:
        found = sparse_losses(result["runs"])
        return found[max(found)]
    return outer_losses(result["runs"])


def row(pair: Pair, losses: Losses) -> list[str]:
    """Return a line of the table."""
    arm, reference = losses[pair.arm], losses[pair.reference]
    seeds = sorted(set(arm) & set(reference))
    values, against = [arm[s] for s in seeds], [reference[s] for s in seeds]
    middle = statistics.fmean(against)
    margin = pair.margin if pair.nats else pair.margin * middle
    found = paired(values, against, margin)
    scale, unit = (1.0, " nats") if pair.nats else (100 / middle, " %")
    digits = 3 if pair.nats else 2
    low, high = (found.low or 0.0) * scale, (found.high or 0.0) * scale
    names = [name.removesuffix(" none") for name in (pair.arm, pair.reference)]
    return [
        pair.system, f"`{names[0]}`", f"`{names[1]}`", str(len(seeds)),
        f"{found.mean * scale:+.{digits}f}{unit} ({low:+.{digits}f} to {high:+.{digits}f})",
        f"{pair.margin if pair.nats else 100 * pair.margin:g}{unit}", found.verdict,
        f"[runs]({pair.kept}.md)",
    ]  # fmt: skip


def parity_page(kept: dict[str, dict[str, Any]]) -> str:
    """Return the page, from kept results by name."""
    rows = [row(p, losses_of(kept[p.kept]["result"])) for p in PAIRS if p.kept in kept]
    head = ["system", "arm", "reference", "seeds", "difference (95 % interval)", "margin",
            "verdict", "from"]  # fmt: skip
    return f"# Parity: one verdict per system\n\n{INTRODUCTION}\n\n{table(head, rows)}\n"


INTRODUCTION = """\
Held-out loss of each system's arm minus its reference's, paired by seed, with one data order per
seed; positive is worse. *Equivalent*: two one-sided t-tests at 5 % keep the true difference within
the margin. *Worse* or *better*: the 95 % interval lies on one side of zero, and equivalence is not
shown. *Undecided*: neither. Margins: SCAPE's 0.04 is its paper's, the others are ours; TACO's and
those of 0.05 nats were written down with the results. SCAPE's rows name how many times fewer bytes
the whole run sent; `ramp` has a dense tenth of the steps, with which the rates were tuned. All are
small models trained on CPUs; [claims](../claims.md) says what that can and cannot show."""
