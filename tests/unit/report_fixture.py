"""A run directory as the trainer writes it, with values a test can recognise."""

import json
from pathlib import Path

LEDGER = {
    "weights": {
        "calls": 40,
        "dense_bytes": 4_000_000,
        "wire_bytes": 1_600_000,
        "exempt_bytes": 100_000,
        "encode_s": 0.25,
        "decode_s": 0.0,
        "wait_s": 0.0,
        "ratio": 2.5,
        "compressed_ratio": 2.6,
    },
    "gradients": {"calls": 20, "dense_bytes": 900_000, "wire_bytes": 900_000, "exempt_bytes": 0},
}


def run_record(**changes):
    record = {
        "config": {"steps": 20, "seed": 0, "model": {"dim": 64}, "optim": {"betas": [0.9, 0.95]}},
        "recipe": "static-6bit",
        "versions": {"thinwire": "0.1.0", "torch": "2.13.0"},
        "result": {
            "steps": 20,
            "tokens": 40_960,
            "train_loss": 2.125,
            "val_loss": 2.25,
            "val_bits_per_byte": 3.246,
            "wall_s": 185.0,
            "step_s_median": 0.4213,
        },
        "ledger": LEDGER,
        "memory": {"weight_bytes": 4_912_640, "optimizer_bytes": 9_825_280, "params": 1_228_160},
        "exemptions": [
            {"link": "weights", "name": "norm.weight", "reason": "1-D parameter", "nbytes": 256},
            {"link": "weights", "name": "head.bias", "reason": "1-D parameter", "nbytes": 1024},
        ],
    }
    return record | changes


def metrics_lines(num_steps=20, **extra):
    return [
        {
            "step": step,
            "loss": 5.0 / step,
            "lr": 1e-3,
            "tokens": step * 2048,
            "step_s": 0.42,
            "wire": {"weights": 80_000, "gradients": 45_000},
        }
        | extra
        for step in range(1, num_steps + 1)
    ]


def make_run(root: Path, name="run", record=None, lines=None) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record or run_record()))
    lines = metrics_lines() if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
