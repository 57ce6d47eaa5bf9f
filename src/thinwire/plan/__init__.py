"""Whether compression pays: probe the links, predict step times, choose."""

from thinwire.plan.links import COLLECTIVES, CodecSpeed, Compute, Group, Links, Point, Speed
from thinwire.plan.probe_clock import ProbeError, ProbeInterrupted
from thinwire.plan.probe_device import Work
from thinwire.plan.probe_mesh import probe

__all__ = [
    "COLLECTIVES",
    "CodecSpeed",
    "Compute",
    "Group",
    "Links",
    "Point",
    "ProbeError",
    "ProbeInterrupted",
    "Speed",
    "Work",
    "probe",
]
