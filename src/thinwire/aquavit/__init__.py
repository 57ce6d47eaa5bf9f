"""Aquavit: weight gathers of sharded training whose precision ascends during the run."""

from thinwire.aquavit.attach import attach
from thinwire.aquavit.handle import Handle
from thinwire.aquavit.schedule import Difference, Level, Schedule, Static
from thinwire.aquavit.simulate import SimulatedHandle, simulate

__all__ = [
    "Difference",
    "Handle",
    "Level",
    "Schedule",
    "SimulatedHandle",
    "Static",
    "attach",
    "simulate",
]
