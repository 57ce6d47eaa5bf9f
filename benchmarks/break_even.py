"""Below which link speed do compressed weight gathers pay? From codec times measured in real steps.

One run trains the same model with dense and with compressed gathers, steps interleaved in rounds,
and times encoding and decoding inside the steps. A gather saves (dense - wire) bytes and costs its
encode and decode time, so it pays on links slower than

    break-even rate = 8 * (dense_bytes - wire_bytes) / (encode_s + decode_s)    [bit/s]

with nothing overlapped, the worst case for compression. Run on an otherwise idle machine:

    python benchmarks/break_even.py --nproc 2 --json benchmarks/results/break_even.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire import Ledger, __version__, aquavit
from thinwire.aquavit import Schedule, Static
from thinwire.codecs import Blockwise
from thinwire.testing.processes import run_processes

DIM, LAYERS, TOKENS, ROUNDS, STEPS = 512, 4, 256, 5, 4


def arms(total_steps):
    return {
        "dense": None,
        "static-6bit": Static(Blockwise(bits=6, block_size=2048)),
        "aquavit first level": Static(Blockwise(bits=2, block_size=1024)),
        "aquavit last level": Static(Blockwise(bits=6, block_size=32)),
        "aquavit": Schedule(total_steps),
    }


def build(schedule, num_ranks, ledger):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))
            for _ in range(LAYERS)
        )
    )
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if schedule is not None or ledger is not None:
        aquavit.attach(model, schedule, ledger=ledger)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model, optimizer, x):
    F.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(rank, num_ranks):
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(rank))
    ledgers = {name: Ledger(timing=True) for name in arms(1)}
    runs = {n: build(s, num_ranks, ledgers[n]) for n, s in arms(ROUNDS * STEPS + 2).items()}
    for model, optimizer in runs.values():
        for _ in range(2):  # compile kernels, fill caches
            step(model, optimizer, x)
    start = {n: ledgers[n].to_dict() for n in runs}
    times = {n: [] for n in runs}
    for _ in range(ROUNDS):
        for name, (model, optimizer) in runs.items():
            for _ in range(STEPS):
                began = time.perf_counter()
                step(model, optimizer, x)
                times[name].append(time.perf_counter() - began)
    rows = {}
    for name in runs:
        now, before = ledgers[name].to_dict()["weights"], start[name]["weights"]
        delta = {
            k: now[k] - before[k] for k in ("dense_bytes", "wire_bytes", "encode_s", "decode_s")
        }
        steps = ROUNDS * STEPS
        codec_s = delta["encode_s"] + delta["decode_s"]
        saved = delta["dense_bytes"] - delta["wire_bytes"]
        rows[name] = {
            "step_s_median": statistics.median(times[name]),
            "dense_bytes_per_step": delta["dense_bytes"] / steps,
            "wire_bytes_per_step": delta["wire_bytes"] / steps,
            "encode_s_per_step": delta["encode_s"] / steps,
            "decode_s_per_step": delta["decode_s"] / steps,
            "break_even_gbps": 8e-9 * saved / codec_s if saved and codec_s else None,
        }
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = run_processes(options.nproc, measure, options.nproc, timeout_s=500)[0]
    for name, row in rows.items():
        rate = row["break_even_gbps"]
        pays = "" if rate is None else f"pays below {rate:.2f} Gbit/s"
        print(
            f"{name:20s} step {1e3 * row['step_s_median']:7.1f} ms   sent "
            f"{row['wire_bytes_per_step'] / 1e6:6.2f} MB   "
            f"encode {1e3 * row['encode_s_per_step']:6.1f} ms"
            f"   decode {1e3 * row['decode_s_per_step']:6.1f} ms   {pays}"
        )
    if options.json:
        versions = {"thinwire": __version__, "torch": torch.__version__}
        facts = {"nproc": options.nproc, "versions": versions, "machine": platform.processor()}
        options.json.write_text(json.dumps({**facts, "arms": rows}, indent=1))


if __name__ == "__main__":
    main()
