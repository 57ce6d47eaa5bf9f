"""Codecs: a tensor to one uint8 buffer and back, with the exact length known beforehand."""

from thinwire.codecs.bitmask import Bitmask, decode_delta, encode_delta
from thinwire.codecs.blockwise import Blockwise
from thinwire.codecs.cast import Cast
from thinwire.codecs.feedback import encode_with_feedback
from thinwire.codecs.hadamard import Hadamard
from thinwire.codecs.protocol import Codec, CodecFacts
from thinwire.codecs.subspace import Subspace
from thinwire.codecs.tensorwise import Tensorwise
from thinwire.codecs.topk import TopK
from thinwire.kernels.random import RandomKey

__all__ = [
    "Bitmask",
    "Blockwise",
    "Cast",
    "Codec",
    "CodecFacts",
    "Hadamard",
    "RandomKey",
    "Subspace",
    "Tensorwise",
    "TopK",
    "decode_delta",
    "encode_delta",
    "encode_with_feedback",
]
