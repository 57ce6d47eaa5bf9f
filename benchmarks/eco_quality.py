"""Validation loss of ECO and its rivals over seeds: small rate and many steps.

Each arm is a recipe; all share model, data and rate. At a small rate most steps move a weight by
less than half a grid gap, which rounding to nearest drops and stochastic rounding turns into
diffusion. Run as `python benchmarks/eco_quality.py`; finished runs are kept, so it can be
interrupted. Writes runs/eco-quality/compare.json and its page, prints the verdicts.
"""

import argparse
import json
import sys
from pathlib import Path

from thinwire.lab.compare import main as compare
from thinwire.report import write_compare

ARMS = (
    "master-fp8-rtn", "eco-fp8-sr", "eco-fp8-rtn", "naive-fp8-rtn", "naive-fp8-sr",
    "dense-adamw", "bf16-naive", "bf16-sr", "bf16-kahan", "master-fp8-sr", "eco-fp8-sr-8bit",
)  # fmt: skip
SETTINGS = (
    "model.dim=96", "model.num_layers=2", "model.hidden_dim=288", "optim.lr=2e-4",
    "optim.warmup_steps=100", "data.seq_len_tokens=64", "data.batch_seqs=8",
    "evaluation.num_seqs=1024", "checkpoints.every_steps=2000", "checkpoints.keep=1",
)  # fmt: skip
MARGIN = 0.0025


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", default="sotu")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="the first is the reference")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="runs/eco-quality")
    given = parser.parse_args()
    arguments = [*given.arms, "--steps", str(given.steps), "--seeds", str(given.seeds)]
    arguments += ["--data", given.data, "--out", given.out, "--margin", str(MARGIN)]
    arguments += ["--jobs", str(given.jobs), "--nproc", "1"]
    for setting in SETTINGS:
        arguments += ["--set", setting]
    status = compare(arguments, write_compare)
    results = json.loads((Path(given.out) / "compare.json").read_text())
    arms = {arm["name"]: arm["loss"]["mean"] for arm in results["arms"]}
    reference = arms[given.arms[0]]
    for name, loss in arms.items():
        print(f"{name:<18}{loss:9.4f}  {100 * (loss / reference - 1):+7.3f} %")
    return status


if __name__ == "__main__":
    sys.exit(main())
