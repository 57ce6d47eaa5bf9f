"""Aquavit: weight gathers of sharded training whose precision ascends during the run."""

from thinwire.aquavit.attach import attach
from thinwire.aquavit.handle import Handle
from thinwire.aquavit.schedule import Level, Schedule, Static

__all__ = ["Handle", "Level", "Schedule", "Static", "attach"]
