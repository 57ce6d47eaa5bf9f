"""Token ids that travel once per micro-batch, as bytes behind a 16-byte header.

Header, little-endian: "TWPB", basis version u32, round u32, message number u32; then the ids row by
row, 2 bytes each for a vocabulary of at most 65,536, else 4. Ids never sit in a float channel,
which would round them.

Legend: `B` sequences of a micro-batch, `T` tokens.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError

__all__ = ["HEADER_BYTES", "Header", "id_bytes", "ids_nbytes", "pack_ids", "unpack_ids"]

HEADER_BYTES = 16
_MAGIC = b"TWPB"
_LAYOUT = struct.Struct("<4sIII")


@dataclass(frozen=True, slots=True)
class Header:
    """What both ends of a boundary must agree on.

    Attributes:
        version: of the basis.
        round: outer round (0 without outer rounds).
        number: messages through this boundary before this one, modulo 2^32.
    """

    version: int
    round: int
    number: int


def id_bytes(vocab_size: int) -> int:
    """Return the bytes per id: 2 if every id of the vocabulary fits, else 4."""
    return 2 if vocab_size <= 65_536 else 4


def ids_nbytes(tokens: int, vocab_size: int) -> int:
    """Return the bytes of the message that carries the ids of `tokens`."""
    return HEADER_BYTES + tokens * id_bytes(vocab_size)


def pack_ids(ids_BT: Tensor, vocab_size: int, header: Header) -> Tensor:
    """Return uint8 [16 + B*T*w]."""
    width = id_bytes(vocab_size)
    head = torch.frombuffer(
        bytearray(_LAYOUT.pack(_MAGIC, header.version, header.round, header.number % 2**32)),
        dtype=torch.uint8,
    ).to(ids_BT.device)
    # The low bytes of the int64's little-endian form.
    low = ids_BT.contiguous().long().view(-1, 1).view(torch.uint8)[:, :width]
    return torch.cat([head, low.reshape(-1)])


def unpack_ids(message: Tensor, shape: tuple[int, int], vocab_size: int, want: Header) -> Tensor:
    """Return int64 [B, T] from `pack_ids`'s bytes.

    Raises:
        WireError: another length, magic, basis version, round or message number than `want`'s, or
            an id outside the vocabulary.
    """
    width, numel = id_bytes(vocab_size), shape[0] * shape[1]
    if message.dtype != torch.uint8 or message.shape != (HEADER_BYTES + numel * width,):
        raise WireError(
            f"expected {HEADER_BYTES + numel * width} bytes of token ids for [B, T] = "
            f"{list(shape)}, got {message.dtype} {tuple(message.shape)}: give both stages one "
            "micro-batch shape, vocabulary and ids setting"
        )
    magic, version, round_, number = _LAYOUT.unpack(bytes(message[:HEADER_BYTES].tolist()))
    if magic != _MAGIC:
        raise WireError(f"token ids start with {magic!r}, not {_MAGIC!r}: messages out of order")
    if version != want.version:
        raise WireError(
            f"the stage before projects with basis version {version}, this one with "
            f"{want.version}: change the basis on all stages at once"
        )
    if (round_, number) != (want.round, want.number % 2**32):
        raise WireError(
            f"the stage before sent message {number} of round {round_}, this one expects "
            f"message {want.number % 2**32} of round {want.round}: stages ran apart (torch's shape "
            "inference runs stages too: pass static_args)"
        )
    wide = message.new_zeros(numel, 8)
    wide[:, :width] = message[HEADER_BYTES:].view(numel, width)
    ids = wide.view(torch.int64).view(shape)
    if numel and int(ids.max()) >= vocab_size:
        raise WireError(
            f"a token id of {int(ids.max())} came over a boundary of vocabulary {vocab_size}"
        )
    return ids
