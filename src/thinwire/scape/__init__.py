"""SCAPE: data-parallel training whose workers exchange a sparse first moment."""

from thinwire.scape.adams import AdamS
from thinwire.scape.engine import Options
from thinwire.scape.optimizer import Scape, TopkAdamW
from thinwire.scape.simulate import Simulator

__all__ = ["AdamS", "Options", "Scape", "Simulator", "TopkAdamW"]
