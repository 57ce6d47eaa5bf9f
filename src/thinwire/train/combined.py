"""Recipes that compress several links at once (what goes together: `support`)."""

from collections.abc import Callable
from dataclasses import replace

from thinwire.train.config import (
    Config,
    Data,
    Gradients,
    Mesh,
    Optim,
    Outer,
    Pipeline,
    Replicas,
    Storage,
    Systems,
    Tensor,
    Weights,
)

__all__ = ["COMBINED"]

_FSDP = Systems(weights=Weights(codec="aquavit"), gradients=Gradients(codec="int4", hadamard=True))
_TACO = Tensor(codec="hadamard")
_ECO = Storage(fmt="fp8_e4m3")
_SPARSELOCO = Outer(method="sparseloco", sync_every=15)
_SCAPE = Replicas(optimizer="scape", density=0.1, dense_steps=20)
_SPACE = Pipeline(mode="constrained")


def _combined(
    doc: str, mesh: Mesh, systems: Systems, micro_batches: int = 1
) -> Callable[[], Config]:
    """Return a recipe of several methods, with ECO's betas where weights are stored."""

    def build() -> Config:
        stored = systems.storage.fmt != "dense"
        return Config(
            mesh=mesh,
            data=Data(micro_batches=micro_batches),
            optim=Optim(betas=(0.9, 0.98), eps=1e-9) if stored else Optim(),
            systems=systems,
        )

    build.__doc__ = doc
    return build


COMBINED: dict[str, Callable[[], Config]] = {
    "everything": _combined(
        "Aquavit, 4-bit gradients, TACO on tensor parallel 2, ECO's FP8 weights: 4, 8, ... ranks.",
        Mesh(dp_shard=-1, tp=2),
        replace(_FSDP, tensor=_TACO, storage=_ECO),
    ),
    "everything-sites": _combined(
        "Aquavit, 4-bit gradients, ECO inside two replicas, SparseLoCo between: 4, 8, ... ranks.",
        Mesh(dp_replicate=2, dp_shard=-1),
        replace(_FSDP, storage=_ECO, outer=_SPARSELOCO),
    ),
    "everything-scape": _combined(
        "Aquavit and 4-bit gradients inside two replicas, SCAPE between: 4, 8, ... ranks.",
        Mesh(dp_replicate=2, dp_shard=-1),
        replace(_FSDP, replicas=_SCAPE),
    ),
    "everything-pp": _combined(
        "Aquavit and 4-bit gradients inside two stages, an eighth of the channels between: 4, 8, "
        "... ranks.",
        Mesh(pp=2, dp_shard=-1),
        replace(_FSDP, pipeline=_SPACE),
        micro_batches=2,
    ),
    "everything-8": _combined(
        "Two replicas of everything, SparseLoCo between: 8, 16, ... ranks.",
        Mesh(dp_replicate=2, dp_shard=-1, tp=2),
        replace(_FSDP, tensor=_TACO, storage=_ECO, outer=_SPARSELOCO),
    ),
    "subspace-taco": _combined(
        "TACO inside two pipeline stages, an eighth of the channels between: 4 ranks.",
        Mesh(pp=2, dp_shard=1, tp=2),
        Systems(tensor=_TACO, pipeline=_SPACE),
        micro_batches=2,
    ),
    "taco-sparseloco": _combined(
        "TACO and ECO inside replicas of two ranks, SparseLoCo between: 4, 8, ... ranks.",
        Mesh(dp_replicate=-1, dp_shard=1, tp=2),
        Systems(tensor=_TACO, storage=_ECO, outer=_SPARSELOCO),
    ),
    "taco-scape": _combined(
        "TACO inside replicas of two ranks, SCAPE between: 4, 8, ... ranks.",
        Mesh(dp_replicate=-1, dp_shard=1, tp=2),
        Systems(tensor=_TACO, replicas=_SCAPE),
    ),
}
