"""Do SCAPE's masks hide under the computation? Launch and wait of the mask exchange over links.

Two ranks train `scape-99` over shaped links (as `thinwire lab` makes them; needs root). Masks leave
at the end of a step and are waited for at the start of the next exchange: the window between is the
forward and backward pass. While the masks' transfer is shorter than the window, nothing waits.

    python benchmarks/mask_wait.py --out mask_wait.json
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from thinwire.lab.arms import arm_config, parse_arm, parse_settings
from thinwire.lab.links import parse_rate, shaped_links
from thinwire.train.launch import Place, launch
from thinwire.train.loop import Trainer
from thinwire.train.metrics import versions
from thinwire.train.parse import from_dict

HERE = Path(__file__).resolve().parent
RATES = "1gbit", "100mbit", "20mbit", "5mbit", "2mbit"
SETTINGS = (
    "model.dim=288", "model.num_layers=4", "model.hidden_dim=864", "model.num_heads=12",
    "model.num_kv_heads=12", "data.seq_len_tokens=32", "data.batch_seqs=12", "compute.threads=1",
    "systems.replicas.dense_steps=0",
)  # fmt: skip
WARMUP, STEPS = 3, 20
RANKS = 2


def measure(payload: dict[str, Any]) -> list[dict[str, float]]:
    """Train and return each step's figures; what every rank runs."""
    trainer = Trainer.build(from_dict(payload["config"]), torch.device("cpu"))
    steps = []
    for _ in range(WARMUP + STEPS):
        record = trainer.train_step()
        names = ("step_s", "mask_window_s", "mask_wait_s", "mask_message_bytes")
        steps.append({name: float(record[name]) for name in names})
    return steps[WARMUP:]


def run(rate: str) -> dict[str, float | str]:
    """Return the medians over steps and ranks at one rate."""
    config = arm_config(
        parse_arm("scape-99", parse_settings(list(SETTINGS))),
        ["--data.source", "synthetic", "--steps", str(WARMUP + STEPS)],
    )
    with shaped_links([parse_rate(rate)] * RANKS) as links:
        places = [Place(tuple(links.prefix(r)), links.environment) for r in range(RANKS)]
        ranks = launch(RANKS, "mask_wait:measure", {"config": config}, places)
    found = {
        name: statistics.median(step[name] for rank in ranks for step in rank)
        for name in ("step_s", "mask_window_s", "mask_wait_s", "mask_message_bytes")
    }
    # Owners send about half of the messages each, at the same time.
    transfer_s = 8 * found["mask_message_bytes"] / RANKS / parse_rate(rate)
    waits = [step["mask_wait_s"] for rank in ranks for step in rank]
    return {"rate": rate, "transfer_s": transfer_s, "mask_wait_max_s": max(waits)} | found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    rows = []
    for rate in RATES:
        row = run(rate)
        rows.append(row)
        print(
            f"{rate:>8}: masks of {row['mask_message_bytes']:.0f} bytes need "
            f"{1e3 * row['transfer_s']:.1f} ms, have {1e3 * row['mask_window_s']:.1f} ms, waited "
            f"for {1e3 * row['mask_wait_s']:.2f} ms (most {1e3 * row['mask_wait_max_s']:.2f})",
            flush=True,
        )
    if given.out:
        given.out.write_text(json.dumps({"mask_waits": rows, "versions": versions()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
