"""The same job by other packages (`pip install thinwire[peers]`)."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["PEERS", "PEER_PACKAGES", "peer_calls"]

Call = Callable[[], object]
# Codec that a peer's blockwise codec competes with: as many bits, and blocks of the same size.
PEERS = {"block8": 8, "block4": 4}


def _bitsandbytes(x: Tensor, bits: int) -> tuple[Call, Call]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    if bits == 8:
        codes, state = functional.quantize_blockwise(x, blocksize=256)
        return (
            lambda: functional.quantize_blockwise(x, blocksize=256),
            lambda: functional.dequantize_blockwise(codes, state),
        )
    codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    return (
        lambda: functional.quantize_4bit(x, blocksize=64, quant_type="nf4"),
        lambda: functional.dequantize_4bit(codes, state),
    )


def _torchao(x: Tensor, bits: int) -> tuple[Call, Call]:
    utils: Any = importlib.import_module("torchao.optim.quant_utils")
    size = 256 if bits == 8 else 64
    padded = x[: x.numel() - x.numel() % size].float()
    qmap = padded.new_tensor(utils.create_dynamic_map(True, 3 if bits == 4 else 7, bits))
    quantize = utils.quantize_8bit_with_qmap if bits == 8 else utils.quantize_4bit_with_qmap

    def encode() -> Any:
        scaled, scale = utils.scale_tensor(padded, size)
        return quantize(scaled, qmap), scale

    codes, scale = encode()
    return encode, lambda: utils.dequant_with_qmap(codes, qmap, scale)


_MAKERS = {"bitsandbytes": _bitsandbytes, "torchao": _torchao}
PEER_PACKAGES = tuple(_MAKERS)


def peer_calls(codec: str, x: Tensor) -> dict[str, tuple[Call, Call]]:
    """Return (encode, decode) of x by each peer that does what `codec` does."""
    if codec not in PEERS:
        return {}
    return {name: make(x, PEERS[codec]) for name, make in _MAKERS.items()}
