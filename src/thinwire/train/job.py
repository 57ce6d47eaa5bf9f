"""From a trainer's configuration to the cost model's `Job`: same shapes, codecs and buckets.

Parameters come from the model itself, built without memory; codecs from the functions that the
trainer's systems use.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from thinwire import aquavit, sparseloco
from thinwire.eco import Format
from thinwire.errors import ConfigError
from thinwire.pipeline.carrier import make_carrier
from thinwire.pipeline.ids import ids_nbytes
from thinwire.plan import (
    Boundaries,
    Job,
    Layer,
    Outer,
    SparseSync,
    Stage,
    Storage,
    TensorLink,
    WeightsPhase,
)
from thinwire.sparseloco.rounds import note_nbytes
from thinwire.train.axes import check_ranks
from thinwire.train.config import Config
from thinwire.train.gradients import deal
from thinwire.train.model import Transformer
from thinwire.train.optim import storage_format
from thinwire.train.outer import OUTER_CODECS, outer_options
from thinwire.train.systems import gradient_codec, weight_schedule
from thinwire.train.tensor import tensor_link

__all__ = ["job_of", "job_on"]

_SCALAR = 8  # bytes of a double
_FLAG = 4  # bytes of a verdict that EcoAdamW's ranks share
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.1}
_SPLIT_COLUMNS = ("wq", "wk", "wv", "w1", "w3")
_SPLIT_ROWS = ("wo", "w2")


def job_of(
    config: Config, num_ranks: int, *, overlap: bool = False, prefetch: int = 1, name: str = ""
) -> Job:
    """Return the cost model's description of a run.

    Args:
        config: the run.
        num_ranks: ranks in all.
        overlap: weight gathers and gradient reductions fly beside the computation, as on CUDA;
            False: they hold it up, as gloo does on CPU.
        prefetch: gathers ahead, with `overlap`.
        name: for people; empty takes the recipe's.

    Raises:
        ConfigError: a configuration that doesn't fit the ranks, or that the model doesn't cover.
    """
    if config.mesh.replicas:
        raise ConfigError("mesh.replicas describes a job per replica (mixed_job.jobs_of)")
    sizes = check_ranks(config, num_ranks)
    return job_on(config, sizes, overlap=overlap, prefetch=prefetch, name=name)


def job_on(
    config: Config, sizes: dict[str, int], *, overlap: bool, prefetch: int, name: str = ""
) -> Job:
    """Return the job on a mesh that has been checked; arguments as for `job_of`.

    Raises:
        ConfigError: what the model doesn't cover.
    """
    _check_covered(config, sizes)
    model, data, compute = config.model, config.data, config.compute
    stages, params, first = _stages(config, sizes)
    parts = sizes["dp_replicate"] * sizes["dp_shard"]
    systems = config.systems
    apart = systems.outer.method != "none"
    sparse = systems.replicas.optimizer in ("scape", "topk-adamw") and sizes["dp_replicate"] > 1
    adams = systems.replicas.optimizer in ("adams", "scape")
    pipes = systems.pipeline.mode != "none"
    return Job(
        name=name or config.recipe or "run",
        mesh=sizes,
        stages=stages,
        dim=model.dim,
        tokens=data.batch_seqs // parts // data.micro_batches * data.seq_len_tokens,
        seq_len=data.seq_len_tokens,
        micro_batches=data.micro_batches,
        params=params,
        first_params=first,
        dtype=getattr(torch, compute.dtype),
        reduce_dtype=getattr(torch, compute.reduce_dtype),
        reshard=compute.reshard_after_forward != 0,
        recompute=compute.activation_checkpointing,
        sequence_parallel=compute.sequence_parallel and sizes["tp"] > 1,
        weights=_weights(config, sizes),
        gradients=gradient_codec(systems.gradients) if sizes["dp_shard"] > 1 else None,
        storage=_storage(config, sizes, stages),
        min_shard_numel=systems.weights.min_shard_numel,
        keep_wire=systems.weights.keep_wire,
        tensor=_tensor(config, sizes),
        sync=_sparse(config) if sparse else None,
        buckets=tuple(_buckets(config, sizes, stage) for stage in stages),
        boundaries=_boundaries(config, sizes) if sizes["pp"] > 1 else None,
        outer=_outer(config, sizes) if apart and sizes["dp_replicate"] > 1 else None,
        scalar_bytes=_scalars(sizes, apart) + 4 * (pipes and sizes["pp"] > 1),
        prefetch=prefetch if overlap else 0,
        blocking=not overlap,
        state_bytes=4.0 if adams else _MOMENTS[systems.storage.state],
        extra_bytes=_extra(config, sparse, apart, sizes),
        systems=_names(config, sizes),
    )


def _check_covered(config: Config, sizes: dict[str, int]) -> None:
    systems = config.systems
    if config.model.num_experts:
        raise ConfigError("the cost model covers dense models: set model.num_experts 0")
    known = ("adamw", "adams", "scape", "topk-adamw")
    if sizes["dp_replicate"] > 1 and systems.replicas.optimizer not in known:
        raise ConfigError(
            f"the cost model doesn't cover systems.replicas.optimizer "
            f"{systems.replicas.optimizer}: it knows {', '.join(known)}"
        )
    if sizes["dp_replicate"] > 1 and systems.replicas.mask_source == "union":
        raise ConfigError(
            "the bytes of systems.replicas.mask_source union depend on the data: no model covers it"
        )
    if systems.tensor.node_size or systems.tensor.slices > 1:
        raise ConfigError(
            "the cost model covers flat, whole all-reduces: set systems.tensor.node_size 0 and "
            "slices 1"
        )
    if config.compute.reshard_after_forward > 0:
        raise ConfigError("the cost model covers compute.reshard_after_forward -1 and 0")


def _stages(config: Config, sizes: dict[str, int]) -> tuple[tuple[Stage, ...], int, int]:
    """Return the stages, and the parameters of the whole model and of its first stage."""
    num, counts, made = sizes["pp"], [], []
    for index in range(num):
        with torch.device("meta"):
            module = Transformer(
                config.model, config.data.seq_len_tokens, stage=index, num_stages=num
            )
        counts.append(sum(p.numel() for p in module.parameters()))
        blocks = tuple(
            _layer(config, sizes, f"layers.{name}", block) for name, block in module.layers.items()
        )
        named = [(n, p) for n, p in module.named_parameters() if not n.startswith("layers.")]
        shapes = tuple((n, tuple(p.shape)) for n, p in named)
        root = Layer("root", shapes, _head_flops(config, sizes) if module.is_last else 0.0)
        made.append(Stage(blocks, root))
    return tuple(made), sum(counts), counts[0]


def _layer(config: Config, sizes: dict[str, int], name: str, block: nn.Module) -> Layer:
    shapes = tuple(
        (f"{name}.{n}", _split(n, tuple(p.shape), sizes["tp"])) for n, p in block.named_parameters()
    )
    tokens = _tokens(config, sizes)
    matrices = sum(math.prod(shape) for _, shape in shapes if len(shape) > 1)
    # Scores and weighted values, half of them masked: 2 products of T x dim per token.
    attention = 2.0 * config.data.seq_len_tokens * config.model.dim / sizes["tp"]
    return Layer(name, shapes, tokens * (2.0 * matrices + attention))


def _split(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Return a parameter's local shape after the tensor-parallel split (see `tensor.tp_plan`)."""
    module = name.split(".")[-2]
    if module in _SPLIT_COLUMNS:
        return (shape[0] // tp, *shape[1:])
    if module in _SPLIT_ROWS:
        return (shape[0], shape[1] // tp)
    return shape


def _tokens(config: Config, sizes: dict[str, int]) -> int:
    parts = sizes["dp_replicate"] * sizes["dp_shard"] * config.data.micro_batches
    return config.data.batch_seqs // parts * config.data.seq_len_tokens


def _head_flops(config: Config, sizes: dict[str, int]) -> float:
    return 2.0 * _tokens(config, sizes) * config.model.dim * config.model.vocab_size


def _weights(config: Config, sizes: dict[str, int]) -> tuple[WeightsPhase, ...]:
    if sizes["dp_shard"] == 1:
        return (WeightsPhase(),)
    schedule = weight_schedule(config.systems.weights, config.steps)
    if schedule is None:
        return (WeightsPhase(),)
    if isinstance(schedule, aquavit.Difference):
        raise ConfigError(
            "the cost model doesn't cover systems.weights.codec difference: choose another"
        )
    if isinstance(schedule, aquavit.Static):
        return (WeightsPhase(1.0, schedule.codec),)
    counts = Counter(schedule.level(step) for step in range(config.steps))
    return tuple(
        WeightsPhase(count / config.steps, schedule.codec(level), str(level))
        for level, count in counts.items()
    )


def _storage(config: Config, sizes: dict[str, int], stages: tuple[Stage, ...]) -> Storage | None:
    """Return which matrices lie quantized, and the messages of their optimizer."""
    cfg = config.systems.storage
    if cfg.fmt == "dense" or cfg.only_experts:  # models of experts are refused
        return None
    fmt = storage_format(cfg)
    named = {n: s for stage in stages for block in stage.blocks for n, s in block.params}
    stored = {name: shape for name, shape in named.items() if len(shape) == 2}
    # What the stage that shares most sends stands for all.
    maxima = max((_maxima_bytes(fmt, sizes, stage, stored) for stage in stages), key=_total)
    axes = {axis: found if cfg.fused_backward else (sum(found),) for axis, found in maxima.items()}
    return Storage(
        fmt=fmt,
        names=frozenset(stored),
        # Gradients are looked at before the step, new weights after it; fused, the latter alone.
        flag_bytes=(_FLAG,) if cfg.fused_backward else (_FLAG, _FLAG),
        maxima_bytes=axes,
        beside={"master": 4, "kahan": 2}.get(cfg.error, 0),
    )


def _total(maxima: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(sum, maxima.values()))


def _maxima_bytes(
    fmt: Format, sizes: dict[str, int], stage: Stage, stored: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return, per axis and matrix, bytes of the block maxima that ranks share (`eco.placement`)."""
    whole = fmt.granularity == "tensor"
    if not fmt.has_scales or fmt.granularity == "group":
        return {}
    found: dict[str, list[int]] = {"tp": [], "dp_shard": []}
    for name, shape in (p for block in stage.blocks for p in block.params if p[0] in stored):
        nbytes = 4 * (1 if whole else -(-shape[0] // sizes["dp_shard"]))
        if sizes["tp"] > 1 and (whole or name.split(".")[-2] in _SPLIT_ROWS):
            found["tp"].append(nbytes)
        if sizes["dp_shard"] > 1 and whole:
            found["dp_shard"].append(nbytes)
    return {axis: tuple(sizes) for axis, sizes in found.items() if sizes}


def _tensor(config: Config, sizes: dict[str, int]) -> TensorLink:
    if sizes["tp"] == 1:
        return TensorLink()
    link = tensor_link(config, sizes["tp"])
    return TensorLink(
        codec=link.codec,
        backward_codec=link.backward_codec,
        algorithm=link.algorithm,
        min_bytes=-1 if link.min_bytes is None else link.min_bytes,
    )


def _sparse(config: Config) -> SparseSync:
    cfg = config.systems.replicas
    dense = 1 + cfg.dense_steps + cfg.ramp_steps / 2
    return SparseSync(
        density=cfg.density,
        dense_share=min(1.0, dense / config.steps),
        values_dtype=getattr(torch, cfg.values_dtype),
        mask_format=cfg.mask_format,
        lag=cfg.lag,
        mask_source=cfg.mask_source,
        sharded=cfg.sharded,
    )


def _buckets(config: Config, sizes: dict[str, int], stage: Stage) -> tuple[tuple[int, int], ...]:
    """Return DDP's buckets: (bytes, the block whose backward fills the last of them)."""
    if sizes["dp_replicate"] == 1:
        return ()
    # In the order of model.parameters(): embedding, blocks, norm, head.
    num = len(stage.blocks)
    root = [(-1, shape) for name, shape in stage.root.params if name.startswith("embed")]
    tail = [(num, shape) for name, shape in stage.root.params if not name.startswith("embed")]
    body = [(i, shape) for i, block in enumerate(stage.blocks) for _, shape in block.params]
    every = [*root, *body, *tail]
    shards = sizes["dp_shard"]
    nbytes = [4 * -(-shape[0] // shards) * math.prod(shape[1:]) for _, shape in every]
    buckets = deal([(n, torch.float32) for n in nbytes])
    # Backward runs from the tail down to the embedding, so a bucket's lowest place ends last; the
    # tail alone is ready before the last block, whose end stands for it.
    return tuple(
        (sum(nbytes[i] for i in bucket), min(every[bucket[-1]][0], num - 1)) for bucket in buckets
    )


def _boundaries(config: Config, sizes: dict[str, int]) -> Boundaries:
    cfg, model = config.systems.pipeline, config.model
    batch = _tokens(config, sizes) // config.data.seq_len_tokens
    tokens = _tokens(config, sizes)
    dense = tokens * model.dim * getattr(torch, config.compute.dtype).itemsize
    if cfg.mode == "none":
        return Boundaries(forward_bytes=dense, backward_bytes=dense, dense_bytes=dense)
    rank = cfg.rank or max(1, model.dim // cfg.ratio)
    carrier = make_carrier(cfg.wire)
    nbytes = carrier.nbytes((batch, config.data.seq_len_tokens, rank))
    ids = ids_nbytes(tokens, model.vocab_size) if cfg.ids == "send" else 0
    return Boundaries(
        forward_bytes=nbytes + ids,
        backward_bytes=nbytes,
        dense_bytes=dense,
        flops=2.0 * tokens * model.dim * rank if cfg.basis == "random" else 0.0,
        codec=carrier.codec,
        numel=tokens * rank if carrier.codec is not None else 0,
    )


def _outer(config: Config, sizes: dict[str, int]) -> Outer:
    cfg = config.systems.outer
    with torch.device("meta"):
        whole = Transformer(config.model, config.data.seq_len_tokens)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    dense = Outer(
        sync_every=cfg.sync_every,
        numels=tuple(math.prod(shape) for shape in shapes.values()),
        gathered=tuple(_pieces(config, sizes, shapes)),
    )
    if cfg.method == "diloco":
        return replace(dense, codec=OUTER_CODECS[cfg.codec])
    return replace(
        dense,
        message_bytes=sparseloco.message_nbytes(shapes, outer_options(cfg)),
        note_bytes=note_nbytes(sizes["dp_replicate"]),
    )


def _pieces(
    config: Config, sizes: dict[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[int, int]]:
    """Return bytes and number of pieces of each parameter that ranks of a replica share."""
    found, cfg = [], config.systems.storage
    for name, shape in shapes.items():
        in_block = name.startswith("layers.")
        split = _split(name, shape, sizes["tp"]) if in_block else shape
        local = (-(-split[0] // sizes["dp_shard"]), *split[1:])
        num = sizes["dp_shard"] * (sizes["tp"] if split != shape else 1)
        if num == 1:
            continue
        stored = in_block and len(shape) == 2 and cfg.fmt != "dense"
        nbytes = storage_format(cfg).nbytes(local) if stored else 4 * math.prod(local)
        found.append((nbytes, num))
    return found


def _scalars(sizes: dict[str, int], apart: bool) -> int:
    """Return the bytes of loss and norm, as `Trainer._agree` sums them."""
    return 2 * _SCALAR * (sizes["dp_replicate"] if apart else 1)


def _extra(config: Config, sparse: bool, apart: bool, sizes: dict[str, int]) -> dict[str, float]:
    """Return bytes per local parameter that systems keep."""
    extra: dict[str, float] = {}
    if sparse:
        offloaded = config.systems.replicas.offload != "none"
        extra["residual and masks"] = 0.25 + (0.0 if offloaded else 4.0)
    if apart and sizes["dp_replicate"] > 1:
        extra["anchor and residual"] = 8.0 * sizes["dp_shard"]
    if config.systems.gradients.error_feedback:
        extra["gradient residual"] = 4.0 * sizes["dp_shard"]
    return extra


def _names(config: Config, sizes: dict[str, int]) -> dict[str, str]:
    """Return what compresses each link."""
    systems = config.systems
    found = {
        "weights": systems.weights.codec if sizes["dp_shard"] > 1 else "dense",
        "gradients": systems.gradients.codec if sizes["dp_shard"] > 1 else "dense",
        "tensor": systems.tensor.codec if sizes["tp"] > 1 else "dense",
        "pipeline": systems.pipeline.mode.replace("none", "dense"),
        "outer": systems.outer.method.replace("none", "dense"),
    }
    if systems.replicas.optimizer in ("scape", "topk-adamw") and sizes["dp_replicate"] > 1:
        found["gradients"] = systems.replicas.optimizer
    return {link: what for link, what in found.items() if what != "dense"}
