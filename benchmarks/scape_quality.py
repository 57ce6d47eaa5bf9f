"""Loss of SCAPE and its baselines over densities, warm-ups and seeds, in one resumable JSON file.

Stages: `tune` runs each arm over learning rates (one seed), `final` the best rate over seeds, with
and without dense warm-up and density ramp; `length` repeats the main arms at other numbers of
steps. Every run is written as it ends; a second call skips what is there.

    python benchmarks/scape_quality.py --steps 10000 --seeds 3 --out benchmarks/results/scape_quality.json
    python benchmarks/scape_quality.py --table --out benchmarks/results/scape_quality.json
"""  # noqa: E501

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.scape_toy import Arm, Plan, characters, limit_threads, run

ARMS = {
    "dense-adamw": Arm("adamw"),
    "dense-adams": Arm("adams"),
    "scape-90": Arm("scape", 0.1),
    "scape-95": Arm("scape", 0.05),
    "scape-99": Arm("scape", 0.01),
    "scape-90-decay": Arm("scape", 0.1, unmasked="decay"),
    "scape-95-decay": Arm("scape", 0.05, unmasked="decay"),
    "scape-99-decay": Arm("scape", 0.01, unmasked="decay"),
    "scape-90-lag0": Arm("scape", 0.1, lag=0),
    "topk-ef-adamw-90": Arm("topk", 0.1),
    "topk-ef-adamw-95": Arm("topk", 0.05),
    "topk-ef-adamw-99": Arm("topk", 0.01),
    "random-90": Arm("scape", 0.1, source="random"),
    "dgc-99.9": Arm("dgc", 0.001),
    # Bytes close to those of scape-90 and scape-99 with 4 workers.
    "demo-4": Arm("demo", keep=4),
    "demo-1": Arm("demo", keep=1),
    "powersgd-4": Arm("powersgd", rank=4),
    "powersgd-1": Arm("powersgd", rank=1),
}
RATES = {
    "dgc": (0.03, 0.1, 0.3, 1.0),
    "demo": (3e-4, 1e-3, 3e-3),
    "sparse": (1e-3, 3e-3, 6e-3, 1e-2, 2e-2),
    "dense": (5e-4, 1e-3, 2e-3, 3e-3, 6e-3),
}
# Shares of the steps: no warm-up, dense warm-up, dense warm-up and ramp.
WARMUPS = {"none": (0.0, 0.0), "dense": (0.1, 0.0), "ramp": (0.1, 0.1)}


def rates(arm: Arm) -> tuple[float, ...]:
    kind = arm.kind if arm.kind in RATES else "sparse" if arm.density < 1 else "dense"
    return RATES[kind]


def plan_of(name: str, lr: float, steps: int, warmup: str, seed: int, workers: int) -> Plan:
    dense, ramp = WARMUPS[warmup]
    return Plan(
        ARMS[name], lr, steps, int(dense * steps), int(ramp * steps), seed=seed, workers=workers
    )


class Results:
    """Runs by key, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = json.loads(path.read_text())["runs"] if path.exists() else {}

    def get(self, name: str, plan: Plan, warmup: str, data) -> dict:
        key = f"{name}/{warmup}/lr{plan.lr:g}/steps{plan.steps}/seed{plan.seed}/n{plan.workers}"
        if key not in self.runs:
            outcome = run(plan, data())
            kept = {k: v for k, v in asdict(outcome).items() if k != "state"}
            self.runs[key] = {
                "arm": name, "warmup": warmup, "lr": plan.lr, "steps": plan.steps,
                "seed": plan.seed, "workers": plan.workers, **kept,
            }  # fmt: skip
            self.save()
            print(f"{key}: {outcome.val_loss:.4f} in {outcome.wall_s:.0f} s", flush=True)
        return self.runs[key]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"runs": self.runs}, indent=1))
        part.rename(self.path)


def warmups_of(name: str) -> tuple[str, ...]:
    return ("none", "dense", "ramp") if ARMS[name].density < 1 else ("none",)


def best_rate(results: Results, name: str, args, data) -> float:
    """Tune with dense warm-up where the arm is sparse, on a seed that the final runs don't use."""
    warmup = "dense" if ARMS[name].density < 1 else "none"
    losses = {
        lr: results.get(
            name, plan_of(name, lr, args.tune_steps, warmup, 99, args.workers), warmup, data
        )["val_loss"]
        for lr in rates(ARMS[name])
    }
    return min(losses, key=losses.get)


def table(results: Results) -> str:
    """Return mean, spread and gap to dense AdamS per arm, warm-up and length."""
    groups: dict[tuple, list[dict]] = {}
    for r in results.runs.values():
        if r["seed"] != 99:
            groups.setdefault((r["steps"], r["arm"], r["warmup"], r["lr"]), []).append(r)
    lines = ["| steps | arm | warm-up | lr | val loss | sd | gap to dense AdamS | bytes, ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    dense = {
        k[0]: statistics.mean(r["val_loss"] for r in v)
        for k, v in groups.items()
        if k[1] == "dense-adams"
    }
    for key in sorted(groups):
        runs = groups[key]
        losses = [r["val_loss"] for r in runs]
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        mean, wire = statistics.mean(losses), runs[0]["wire_bytes"]
        ratio = f"{runs[0]['dense_bytes'] / wire:.1f}x" if wire else "-"
        gap = f"{mean - dense[key[0]]:+.4f}" if key[0] in dense else "-"
        cells = [*map(str, key[:3]), f"{key[3]:g}", f"{mean:.4f}", f"{spread:.4f}", gap, ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scape_quality.json"))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tune-steps", type=int, default=2_000)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="print the table and end")
    args = parser.parse_args()
    limit_threads()
    results, held = Results(args.out), []

    def data():
        if not held:
            held.append(characters())
        return held[0]

    if not args.table:
        chosen = {name: best_rate(results, name, args, data) for name in args.arms}
        for seed in range(args.seeds):
            for name in args.arms:
                for warmup in warmups_of(name):
                    for steps in (args.steps, *args.lengths):
                        plan = plan_of(name, chosen[name], steps, warmup, seed, args.workers)
                        results.get(name, replace(plan), warmup, data)
    print(table(results))


if __name__ == "__main__":
    main()
