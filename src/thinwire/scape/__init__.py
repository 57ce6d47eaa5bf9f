"""SCAPE: data-parallel training whose workers exchange a sparse first moment."""

from thinwire.scape.adams import AdamS
from thinwire.scape.baselines import Demo, Dgc, PowerSgd, SyncOptimizer, SyncSimulator
from thinwire.scape.engine import Options
from thinwire.scape.hook import TopkHook
from thinwire.scape.optimizer import Scape, TopkAdamW
from thinwire.scape.simulate import Simulator

__all__ = [
    "AdamS",
    "Demo",
    "Dgc",
    "Options",
    "PowerSgd",
    "Scape",
    "Simulator",
    "SyncOptimizer",
    "SyncSimulator",
    "TopkAdamW",
    "TopkHook",
]
