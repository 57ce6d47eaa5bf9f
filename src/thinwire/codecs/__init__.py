"""Codecs: a tensor to one uint8 buffer and back, with the exact length known beforehand."""

from thinwire.codecs.blockwise import Blockwise
from thinwire.codecs.cast import Cast
from thinwire.codecs.hadamard import Hadamard
from thinwire.codecs.protocol import Codec, CodecFacts
from thinwire.codecs.tensorwise import Tensorwise
from thinwire.kernels.random import RandomKey

__all__ = ["Blockwise", "Cast", "Codec", "CodecFacts", "Hadamard", "RandomKey", "Tensorwise"]
