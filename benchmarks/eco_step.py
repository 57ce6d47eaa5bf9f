"""A step of EcoAdamW and AdamS beside torch's fused AdamW on as many weights, in turns.

OMP_WAIT_POLICY=passive python benchmarks/eco_step.py --out eco_step.json

Without that setting torch's workers spin after their step and slow down whoever comes next.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from thinwire import eco
from thinwire.scape import AdamS
from thinwire.train.metrics import versions

SIZE = 4096
ARMS: dict[str, tuple[str, dict]] = {
    "AdamS, fused": ("adams", {}),
    "fp8, nearest": ("fp8_e4m3", {"rounding": "rtn"}),
    "fp8, stochastic": ("fp8_e4m3", {}),
    "int8, stochastic": ("int8", {}),
    "int4, stochastic": ("int4", {}),
    "fp8, stochastic, bf16 states": ("fp8_e4m3", {"state_dtype": "bf16"}),
    "fp8, stochastic, 8-bit states": ("fp8_e4m3", {"state_dtype": "8bit"}),
}


def make_step(fmt: str | None, options: dict) -> Callable[[], float]:
    """Return what takes a step on one matrix and tells its seconds; fmt None is torch's AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    grad = torch.randn(SIZE, SIZE) * 1e-3
    if fmt is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    elif fmt == "adams":
        optimizer = AdamS(model.parameters(), lr=1e-3, fused=True)
    else:
        eco.quantize_(model, fmt)
        optimizer = eco.EcoAdamW(model.parameters(), lr=1e-3, **options)
    weight = model[0].weight

    def step() -> float:
        weight.grad = grad
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    steps = {"torch AdamW, fused": make_step(None, {})}
    steps |= {name: make_step(*arm) for name, arm in ARMS.items()}
    for step in steps.values():
        step(), step()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(given.rounds)]
    base = "torch AdamW, fused"
    rows = []
    for name in steps:
        ratio = statistics.median(taken[name] / taken[base] for taken in rounds)
        seconds = statistics.median(taken[name] for taken in rounds)
        rows.append({"arm": name, "step_s": seconds, "ratio": ratio})
        print(f"{name:<30} {1e3 * seconds:7.2f} ms  {ratio:5.2f}x")
    if given.out:
        about = {"weights": SIZE * SIZE, "threads": given.threads, "versions": versions()}
        given.out.write_text(json.dumps(about | {"optimizer_steps": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
