"""Time of tensor-parallel all-reduces by message size: dense, TACO's codecs, slices.

Real gloo processes on this machine; arms are interleaved in rounds, so that noise hits all alike.
Speed-ups are given over bf16 and over fp32 messages, apart. `break-even` is the link speed below
which the saved bytes outweigh encoding and decoding, with nothing overlapped:

    rate = 8 * (bf16 bytes - wire bytes) / (time without the wire)    [bit/s]

    python benchmarks/taco_speed.py --nproc 2 --json benchmarks/results/taco_speed.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire import Ledger, __version__
from thinwire.codecs import Hadamard, Tensorwise
from thinwire.comm import all_reduce
from thinwire.testing.processes import run_processes

SIZES = [2**14, 2**16, 2**18, 2**20, 2**22]  # values: 32 KiB to 8 MiB in bf16
ROUNDS = 7
E4M3 = Hadamard()
# name -> dtype, codec, slices
ARMS = {
    "fp32": (torch.float32, None, 1),
    "bf16": (torch.bfloat16, None, 1),
    "taco": (torch.bfloat16, E4M3, 1),
    "taco 2 slices": (torch.bfloat16, E4M3, 2),
    "taco 4 slices": (torch.bfloat16, E4M3, 4),
    "taco 8 slices": (torch.bfloat16, E4M3, 8),
    "taco rotated": (torch.bfloat16, Hadamard(middle="rotated"), 1),
    "int8": (torch.bfloat16, Hadamard(fmt="int8"), 1),
    "int8 no rotation": (torch.bfloat16, Hadamard(fmt="int8", hadamard=False), 1),
    "fp8 no rotation": (torch.bfloat16, Hadamard(hadamard=False, alpha=False), 1),
    "fp8 per tensor": (torch.bfloat16, Tensorwise(), 1),
}


def call(x, codec, slices, ledger):
    dist.barrier()
    start = time.perf_counter()
    all_reduce(x, codec, ledger=ledger, slices=slices, link="tensor")
    return time.perf_counter() - start


def measure(rank, sizes):
    results = {}
    for numel in sizes:
        seconds = {name: [] for name in ARMS}
        ledgers = {name: Ledger(timing=True) for name in ARMS}
        for turn in range(ROUNDS + 1):
            for name, (dtype, codec, slices) in ARMS.items():
                x = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
                # The first round compiles and warms up.
                taken = call(x, codec, slices, ledgers[name] if turn else None)
                if turn:
                    seconds[name].append(taken)
        results[numel] = {
            name: summary(seconds[name], ledgers[name]["tensor"], numel) for name in ARMS
        }
    return results


def summary(seconds, totals, numel):
    coding_s = (totals.encode_s + totals.decode_s) / ROUNDS
    wire_bytes = totals.wire_bytes // ROUNDS
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "coding_s": coding_s,
        "wait_s": totals.wait_s / ROUNDS,
        "wire_bytes": wire_bytes,
    }


def report(results, num_ranks):
    for numel, arms in results.items():
        print(f"\n{numel} values ({numel * 2 / 1024:.0f} KiB in bf16), {num_ranks} ranks")
        head = f"{'arm':<18}{'median ms':>10}{'min':>8}{'max':>8}{'coding':>8}{'wait':>8}"
        print(head + f"{'sent KiB':>10}{'/bf16':>7}{'/fp32':>7}{'break-even':>13}")
        bf16 = arms["bf16"]
        for name, a in arms.items():
            ms = [1e3 * a[k] for k in ("median_s", "min_s", "max_s", "coding_s", "wait_s")]
            gains = [arms[k]["median_s"] / a["median_s"] for k in ("bf16", "fp32")]
            saved = bf16["wire_bytes"] - a["wire_bytes"]
            rate = f"{8e-6 * saved / a['coding_s']:.0f} Mbit/s" if a["coding_s"] else ""
            print(
                f"{name:<18}{ms[0]:>10.2f}"
                + "".join(f"{m:>8.2f}" for m in ms[1:])
                + f"{a['wire_bytes'] / 1024:>10.0f}{gains[0]:>7.2f}{gains[1]:>7.2f}{rate:>13}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--max-values", type=int, default=SIZES[-1])
    args = parser.parse_args()
    sizes = [n for n in SIZES if n <= args.max_values]
    results = run_processes(args.nproc, measure, sizes, timeout_s=600.0)[0]
    report(results, args.nproc)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "thinwire": __version__,
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "num_ranks": args.nproc,
            "rounds": ROUNDS,
        }
        text = json.dumps({"about": about, "results": results}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
