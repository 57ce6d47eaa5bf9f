"""What a run is, in numbers: its model, mesh, batch, and what compresses each link.

A `Job` holds what `build.workload_of` needs and knows nothing of the trainer, so that any training
script can be described: shapes, floating-point operations, codecs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.plan.stored import Storage

__all__ = [
    "AXES",
    "Boundaries",
    "Job",
    "Layer",
    "Outer",
    "SparseSync",
    "Stage",
    "TensorLink",
    "WeightsPhase",
]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that are gathered together, and their arithmetic.

    Attributes:
        name: for people.
        params: (full name, local shape after tensor parallelism) in the order of the flat buffer.
        forward_flops: of one micro-batch on one rank.
    """

    name: str
    params: tuple[tuple[str, tuple[int, ...]], ...]
    forward_flops: float

    @property
    def numel(self) -> int:
        """Return all parameters."""
        return sum(torch.Size(shape).numel() for _, shape in self.params)


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: its blocks in order, and what lies around them (embedding, head)."""

    blocks: tuple[Layer, ...]
    root: Layer

    @property
    def numel(self) -> int:
        """Return the parameters of the stage."""
        return self.root.numel + sum(block.numel for block in self.blocks)


@dataclass(frozen=True, slots=True)
class WeightsPhase:
    """How weight gathers travel during a share of the run's steps; codec None: dense."""

    share: float = 1.0
    codec: Codec | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLink:
    """How tensor-parallel messages travel (see `taco.Link`)."""

    codec: Codec | None = None
    backward_codec: Codec | None = None
    algorithm: str = "auto"
    min_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSync:
    """SCAPE's exchange over dp_replicate, or that of an optimizer on the same wire.

    Attributes:
        density: of sparse steps.
        dense_share: fraction of steps that send everything.
        values_dtype: of values on the wire.
        mask_format: see `scape.messages`.
        lag: 1 hides the mask exchange under the next step.
        mask_source: "owner", or "random", whose masks cost no bytes.
        sharded: owners alone hold float32 weights and send the result.
    """

    density: float
    dense_share: float = 0.0
    values_dtype: torch.dtype = torch.float32
    mask_format: str = "auto"
    lag: int = 1
    mask_source: str = "owner"
    sharded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundaries:
    """Bytes that cross between stages per micro-batch.

    Attributes:
        forward_bytes: activations, ids included.
        backward_bytes: their gradients.
        dense_bytes: either way, uncompressed.
        flops: of projecting at one boundary, one way.
        codec: what packs coefficients, if a codec does.
        numel: coefficients per micro-batch.
    """

    forward_bytes: int
    backward_bytes: int
    dense_bytes: int
    flops: float = 0.0
    codec: Codec | None = None
    numel: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """An exchange between replicas every `sync_every` steps.

    Attributes:
        sync_every: inner steps of a round.
        message_bytes: what a replica hands in; 0: dense, one all-reduce per tensor.
        codec: of a dense exchange.
        note_bytes: of the votes on a round.
        numels: weights of each parameter, which the first rank of a replica exchanges whole;
            empty: those of the stage, as its shapes say.
        gathered: per parameter that lies in pieces on a replica's ranks, (bytes, pieces) that the
            first one collects before the exchange; it hands them all out afterwards.
        owned: where stages exchange parts of their own: per stage, (bytes, weights) of each
            message, in place of `message_bytes`.
        handed_on: (bytes, weights) of what the first stage hands to each later one.
    """

    sync_every: int
    message_bytes: int = 0
    codec: Codec | None = None
    note_bytes: int = 0
    numels: tuple[int, ...] = ()
    gathered: tuple[tuple[int, int], ...] = ()
    owned: tuple[tuple[tuple[int, int], ...], ...] = ()
    handed_on: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run.

    Attributes:
        name: for people.
        mesh: ranks per axis of `AXES`, all present.
        stages: one per rank of `pp`.
        dim: width of the residual stream.
        tokens: of one micro-batch on one rank.
        seq_len: tokens of a sequence.
        micro_batches: per step.
        params: of the whole model.
        dtype: of gathered weights and activations.
        reduce_dtype: of gradients in the reduce-scatter.
        reshard: gather again in backward.
        recompute: blocks run forward again in backward.
        sequence_parallel: pieces of the sequence between split matrices.
        reduce_every_micro_batch: reduce gradients after each micro-batch, not the last alone.
        weights: phases of the weight gathers.
        gradients: codec of the gradient reduce-scatter.
        storage: matrices that lie quantized in memory; None: all weights are float32.
        min_shard_numel: smaller shards travel raw.
        keep_wire: how long gathered bytes stay, "none", "forward" or "accumulate".
        tensor: tensor-parallel link.
        sync: None averages dense gradients over dp_replicate in `buckets`.
        buckets: per stage, (bytes, block index whose backward completes it; -1 the root's).
        boundaries: pipeline link; None where pp is 1.
        outer: rounds between replicas.
        apart: replicas don't sync each step.
        scalar_bytes: of the all-reduce of loss and norm.
        prefetch: gathers in flight ahead of the layer that computes; 0 blocks, as on gloo.
        node_size: ranks of a node, for the two published forms below; 0: neither is in use.
        second_copy: the node's ranks hold a 16-bit copy together, from which backward gathers
            (hpZ of ZeRO++).
        two_hops: coded gradients are reduced inside the node, then across (qgZ of ZeRO++).
        blocking: reduce-scatters hold up the host, as on gloo.
        first_params: of the first stage before tensor parallelism; 0: as its shapes say.
        state_bytes: optimizer state per parameter.
        extra_bytes: memory of systems per local parameter, by name.
    """

    name: str
    mesh: Mapping[str, int]
    stages: tuple[Stage, ...]
    dim: int
    tokens: int
    seq_len: int
    micro_batches: int
    params: int
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    reshard: bool = True
    recompute: bool = False
    sequence_parallel: bool = False
    reduce_every_micro_batch: bool = False
    weights: tuple[WeightsPhase, ...] = (WeightsPhase(),)
    gradients: Codec | None = None
    storage: Storage | None = None
    min_shard_numel: int = 1024
    keep_wire: str = "none"
    tensor: TensorLink = field(default_factory=TensorLink)
    sync: SparseSync | None = None
    buckets: tuple[tuple[tuple[int, int], ...], ...] = ((),)
    boundaries: Boundaries | None = None
    outer: Outer | None = None
    scalar_bytes: int = 16
    prefetch: int = 1
    node_size: int = 0
    second_copy: bool = False
    two_hops: bool = False
    blocking: bool = False
    first_params: int = 0
    state_bytes: float = 8.0
    extra_bytes: Mapping[str, float] = field(default_factory=dict)
    systems: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.mesh) != set(AXES) or any(size < 1 for size in self.mesh.values()):
            raise ConfigError(f"mesh needs the axes {', '.join(AXES)}, each at least 1")
        if len(self.stages) != self.mesh["pp"]:
            raise ConfigError(f"mesh.pp {self.mesh['pp']} needs as many stages")
        for name in ("tokens", "micro_batches", "params"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        nodes = self.mesh["dp_shard"]
        if (self.second_copy or self.two_hops) and (
            self.node_size < 2 or nodes % self.node_size or nodes == self.node_size
        ):
            raise ConfigError(
                f"second_copy and two_hops need node_size to divide mesh.dp_shard {nodes}"
            )
        if self.mesh["pp"] > 1 and self.boundaries is None:
            raise ConfigError("several stages need boundaries")

    @property
    def num_ranks(self) -> int:
        """Return the product of the axes."""
        return torch.Size(self.mesh.values()).numel()
