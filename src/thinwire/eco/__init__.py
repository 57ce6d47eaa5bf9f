"""ECO: train quantized weights with no master copy; rounding errors go into the momentum."""

from thinwire.eco.adamw import EcoAdamW
from thinwire.eco.formats import Format
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
    "experts",
    "local_quantized",
    "quantize_",
]
