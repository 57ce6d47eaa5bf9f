"""Aquavit: weight gathers of sharded training whose precision ascends during the run."""

from thinwire.aquavit.attach import attach
from thinwire.aquavit.handle import Handle
from thinwire.aquavit.schedule import Difference, Level, Schedule, Static

__all__ = ["Difference", "Handle", "Level", "Schedule", "Static", "attach"]
