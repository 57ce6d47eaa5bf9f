"""The papers' headline ratios, predicted by thinwire.plan from their published set-ups.

One set of constants serves every row: a device computes half of its data sheet's 16-bit peak, links
carry 80 % of their nominal speed, coding kernels reach half of the memory's bandwidth and are fused
(no start-up time). Coding holds up the computation. Nothing is fitted to a claim. Where a set-up
isn't published in full, the row says what was assumed; where the claim lies outside of what any
choice of that assumption gives, it says so.

    python benchmarks/papers.py --json papers.json
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from thinwire import sparseloco
from thinwire.codecs import Blockwise, Hadamard
from thinwire.plan import Cluster, ClusterCosts, Device, Job, Line, Sites, SparseSync, predict
from thinwire.plan.build import workload_of
from thinwire.plan.job import Outer, TensorLink, WeightsPhase
from thinwire.plan.workload import Message
from thinwire.sparseloco import Options
from thinwire.train.job import job_of
from thinwire.train.metrics import versions
from thinwire.train.model import Transformer
from thinwire.train.parse import from_dict
from thinwire.train.recipes import recipe

COMPUTE_SHARE, LINK_SHARE, CODEC_SHARE = 0.5, 0.8, 0.5
INSIDE_S, ACROSS_S = 3e-6, 5e-6
# Data sheets: 16-bit dense peak (TFLOP/s), memory (GB/s), link inside a node (Gbit/s, one way).
SHEETS = {"V100": (125, 900, 1200), "GH200": (989, 4000, 3600), "H800": (989, 3350, 1600)}

# model -> (width, layers, heads, key-value heads, feed-forward, vocabulary)
SHAPES = {
    "LLaMA-3.3-70B": (8192, 80, 64, 8, 28672, 128_256),
    "LLaMA-3.3-70B, 72B with its vocabulary": (8192, 80, 64, 8, 28672, 262_208),
    "Llama-1.8B": (2048, 24, 16, 16, 8192, 32_000),
    "GPT-like 18B": (6144, 38, 48, 48, 16_384, 50_304),
    "GPT-like 6.7B": (4096, 32, 32, 32, 10_880, 50_304),
    "Llama-8B": (4096, 32, 32, 8, 14_336, 128_256),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prediction beside its claim.

    Attributes:
        paper: whose claim.
        arm: what is predicted.
        predicted: the ratio, share or seconds.
        claimed: the published one; None for arms that only tell readings apart.
        unit: of both.
        assumption: what matters most.
        reach: in words, whether the published set-up can give the claim.
    """

    paper: str
    arm: str
    predicted: float
    claimed: float | None
    unit: str = "x"
    assumption: str = ""
    reach: str = ""

    @property
    def error(self) -> float | None:
        return self.predicted / self.claimed - 1 if self.claimed else None


def cluster(device: str, nodes: int, per_node: int, across_gbit: float, **changes) -> Cluster:
    tflops, memory, inside = SHEETS[device]
    return Cluster(
        nodes=nodes,
        devices_per_node=per_node,
        inside=Line(gbit_per_s=LINK_SHARE * inside, latency_s=INSIDE_S),
        across=Line(gbit_per_s=LINK_SHARE * across_gbit, latency_s=ACROSS_S),
        device=Device(
            tflops=COMPUTE_SHARE * tflops,
            memory_gbyte_per_s=memory,
            codec_share=CODEC_SHARE,
            kernel_s=0.0,
        ),
        **changes,
    )


def model(name: str) -> dict:
    keys = ("dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "vocab_size")
    return dict(zip(keys, SHAPES[name], strict=True))


def job(name: str, ranks: int, mesh: dict, data: dict, *, base: str = "dense-fsdp", **options
        ) -> Job:  # fmt: skip
    compute = {"dtype": options.pop("dtype", "bfloat16")}
    compute["reduce_dtype"] = options.pop("reduce_dtype", "bfloat16")
    compute["activation_checkpointing"] = options.pop("recompute", True)
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | mesh
    values = {"model": model(name), "mesh": axes, "data": data, "compute": compute, "steps": 1000}
    config = from_dict(values, recipe(base))
    return replace(job_of(config, ranks, overlap=True), **options)


def step(made: Job, on: Cluster):
    return predict(workload_of(made), ClusterCosts(on, made.mesh))


# Aquavit and ZeRO++


def aquavit_rows() -> list[Row]:
    """256 V100 in 32 nodes, 200 Gbit/s each; 70B, batch 1024 in 4 micro-steps, sequences of 512."""
    data = {"batch_seqs": 1024, "micro_batches": 4, "seq_len_tokens": 512}
    zero = job("LLaMA-3.3-70B", 256, {"dp_shard": 256}, data)
    coded = job("LLaMA-3.3-70B", 256, {"dp_shard": 256}, data, base="aquavit")
    static = (WeightsPhase(1.0, Blockwise(bits=6, block_size=2048)),)
    int4 = Blockwise(bits=4, block_size=128)
    node = {"node_size": 8}
    arms = {
        "weights alone, FP16 gradients in every micro-step": (coded, True, {}),
        "weights alone, gradients once in 4 micro-steps": (coded, False, {}),
        "weights and a second copy in each node (hpZ)": (coded, True, node | {"second_copy": True}),
        "weights and INT4 gradients (qgZ)": (coded, True, node | {"two_hops": True,
                                                                  "gradients": int4}),
        "static 6 bits in place of Aquavit, gradients once": (replace(coded, weights=static),
                                                              False, {}),
    }  # fmt: skip
    notes = {
        "weights alone, FP16 gradients in every micro-step": (
            "the traffic allows 1.74x at most: cannot be reached with this reading"),
        "weights alone, gradients once in 4 micro-steps": (
            "needs gradients kept unreduced over 4 micro-steps"),
        "weights and a second copy in each node (hpZ)": "needs a part of ZeRO++ not named",
        "weights and INT4 gradients (qgZ)": "needs a part of ZeRO++ not named",
    }  # fmt: skip
    rows = []
    for gbit in (200, 50):
        on = cluster("V100", 32, 8, gbit)
        for name, (made, every, options) in arms.items():
            dense = step(replace(zero, reduce_every_micro_batch=every), on)
            arm = step(replace(made, reduce_every_micro_batch=every, **options), on)
            rows.append(
                Row(
                    paper="Aquavit",
                    arm=f"{name}; {gbit} Gbit/s",
                    predicted=dense.step_s / arm.step_s,
                    claimed=2.15 if gbit == 200 and "static" not in name else None,
                    assumption="when gradients are reduced, and which parts of ZeRO++ are on",
                    reach=notes.get(name, "") if gbit == 200 else "",
                )
            )
    return rows


def zeropp_rows() -> list[Row]:
    """384 V100 in 24 nodes of 16; 18B, 1k tokens per GPU; one or eight cards of 100 Gbit/s."""
    data = {"batch_seqs": 384, "micro_batches": 1, "seq_len_tokens": 1024}
    zero = job("GPT-like 18B", 384, {"dp_shard": 384}, data)
    int8 = Blockwise(bits=8, block_size=2048, symmetric=True)
    parts = {
        "weights": (WeightsPhase(1.0, int8),),
        "gradients": Blockwise(bits=4, block_size=128),
        "node_size": 16,
        "second_copy": True,
        "two_hops": True,
    }
    rows = []
    ways = {"gathers prefetched": {}, "nothing overlapped": {"prefetch": 0, "blocking": True}}
    for gbit, claimed in ((100, 2.16), (400, 1.32)):
        on = cluster("V100", 24, 16, gbit)
        for way, options in ways.items():
            dense, arm = (step(replace(zero, **p, **options), on) for p in ({}, parts))
            rows.append(
                Row(
                    paper="ZeRO++",
                    arm=f"384 GPUs, {gbit} Gbit/s a node, {way}",
                    predicted=dense.step_s / arm.step_s,
                    claimed=claimed,
                    assumption="model 18B and 1k tokens per GPU; how much traffic is overlapped",
                    reach="the claim is 'up to'" if gbit == 100 else "28 to 36 % claimed",
                )
            )
    return rows


# SCAPE


def scape_rows() -> list[Row]:
    """1.8B on 4 to 64 GH200, one per node, 400 Gbit/s; the batch is not published."""
    rows = []
    for sequences in (128, 512):
        at = {n: scape_steps(n, sequences, 2048) for n in (4, 64)}
        dense, sparse, sharded = at[64]
        given = f"batch of {sequences} sequences of 2048 tokens, not published"
        bound = "a dense 2n parameter gather caps the traffic's gain at 3x"
        rows += [
            Row(paper="SCAPE", arm=f"step at 64 GPUs, {sequences} sequences",
                predicted=dense / sparse, claimed=3.26, assumption=given),
            Row(paper="SCAPE", arm=f"the same, owners send 16-bit weights, {sequences} sequences",
                predicted=dense / sharded, claimed=3.26, assumption=given, reach=bound),
            Row(paper="SCAPE", arm=f"dense strong scaling 4 to 64, {sequences} sequences",
                predicted=100 * efficiency(at, 0), claimed=17.58, unit="%", assumption=given),
            Row(paper="SCAPE", arm=f"SCAPE strong scaling 4 to 64, {sequences} sequences",
                predicted=100 * efficiency(at, 1), claimed=55.04, unit="%", assumption=given),
        ]  # fmt: skip
    return [*rows, *scape_consistency()]


def efficiency(at: dict[int, tuple[float, ...]], which: int) -> float:
    return at[4][which] * 4 / (at[64][which] * 64)


def scape_steps(ranks: int, sequences: int, length: int) -> tuple[float, float, float]:
    """Return seconds of dense AdamS (distributed optimizer), SCAPE 99 %, and sharded SCAPE."""
    on = cluster("GH200", ranks, 1, 400)
    data = {"batch_seqs": sequences, "micro_batches": 1, "seq_len_tokens": length}
    serial = {"prefetch": 0, "blocking": True, "recompute": False}
    # fp32 reduce-scatter and 16-bit gather once a step: Megatron's distributed optimizer, 6n bytes.
    dense = job("Llama-1.8B", ranks, {"dp_shard": ranks}, data, reduce_dtype="float32",
                reshard=False, **serial)  # fmt: skip
    whole = job("Llama-1.8B", ranks, {"dp_replicate": ranks}, data, base="dense-adams", **serial)
    sync = SparseSync(density=0.01)
    return (
        step(dense, on).step_s,
        step(replace(whole, sync=sync), on).step_s,
        step(replace(whole, sync=replace(sync, sharded=True)), on).step_s,
    )


def scape_consistency() -> list[Row]:
    """Do the three claims fit each other? The batch that gives the dense 17.58 %, and what then."""
    short = 256  # tokens of a sequence: the batch is a multiple of 64 sequences

    def steps(sequences: int) -> dict[int, tuple[float, ...]]:
        return {n: scape_steps(n, sequences, short) for n in (4, 64)}

    low, high = 64, 65_536
    while high - low > 64:
        middle = (low + high) // 128 * 64
        low, high = (middle, high) if efficiency(steps(middle), 0) < 0.1758 else (low, middle)
    at = steps(high)
    given = f"the batch ({high * short} tokens) is solved from the claimed 17.58 %: do they fit?"
    return [
        Row(paper="SCAPE", arm="step at 64 GPUs, batch from 17.58 %",
            predicted=at[64][0] / at[64][1], claimed=3.26, assumption=given),
        Row(paper="SCAPE", arm="SCAPE strong scaling, batch from 17.58 %",
            predicted=100 * efficiency(at, 1), claimed=55.04, unit="%", assumption=given),
    ]  # fmt: skip


# TACO


def taco_rows() -> list[Row]:
    """H800 nodes; which model and mesh the 1.87x belongs to is not published."""
    rows = []
    codec = TensorLink(codec=Hadamard(fmt="e4m3", group=128))
    data = {"batch_seqs": 8, "micro_batches": 1, "seq_len_tokens": 2048}
    near, far = "inside a node", "across nodes, 400 Gbit/s"
    for tp, per_node, where in ((2, 8, near), (4, 8, near), (8, 8, near), (8, 1, far)):
        on = cluster("H800", max(1, tp // per_node), per_node, 400)
        for dtype, share in (("bfloat16", 1.88), ("float32", 3.76)):
            made = job("GPT-like 6.7B", tp, {"tp": tp}, data, base="dense-tp", dtype=dtype,
                       recompute=False)  # fmt: skip
            dense, arm = step(made, on), step(replace(made, tensor=codec), on)
            waits = dense.waiting_s / dense.step_s
            need = (1 - 1 / 1.87) / (1 - 1 / share)
            rows.append(
                Row(
                    paper="TACO",
                    arm=f"TP {tp} {where}, against {dtype} traffic",
                    predicted=dense.step_s / arm.step_s,
                    claimed=1.87,
                    assumption=f"{waits:.0%} of the dense step is TP traffic here; 1.87x needs "
                    f"{need:.0%}",
                    reach="cannot be reached from the published set-up" if waits < need else "",
                )
            )
    return rows


# SparseLoCo


def sparseloco_rows() -> list[Row]:
    """72B, 20 peers behind 110 Mbit/s up and 500 Mbit/s down, a store between them."""
    rows = []
    cases = (
        ("72B, 20 peers", "LLaMA-3.3-70B, 72B with its vocabulary", 20, 70.0, 1200.0),
        ("8B, 15 peers", "Llama-8B", 15, 12.0, 270.0),
    )
    for what, name, peers, claimed, work_s in cases:
        nbytes = message_bytes(name)
        for unit, factor in (("bit", 1), ("byte", 8)):
            seconds = exchange_s(nbytes, peers, 0.110 * factor, 0.500 * factor)
            given = f"110 and 500 M{unit}/s; message {nbytes / 1e9:.2f} GB; a store takes it once"
            far = "cannot be reached from the published link speeds" if factor == 1 else ""
            rows += [
                Row(paper="SparseLoCo", arm=f"{what}: exchange at mega{unit}s", predicted=seconds,
                    claimed=claimed, unit="s", assumption=given, reach=far),
                Row(paper="SparseLoCo", arm=f"{what}: share of time spent computing, mega{unit}s",
                    predicted=100 * work_s / (work_s + seconds),
                    claimed=100 * work_s / (work_s + claimed), unit="%", assumption=given),
            ]  # fmt: skip
    return rows


def message_bytes(name: str) -> int:
    config = from_dict({"model": model(name)}, recipe("dense-fsdp"))
    with torch.device("meta"):
        whole = Transformer(config.model, 128)
    shapes = {n: tuple(p.shape) for n, p in whole.named_parameters()}
    return sparseloco.message_nbytes(shapes, Options(k=64, quant="paper"))


def exchange_s(nbytes: int, peers: int, up_gbit: float, down_gbit: float) -> float:
    sites = Sites(count=peers, up_gbit_per_s=up_gbit, down_gbit_per_s=down_gbit, relay=True)
    on = cluster("V100", peers, 1, 1.0, sites=sites)
    mesh = {"pp": 1, "dp_replicate": peers, "dp_shard": 1, "tp": 1}
    outer = Outer(sync_every=30, message_bytes=nbytes)
    message = Message("outer", "dp_replicate", "all_gather", outer.message_bytes, peers, 0)
    return ClusterCosts(on, mesh).seconds(message)


PAPERS = {
    "aquavit": aquavit_rows,
    "zeropp": zeropp_rows,
    "scape": scape_rows,
    "taco": taco_rows,
    "sparseloco": sparseloco_rows,
}


def text(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.2f}{'' if unit == 'x' else ' '}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("papers", nargs="*", help=", ".join(PAPERS))
    given = parser.parse_args()
    rows = [row for name in given.papers or PAPERS for row in PAPERS[name]()]
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.0%}"
        print(
            f"{row.paper:11}{row.arm:66}{text(row.predicted, row.unit):>10}"
            f"{text(row.claimed, row.unit):>10}{error:>7}  {row.reach or row.assumption}"
        )
    if given.json:
        claims = [row.__dict__ | {"error": row.error} for row in rows]
        constants = {"compute": COMPUTE_SHARE, "link": LINK_SHARE, "codec": CODEC_SHARE}
        result = {
            "command": "python benchmarks/papers.py",
            "constants": constants | {"sheets": SHEETS},
            "versions": versions(),
            "claims": claims,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
