"""Collectives that carry codec buffers, and the ledger that counts them."""

from thinwire.comm.all_gather import all_gather
from thinwire.comm.all_reduce import all_reduce
from thinwire.comm.hierarchical import Hierarchy, hierarchy
from thinwire.comm.ledger import LINKS, Ledger
from thinwire.comm.p2p import recv, send
from thinwire.comm.reduce_scatter import reduce_scatter

__all__ = [
    "LINKS",
    "Hierarchy",
    "Ledger",
    "all_gather",
    "all_reduce",
    "hierarchy",
    "recv",
    "reduce_scatter",
    "send",
]
