"""Unlike replicas in one run: whole models beside pipelines with compressed boundaries."""

from thinwire.replicas.layout import Layout, Replica
from thinwire.replicas.mixed import MixedReplicas
from thinwire.replicas.ownership import Share, divide
from thinwire.replicas.simulate import Simulation, VirtualReplica
from thinwire.replicas.site import Site

__all__ = [
    "Layout",
    "MixedReplicas",
    "Replica",
    "Share",
    "Simulation",
    "Site",
    "VirtualReplica",
    "divide",
]
