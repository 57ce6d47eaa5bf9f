"""Loss of unlike replicas over boundary ratios and seeds, in one resumable JSON file.

R virtual replicas in one process, on the code that real ones run: none of them compressed, half
(selective), or all (uniform), each compressed one a pipeline of 4 stages. Every run is written as
it ends; a second call skips what is there.

    python benchmarks/hetero_quality.py --rounds 60 --seeds 3 --out benchmarks/results/hetero_quality.json
    python benchmarks/hetero_quality.py --table --out benchmarks/results/hetero_quality.json

Each number names its evaluation: full (shared weights as they are), projected (output matrices in
the subspace first), boundaries (projected, and through the boundaries).
"""  # noqa: E501

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from thinwire.errors import ThinwireError
from thinwire.pipeline import Basis
from thinwire.replicas import Layout, Replica, Simulation
from thinwire.schedules import WarmupCosine
from thinwire.sparseloco import Options
from thinwire.train.config import Model
from thinwire.train.data import TrainBatches, held_out_batch
from thinwire.train.model import build
from thinwire.train.passes import token_loss
from thinwire.train.sources import load_corpus

RATIOS = (8, 16, 32)


@dataclass(frozen=True)
class Arm:
    """Which replicas compress their boundaries, and how.

    Attributes:
        which: "none", "selective" (the second half of the replicas) or "uniform" (all).
        ratio: width over coefficients per token.
        mode: "constrained" or "lossy".
        kind: of the basis: "random" or "coord".
        constrain_full: full replicas write in the subspace too.
        anchor: "projected" or "unprojected".
    """

    which: str
    ratio: int = 8
    mode: str = "constrained"
    kind: str = "random"
    constrain_full: bool = False
    anchor: str = "projected"


def arms() -> dict[str, Arm]:
    found = {"none": Arm("none")}
    for ratio in RATIOS:
        for which in ("selective", "uniform"):
            found[f"{which}-{ratio}x"] = Arm(which, ratio)
    for ratio in RATIOS:
        for which in ("selective", "uniform"):
            found[f"{which}-{ratio}x-lossy"] = Arm(which, ratio, mode="lossy")
    for which in ("selective", "uniform"):
        found[f"{which}-8x-coord"] = Arm(which, kind="coord")
    found["selective-8x-constrain-full"] = Arm("selective", constrain_full=True)
    found["selective-8x-unprojected"] = Arm("selective", anchor="unprojected")
    return found


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        arm: see `Arm`.
        seed: of weights, data order and basis.
        rounds: outer rounds.
        every: inner steps of a round.
        replicas: number of them.
        stages: of a compressed replica.
        batch: sequences per replica and step.
        tokens: of a sequence.
        lr: peak learning rate.
        k: entries per 4096 of a message.
        aggregate: "senders" or "replicas".
        dim, layers, hidden: of the model.
        data: source of the text.
    """

    arm: Arm
    seed: int
    rounds: int
    every: int
    replicas: int
    stages: int
    batch: int
    tokens: int
    lr: float
    k: int
    aggregate: str
    dim: int
    layers: int
    hidden: int
    data: str


def layout_of(plan: Plan) -> Layout:
    first = {"none": plan.replicas, "selective": plan.replicas // 2, "uniform": 0}[plan.arm.which]
    replicas, rank = [], 0
    for index in range(plan.replicas):
        compressed = index >= first
        count = plan.stages if compressed else 1
        ratio = plan.arm.ratio if compressed else 0
        replicas.append(Replica(ranks=tuple(range(rank, rank + count)), rank_ratio=ratio))
        rank += count
    return Layout(
        replicas=tuple(replicas),
        mode=plan.arm.mode,
        constrain_full=plan.arm.constrain_full,
        anchor=plan.arm.anchor,
    )


def run(plan: Plan) -> dict[str, Any]:
    """Train and return losses by evaluation mode."""
    started = time.perf_counter()
    torch.manual_seed(plan.seed)
    cfg = Model(
        dim=plan.dim,
        num_layers=plan.layers,
        num_heads=4,
        num_kv_heads=4,
        hidden_dim=plan.hidden,
    )

    def make(stage: int, stages: int) -> nn.Module:
        return build(cfg, plan.tokens, plan.seed, stage=stage, num_stages=stages)

    def optimizer(params: dict[str, nn.Parameter]) -> AdamW:
        return AdamW(params.values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.1)

    simulation = Simulation(
        layout_of(plan),
        make,
        optimizer,
        Basis(plan.dim, Basis.rank_of(plan.dim, plan.arm.ratio), plan.seed, plan.arm.kind),
        options=Options(k=plan.k, aggregate=plan.aggregate, check_every=0),
    )
    corpus = load_corpus(plan.data)
    batches = TrainBatches(corpus, plan.tokens, plan.batch * plan.replicas, plan.seed)
    steps = plan.rounds * plan.every
    warmup = min(40, steps // 5)
    schedule = WarmupCosine(peak=plan.lr, total_steps=steps, warmup_steps=warmup, floor=0.1)
    held_x, held_y, _ = held_out_batch(corpus, plan.tokens, 64, 0, 1)

    def held_loss(out: Tensor) -> Tensor:
        return token_loss(out, held_y)

    curve = []
    for round_ in range(plan.rounds):
        for step in range(round_ * plan.every, (round_ + 1) * plan.every):
            inner_step(simulation, batches, schedule(step))
        simulation.end_round()
        if (round_ + 1) % max(1, plan.rounds // 10) == 0:
            curve.append([round_ + 1, simulation.shared_loss(held_loss, held_x, "full")])
    losses = {"full": simulation.shared_loss(held_loss, held_x, "full")}
    losses["projected"] = simulation.shared_loss(held_loss, held_x, "projected")
    if plan.arm.which != "none":
        losses["boundaries"] = simulation.shared_loss(held_loss, held_x, "boundaries")
    return {
        "plan": asdict(plan),
        "losses": losses,
        "curve": curve,
        "wall_s": time.perf_counter() - started,
    }


def inner_step(simulation: Simulation, batches: TrainBatches, lr: float) -> None:
    for index, replica in enumerate(simulation.replicas):
        x_BT, y_BT = batches.share(index, len(simulation.replicas))
        token_loss(replica.forward(x_BT), y_BT).backward()
        replica.project_gradients()
        clip_grad_norm_(replica.params.values(), 1.0)
        for group in replica.optimizer.param_groups:
            group["lr"] = lr
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        replica.tokens += x_BT.numel()
    batches.advance()


def table(path: Path) -> str:
    """Return means over seeds, and paired differences to the arm without compression.

    The difference is of the mode that suits the arm: projected where all replicas write in the
    subspace, else full.
    """
    by_arm: dict[str, dict[int, dict[str, float]]] = {}
    own: dict[str, str] = {}
    for one in json.loads(path.read_text())["runs"].values():
        arm = one["plan"]["arm"]
        by_arm.setdefault(one["name"], {})[one["plan"]["seed"]] = one["losses"]
        inside = arm["which"] == "uniform" and arm["mode"] == "constrained"
        own[one["name"]] = "projected" if inside or arm["constrain_full"] else "full"
    none = by_arm.get("none", {})
    modes = ("full", "projected", "boundaries")
    head = " ".join(f"{mode:>10}" for mode in modes)
    lines = [f"{'arm':<30} {'seeds':>5} {head} {'to none':>9} {'in mode':>10}"]
    for name, seeds in by_arm.items():
        shown = " ".join(f"{_mean(s.get(mode) for s in seeds.values()):>10.4f}" for mode in modes)
        extra = _mean(s[own[name]] - none[n]["full"] for n, s in seeds.items() if n in none)
        lines.append(f"{name:<30} {len(seeds):>5} {shown} {extra:>+9.4f} {own[name]:>10}")
    return "\n".join(lines)


def _mean(values: Iterable[float | None]) -> float:
    found = [v for v in values if v is not None]
    return statistics.fmean(found) if found else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hetero_quality.json"))
    parser.add_argument("--table", action="store_true", help="print what is there, train nothing")
    parser.add_argument("--arms", nargs="*", default=list(arms()), choices=list(arms()))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--k", type=int, default=128)
    parser.add_argument("--aggregate", choices=("senders", "replicas"), default="senders")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.table:
        print(table(args.out))
        return
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    settings = {f: getattr(args, f) for f in Plan.__annotations__ if f not in ("arm", "seed")}
    for seed in range(args.seeds):
        for name in args.arms:
            plan = Plan(arm=arms()[name], seed=seed, **settings)
            key = json.dumps([name, asdict(plan)], sort_keys=True)
            if key in found["runs"]:
                continue
            try:
                found["runs"][key] = {"name": name} | run(plan)
            except ThinwireError as error:
                print(f"{name} seed {seed}: {error}")
                continue
            losses = {m: round(x, 4) for m, x in found["runs"][key]["losses"].items()}
            print(f"{name} seed {seed}: {losses}, {found['runs'][key]['wall_s']:.0f} s", flush=True)
            part = args.out.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1) + "\n")
            part.rename(args.out)
    print(table(args.out))


if __name__ == "__main__":
    main()
