"""Pipeline boundaries that carry k coefficients of a shared subspace in place of d channels."""

from thinwire.pipeline.basis import Basis
from thinwire.pipeline.constraint import WRITES, Constraint, find_writes
from thinwire.pipeline.link import Link, wrap
from thinwire.pipeline.stage import Boundary, Stage
from thinwire.pipeline.tables import FixedRows

__all__ = [
    "WRITES",
    "Basis",
    "Boundary",
    "Constraint",
    "FixedRows",
    "Link",
    "Stage",
    "find_writes",
    "wrap",
]
