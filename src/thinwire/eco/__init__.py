"""ECO: train quantized weights with no master copy; rounding errors go into the momentum."""

from thinwire.eco.adamw import EcoAdamW
from thinwire.eco.checkpoint import (
    check_replicas,
    load_plain_state_dict,
    plain_state_dict,
    weight_nbytes,
)
from thinwire.eco.export import dense_state_dict
from thinwire.eco.formats import Format
from thinwire.eco.optimizer import optimizer_nbytes
from thinwire.eco.quantize import QuantizeReport, block_linears, experts, quantize_
from thinwire.eco.sgd import EcoSGD
from thinwire.eco.tensor import QuantizedTensor, local_quantized

__all__ = [
    "EcoAdamW",
    "EcoSGD",
    "Format",
    "QuantizeReport",
    "QuantizedTensor",
    "block_linears",
    "check_replicas",
    "dense_state_dict",
    "experts",
    "load_plain_state_dict",
    "local_quantized",
    "optimizer_nbytes",
    "plain_state_dict",
    "quantize_",
    "weight_nbytes",
]
