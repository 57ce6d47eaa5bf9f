"""TACO: tensor-parallel activations and their gradients, compressed in both passes."""

from thinwire.taco.gradients import sum_partial_gradients
from thinwire.taco.link import Link
from thinwire.taco.plan import Report, parallelize
from thinwire.taco.simulate import simulate
from thinwire.taco.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "Link",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Report",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize",
    "simulate",
    "sum_partial_gradients",
]
