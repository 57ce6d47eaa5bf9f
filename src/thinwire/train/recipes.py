"""Recipes: functions that return a configuration, found by name in one dict."""

from collections.abc import Callable
from dataclasses import replace

from thinwire.train.combined import COMBINED
from thinwire.train.config import (
    Compute,
    Config,
    Data,
    Evaluation,
    Gradients,
    Mesh,
    Model,
    Optim,
    Outer,
    Pipeline,
    Replicas,
    Storage,
    Systems,
    Tensor,
    Weights,
)
from thinwire.train.parse import near

__all__ = ["DEFAULT", "OUTER", "RECIPES", "REPLICAS", "recipe"]

Recipe = Callable[[], Config]

DEFAULT = "aquavit"


def dense_ddp() -> Config:
    """Whole model on every rank, gradients averaged by all-reduce."""
    return Config(mesh=Mesh(dp_replicate=-1, dp_shard=1))


def dense_fsdp() -> Config:
    """FSDP2 over all ranks, nothing compressed."""
    return Config()


def auto() -> Config:
    """FSDP2 whose links are probed at the start: dense, or the compression that pays there."""
    return Config(compress="auto")


def dense_tp() -> Config:
    """Tensor parallel over all ranks, nothing compressed."""
    return Config(mesh=Mesh(dp_shard=1, tp=-1))


def dense_pp() -> Config:
    """One pipeline stage per rank (1F1B, 4 micro-batches), nothing compressed."""
    return Config(mesh=Mesh(dp_shard=1, pp=-1), data=Data(micro_batches=4))


def _subspace(doc: str, pipeline: Pipeline) -> Recipe:
    """Return a recipe of one stage per rank whose boundaries are compressed as given."""

    def build() -> Config:
        return replace(dense_pp(), systems=Systems(pipeline=pipeline))

    build.__doc__ = doc
    return build


def dense_3d() -> Config:
    """Two pipeline stages x FSDP2 over the rest x tensor parallel 2: 4, 8, ... ranks."""
    return Config(mesh=Mesh(pp=2, dp_shard=-1, tp=2), data=Data(micro_batches=2))


def _weights(doc: str, weights: Weights, gradients: Gradients | None = None) -> Recipe:
    """Return a recipe that compresses FSDP2's links as given."""

    def build() -> Config:
        return Config(systems=Systems(weights=weights, gradients=gradients or Gradients()))

    build.__doc__ = doc
    return build


def _tensor(doc: str, tensor: Tensor | None = None, *, sequence: bool = False) -> Recipe:
    """Return a recipe that splits blocks over all ranks, their traffic as given."""

    def build() -> Config:
        return Config(
            mesh=Mesh(dp_shard=1, tp=-1),
            compute=Compute(sequence_parallel=sequence),
            systems=Systems(tensor=tensor or Tensor()),
        )

    build.__doc__ = doc
    return build


def eco_moe() -> Config:
    """Sparse model whose experts alone are stored in FP8, trained by ECO."""
    storage = Storage(fmt="fp8_e4m3", only_experts=True)
    return Config(model=Model(num_experts=4), systems=Systems(storage=storage))


def eco_int4_finetune() -> Config:
    """Start from a dense file (--init) and go on in INT4 by ECO at a small rate, without decay."""
    return Config(
        init="dense.safetensors",
        optim=Optim(lr=1e-4, weight_decay=0.0, lr_floor=0.0, betas=(0.9, 0.98), eps=1e-9),
        systems=Systems(storage=Storage(fmt="int4")),
    )


_ARMS = {
    "master": ("keeps a float32 master copy", "master"),
    "naive": ("drops rounding errors", "drop"),
    "eco": ("puts rounding errors into the momentum", "momentum"),
}
_FORMATS = {"fp8": "fp8_e4m3", "int8": "int8", "int4": "int4"}
_ROUNDING = {"rtn": "to nearest", "sr": "stochastically"}


def _stored(doc: str, storage: Storage) -> Recipe:
    """Return a recipe that stores the blocks' weights as given, with the method's optimizer."""

    def build() -> Config:
        optim = Optim(betas=(0.9, 0.98), eps=1e-9)
        return Config(optim=optim, systems=Systems(storage=storage))

    build.__doc__ = doc
    return build


def taco_aquavit() -> Config:
    """TACO on tensor parallel 2, aquavit's weight gathers over the other ranks: 4, 6, ... ranks."""
    return Config(
        mesh=Mesh(dp_shard=-1, tp=2),
        systems=Systems(tensor=_TACO, weights=Weights(codec="aquavit")),
    )


_TACO = Tensor(codec="hadamard")


def _storage_recipes() -> dict[str, Recipe]:
    recipes = {
        "dense-adamw": _stored("AdamW with float32 weights: the baseline of ECO.", Storage()),
        "bf16-naive": _stored(
            "Weights stored in bfloat16, rounded to nearest.",
            Storage(fmt="bf16", rounding="rtn", error="drop"),
        ),
        "bf16-sr": _stored(
            "Weights stored in bfloat16, rounded stochastically.", Storage(fmt="bf16", error="drop")
        ),
        "bf16-kahan": _stored(
            "Weights stored in bfloat16 beside a bfloat16 buffer of what rounding lost.",
            Storage(fmt="bf16", rounding="rtn", error="kahan"),
        ),
    }
    for arm, (does, error) in _ARMS.items():
        for name, fmt in _FORMATS.items():
            for rounding, how in _ROUNDING.items():
                recipes[f"{arm}-{name}-{rounding}"] = _stored(
                    f"Weights stored in {name.upper()}, rounded {how}; {does}.",
                    Storage(fmt=fmt, rounding=rounding, error=error),  # type: ignore[arg-type]
                )
    recipes["eco-fp8-sr-8bit"] = _stored(
        "eco-fp8-sr with 8-bit moments: 3 bytes per weight in all.",
        Storage(fmt="fp8_e4m3", state="8bit"),
    )
    return recipes


def _replicas(doc: str, replicas: Replicas, lr: float = 3e-3) -> Recipe:
    """Return a recipe of whole replicas that agree as given."""

    def build() -> Config:
        return Config(
            mesh=Mesh(dp_replicate=-1, dp_shard=1),
            optim=Optim(lr=lr),
            systems=Systems(replicas=replicas),
        )

    build.__doc__ = doc
    return build


# Dense warm-up of a tenth of the default 200 steps.
_SCAPE = Replicas(optimizer="scape", density=0.1, dense_steps=20)
_SCAPE_99 = replace(_SCAPE, density=0.01)

REPLICAS: dict[str, Recipe] = {
    "dense-adams": _replicas(
        "Replicas with AdamS on dense averaged gradients.", Replicas(optimizer="adams")
    ),
    "scape-90": _replicas("SCAPE: replicas exchange 10 % of the first moment.", _SCAPE),
    "scape-99": _replicas("SCAPE: replicas exchange 1 % of the first moment.", _SCAPE_99, lr=1e-2),
    "scape-90-decay": _replicas(
        "SCAPE at 10 % whose momentum decays off the mask.", replace(_SCAPE, unmasked="decay")
    ),
    "scape-90-lag0": _replicas(
        "SCAPE at 10 % with masks of the step itself: an exposed exchange.", replace(_SCAPE, lag=0)
    ),
    "scape-99-delta": _replicas(
        "SCAPE at 1 % with masks sent as changes.", replace(_SCAPE_99, mask_format="delta"), lr=1e-2
    ),
    "random-mask": _replicas(
        "SCAPE at 10 % with random masks, which cost no bytes.",
        replace(_SCAPE, mask_source="random"),
    ),
    "frozen-mask": _replicas(
        "SCAPE at 10 % without the residual in the statistic.", replace(_SCAPE, frozen_mask=True)
    ),
    "union-mask": _replicas(
        "SCAPE at 10 % on the union of every replica's own mask: fill-in.",
        replace(_SCAPE, mask_source="union"),
    ),
    "all-moved": _replicas(
        "SCAPE at 10 % (decay) that steps every weight.",
        replace(_SCAPE, unmasked="decay", move_all=True),
    ),
    "topk-ef-adamw": _replicas(
        "Top-k gradients (10 %) with error feedback, AdamW on the sparse mean.",
        replace(_SCAPE, optimizer="topk-adamw"),
    ),
    "demo-like": _replicas(
        "DeMo-like: fast DCT components of the momentum, signed steps.",
        Replicas(optimizer="demo"),
        lr=1e-3,
    ),
    "dgc": _replicas(
        "Deep Gradient Compression: momentum SGD, 0.1 % of the velocity.",
        Replicas(optimizer="dgc", density=0.001, ramp_steps=80),
        lr=0.1,
    ),
    "powersgd": _replicas("PowerSGD of rank 4 with AdamW.", Replicas(optimizer="powersgd")),
    "powersgd-ddp": _replicas(
        "PowerSGD of rank 4 through torch's DDP hook, with AdamW.",
        Replicas(optimizer="powersgd-ddp"),
    ),
}

_SPACE = Pipeline(mode="constrained")


def _outer(doc: str, outer: Outer, dp_replicate: int = -1) -> Recipe:
    """Return a recipe of replicas that train apart, of one rank each or of FSDP2 ranks."""

    def build() -> Config:
        dp_shard = 1 if dp_replicate == -1 else -1
        mesh = Mesh(dp_replicate=dp_replicate, dp_shard=dp_shard)
        return Config(mesh=mesh, systems=Systems(outer=outer))

    build.__doc__ = doc
    return build


_SPARSELOCO = Outer(method="sparseloco", sync_every=15)
_DILOCO = Outer(method="diloco", sync_every=15, alpha=0.7)

OUTER: dict[str, Recipe] = {
    "local-sgd": _outer(
        "Replicas that average their weights every 15 steps.",
        replace(_DILOCO, alpha=1.0, momentum=0.0),
    ),
    "diloco": _outer("DiLoCo: dense averages every 15 steps, outer Nesterov momentum.", _DILOCO),
    "diloco-int8": _outer("DiLoCo with 8-bit messages.", replace(_DILOCO, codec="int8")),
    "sparseloco": _outer(
        "SparseLoCo: 1.6 % of what 15 steps changed, in 2 bits, with error feedback.", _SPARSELOCO
    ),
    "sparseloco-replicas": _outer(
        "SparseLoCo that averages over all replicas, senders or not.",
        replace(_SPARSELOCO, aggregate="replicas"),
    ),
    "sparseloco-fsdp": _outer(
        "SparseLoCo between two replicas of FSDP2 ranks: 4, 6, ... ranks.", _SPARSELOCO, 2
    ),
}


def _mixed(doc: str, replicas: str, pipeline: Pipeline, evaluate: str) -> Recipe:
    """Return a recipe of unlike replicas that exchange SparseLoCo's messages."""

    def build() -> Config:
        return Config(
            mesh=Mesh(replicas=replicas),
            data=Data(micro_batches=2),
            evaluation=Evaluation(boundaries=evaluate),  # type: ignore[arg-type]
            systems=Systems(pipeline=pipeline, outer=_SPARSELOCO),
        )

    build.__doc__ = doc
    return build


MIXED: dict[str, Recipe] = {
    "hetero": _mixed(
        "A whole replica beside a pipeline of two stages that sends 1/8 of the channels: 3 ranks.",
        "0 1,2:8",
        _SPACE,
        "full",
    ),
    "hetero-lossy": _mixed(
        "hetero that projects at the boundary alone.",
        "0 1,2:8",
        replace(_SPACE, mode="lossy"),
        "full",
    ),
    "hetero-dense": _mixed("hetero with a dense boundary: the twin.", "0 1,2", Pipeline(), "full"),
    "hetero-uniform": _mixed(
        "Two pipelines of two stages, both sending 1/8 of the channels: 4 ranks.",
        "0,1:8 2,3:8",
        _SPACE,
        "projected",
    ),
}

_AQUAVIT = Weights(codec="aquavit")
_WIDTHS = Weights(codec="aquavit", levels="widths")

RECIPES: dict[str, Recipe] = {
    "dense-ddp": dense_ddp,
    **REPLICAS,
    **OUTER,
    "dense-fsdp": dense_fsdp,
    "auto": auto,
    "dense-tp": dense_tp,
    "dense-tp-sp": _tensor(
        "Tensor parallel with activations cut over the sequence, nothing compressed.", sequence=True
    ),
    "dense-pp": dense_pp,
    "dense-3d": dense_3d,
    **MIXED,
    "subspace-pp": _subspace("Pipeline whose boundaries carry an eighth of the channels.", _SPACE),
    "subspace-pp-16x": _subspace(
        "Pipeline whose boundaries carry a sixteenth of the channels.", replace(_SPACE, ratio=16)
    ),
    "subspace-pp-32x": _subspace(
        "Pipeline whose boundaries carry 1/32 of the channels.", replace(_SPACE, ratio=32)
    ),
    "subspace-pp-coord": _subspace(
        "subspace-pp on the first channels in place of random directions.",
        replace(_SPACE, basis="coord"),
    ),
    "subspace-pp-int8": _subspace(
        "subspace-pp with 8-bit coefficients.", replace(_SPACE, wire="int8")
    ),
    "subspace-pp-lossy": _subspace(
        "subspace-pp that projects at the boundaries alone.", replace(_SPACE, mode="lossy")
    ),
    "bf16-fsdp": _weights(
        "FSDP2 with weight gathers in bfloat16, computed in float32: the baseline of the methods.",
        Weights(codec="bf16"),
    ),
    "static-8bit": _weights(
        "FSDP2 with weight gathers of 8 bits per weight, blocks of 2048.",
        Weights(codec="static", bits=8, block_size=2048),
    ),
    "static-6bit": _weights(
        "FSDP2 with weight gathers of 6 bits per weight, blocks of 2048.",
        Weights(codec="static", bits=6, block_size=2048),
    ),
    "static-4bit": _weights(
        "FSDP2 with weight gathers of 4 bits per weight, blocks of 2048.",
        Weights(codec="static", bits=4, block_size=2048),
    ),
    "static-6bit-fine": _weights(
        "FSDP2 with weight gathers at aquavit's last level (6 bits, blocks of 32) throughout.",
        Weights(codec="static", bits=6, block_size=32),
    ),
    "aquavit": _weights("FSDP2 with weight gathers that ascend from 2 to 7 bits.", _AQUAVIT),
    "aquavit-coarse9": _weights(
        "Aquavit over 9 levels instead of 18.", replace(_AQUAVIT, levels="coarse9")
    ),
    "aquavit-linear": _weights(
        "Aquavit with a straight line from the lowest to the highest level.",
        replace(_AQUAVIT, curve="linear"),
    ),
    "aquavit-keep-wire": _weights(
        "Aquavit that keeps the gathered bytes for backward: half the traffic.",
        replace(_AQUAVIT, keep_wire="forward"),
    ),
    "aquavit-grad4": _weights(
        "Aquavit with 4-bit gradients: both of FSDP2's links compressed.",
        _AQUAVIT,
        Gradients(codec="int4", hadamard=True),
    ),
    "ascending-nearest": _weights(
        "Ascending widths 2, 4, 6, 8 with one block size, nearest width.", _WIDTHS
    ),
    "ascending-ceil": _weights(
        "Ascending widths 2, 4, 6, 8 with one block size, rounded up.",
        replace(_WIDTHS, pick="ceil"),
    ),
    "zeropp": _weights(
        "ZeRO++-like: symmetric 8-bit gathers in large blocks, 4-bit gradients in two hops.",
        Weights(codec="static", bits=8, block_size=8192, symmetric=True),
        Gradients(codec="int4"),
    ),
    "sdp4bit": _weights(
        "SDP4Bit-like: symmetric 4-bit differences of the weights, a full copy on every rank.",
        Weights(codec="difference", bits=4, block_size=128, symmetric=True),
    ),
    "taco": _tensor("Tensor parallel, activations and gradients in FP8 (E4M3), rotated.", _TACO),
    "taco-sp": _tensor("TACO with sequence parallel.", _TACO, sequence=True),
    "taco-merged": _tensor("TACO with one scale per group.", replace(_TACO, merge_scales=True)),
    "taco-rotated": _tensor(
        "TACO that adds up in the rotated domain.", replace(_TACO, middle="rotated")
    ),
    "taco-no-hadamard": _tensor("TACO without the rotation.", replace(_TACO, hadamard=False)),
    "taco-no-alpha": _tensor("TACO without the adaptive scale.", replace(_TACO, alpha=False)),
    "taco-e5m2": _tensor("TACO in E5M2, both ways.", replace(_TACO, fmt="e5m2")),
    "taco-e4m3-e5m2": _tensor(
        "TACO in E4M3 forward, E5M2 backward.", replace(_TACO, backward_fmt="e5m2")
    ),
    "taco-int8": _tensor("TACO's rotation with INT8 codes.", replace(_TACO, fmt="int8")),
    "int8-pergroup": _tensor(
        "INT8 with one scale per 128 values, not rotated.",
        replace(_TACO, fmt="int8", hadamard=False),
    ),
    "fp8-pertensor": _tensor("E4M3 with one scale per message.", Tensor(codec="tensorwise")),
    "fp8-pergroup": _tensor(
        "E4M3 with one scale per 128 values.", replace(_TACO, hadamard=False, alpha=False)
    ),
    "taco-4bit": _tensor(
        "4-bit codes, rotated, tiles of 64: the losing baseline.",
        replace(_TACO, fmt="int4", group=64),
    ),
    "taco-aquavit": taco_aquavit,
    **_storage_recipes(),
    "eco-moe": eco_moe,
    "eco-int4-finetune": eco_int4_finetune,
    **COMBINED,
}


def recipe(name: str) -> Config:
    """Return the configuration of a recipe.

    Raises:
        ConfigError: no recipe has this name; the message suggests the nearest.
    """
    if name not in RECIPES:
        raise near("recipe", name, list(RECIPES), "`thinwire recipes`")
    return replace(RECIPES[name](), recipe=name)
