"""Whether compression pays: probe the links, predict step times, choose."""

from thinwire.plan.links import CodecSpeed, Compute, Group, Links, Point, Speed

__all__ = ["CodecSpeed", "Compute", "Group", "Links", "Point", "Speed"]
