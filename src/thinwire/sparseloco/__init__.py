"""SparseLoCo: replicas far apart that exchange sparse, 2-bit pseudo-gradients every H steps."""

from thinwire.sparseloco.deadline import Deadline
from thinwire.sparseloco.diloco import DiLoCo
from thinwire.sparseloco.options import Options
from thinwire.sparseloco.partition import Partition, Verdict
from thinwire.sparseloco.rounds import Outcome, Transport, run_round
from thinwire.sparseloco.saved import load_partition
from thinwire.sparseloco.simulate import simulate_round
from thinwire.sparseloco.sparseloco import SparseLoCo
from thinwire.sparseloco.store import StoreTransport
from thinwire.sparseloco.table import Table, message_nbytes
from thinwire.sparseloco.transport import GroupTransport

__all__ = [
    "Deadline",
    "DiLoCo",
    "GroupTransport",
    "Options",
    "Outcome",
    "Partition",
    "SparseLoCo",
    "StoreTransport",
    "Table",
    "Transport",
    "Verdict",
    "load_partition",
    "message_nbytes",
    "run_round",
    "simulate_round",
]
