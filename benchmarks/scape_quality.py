"""Loss of SCAPE and its baselines over densities, warm-ups and seeds, in one resumable JSON file.

First every arm tries its learning rates on a seed of its own, all arms at the same length and with
equal care; then the best rate runs over seeds, sparse arms with and without a dense warm-up and
density ramp; then the main arms at other lengths. Every run is written as it ends; a second call
skips what is there.

    python -m benchmarks.scape_quality --steps 10000 --seeds 3 --out runs/scape-quality.json
    python -m benchmarks.scape_quality --table --out runs/scape-quality.json
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from benchmarks.quality_tables import sparse_table
from benchmarks.scape_toy import Arm, Plan, characters, limit_threads, run

TUNING_SEED = 99
ARMS = {
    "dense-adams": Arm("adams"),
    "dense-adamw": Arm("adamw"),
    "scape-90": Arm("scape", 0.1),
    "scape-99": Arm("scape", 0.01),
    "topk-ef-adamw-90": Arm("topk", 0.1),
    "topk-ef-adamw-99": Arm("topk", 0.01),
    # Bytes close to those of scape-90 and scape-99 with 4 workers.
    "demo-4": Arm("demo", keep=4),
    "demo-1": Arm("demo", keep=1),
    "powersgd-4": Arm("powersgd", rank=4),
    "powersgd-1": Arm("powersgd", rank=1),
    "scape-95": Arm("scape", 0.05),
    "topk-ef-adamw-95": Arm("topk", 0.05),
    # The other readings of what the paper leaves open.
    "scape-90-decay": Arm("scape", 0.1, unmasked="decay"),
    "scape-99-decay": Arm("scape", 0.01, unmasked="decay"),
    "scape-90-lag0": Arm("scape", 0.1, lag=0),
    "random-90": Arm("scape", 0.1, source="random"),
    "dgc-99.9": Arm("dgc", 0.001),
}
BOTH_WARMUPS = "scape-90", "scape-95", "scape-99"
RATES = {
    "dgc": (0.03, 0.1, 0.3, 1.0),
    "demo": (1e-3, 3e-3, 6e-3, 1e-2),
    "sparse": (1e-3, 3e-3, 6e-3, 1e-2, 2e-2),
    "dense": (1e-3, 2e-3, 3e-3, 6e-3, 1e-2),
}
# Shares of the steps: no warm-up; a dense tenth and a tenth from there to the density.
WARMUPS = {"none": (0.0, 0.0), "ramp": (0.1, 0.1)}


def sparse(arm: Arm) -> bool:
    """Tell whether a density schedule applies."""
    return arm.density < 1


def rates(arm: Arm) -> tuple[float, ...]:
    kind = arm.kind if arm.kind in RATES else "sparse" if sparse(arm) else "dense"
    return RATES[kind]


def warmups_of(name: str) -> tuple[str, ...]:
    if name in BOTH_WARMUPS:
        return ("ramp", "none")
    return ("ramp",) if sparse(ARMS[name]) else ("none",)


@cache
def text():
    """Return the characters, read once per process."""
    return characters()


def one_run(name: str, warmup: str, plan: Plan) -> dict:
    """Train once; what a process of the pool does."""
    outcome = asdict(run(plan, text()))
    outcome.pop("state")
    about = {k: getattr(plan, k) for k in ("lr", "steps", "seed", "workers", "batch")}
    return {"arm": name, "warmup": warmup, **about, **outcome}


class Results:
    """Runs by key, written after each."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.path = given, given.out
        self.runs = json.loads(self.path.read_text())["runs"] if self.path.exists() else {}

    def plan(self, name: str, lr: float, steps: int, warmup: str, seed: int) -> Plan:
        dense, ramp = (int(share * steps) for share in WARMUPS[warmup])
        given = self.given
        return Plan(
            ARMS[name], lr, steps, dense, ramp, seed=seed, workers=given.workers, batch=given.batch
        )

    def key(self, name: str, warmup: str, plan: Plan) -> str:
        return (
            f"{name}/{warmup}/lr{plan.lr:g}/steps{plan.steps}/seed{plan.seed}"
            f"/n{plan.workers}/b{plan.batch}"
        )

    def make(self, wanted: Iterator[tuple[str, str, Plan]]) -> None:
        """Run what is missing, in order, on as many processes as were asked for."""
        missing = {self.key(*one): one for one in wanted}
        missing = {key: one for key, one in missing.items() if key not in self.runs}
        with ProcessPoolExecutor(
            self.given.processes, get_context("spawn"), initializer=limit_threads
        ) as pool:
            jobs = {pool.submit(one_run, *one): key for key, one in missing.items()}
            for job in as_completed(jobs):
                if job.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                found = self.runs[jobs[job]] = job.result()
                self.save()
                print(f"{jobs[job]}: {found['val_loss']:.4f}, {found['wall_s']:.0f} s", flush=True)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"runs": self.runs}, indent=1))
        part.rename(self.path)

    def best_rate(self, name: str) -> float:
        losses = {}
        for lr in rates(ARMS[name]):
            warmup = warmups_of(name)[0]
            plan = self.plan(name, lr, self.given.tune_steps, warmup, TUNING_SEED)
            losses[lr] = self.runs[self.key(name, warmup, plan)]["val_loss"]
        return min(losses, key=losses.__getitem__)

    def tuning(self) -> Iterator[tuple[str, str, Plan]]:
        for name in self.given.arms:
            warmup = warmups_of(name)[0]
            for lr in rates(ARMS[name]):
                plan = self.plan(name, lr, self.given.tune_steps, warmup, TUNING_SEED)
                yield name, warmup, plan

    def final(self) -> Iterator[tuple[str, str, Plan]]:
        """Yield the table's runs, a seed at a time."""
        for seed in range(self.given.seeds):
            for name in self.given.arms:
                for warmup in warmups_of(name):
                    plan = self.plan(name, self.best_rate(name), self.given.steps, warmup, seed)
                    yield name, warmup, plan

    def lengths(self) -> Iterator[tuple[str, str, Plan]]:
        """Yield the same arms at other numbers of steps."""
        for steps in self.given.lengths:
            for seed in range(self.given.seeds):
                for name in self.given.length_arms:
                    warmup = warmups_of(name)[0]
                    yield name, warmup, self.plan(name, self.best_rate(name), steps, warmup, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/scape-quality.json"))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tune-steps", type=int, default=2_000)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--length-arms", nargs="*", default=[], help="of --arms, for --lengths")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the table and end")
    given = parser.parse_args()
    results = Results(given)
    if not given.table:
        results.make(results.tuning())
        results.make(results.final())
        results.make(results.lengths())
    print(sparse_table(results.runs, TUNING_SEED))


if __name__ == "__main__":
    main()
