"""The records of a payload: which tensor lies where, and how it is coded.

Records are sorted by the UTF-8 bytes of the name. Legend: `N` elements, `K` entries sent.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.cast import Cast
from thinwire.codecs.feedback import encode_with_feedback
from thinwire.codecs.topk import TopK
from thinwire.errors import ConfigError, WireError
from thinwire.sparseloco.bins import Bins
from thinwire.sparseloco.options import Options

__all__ = ["HEADER_NBYTES", "Record", "Table", "message_nbytes"]

HEADER_NBYTES = 128
SMALL = 4096


@dataclass(frozen=True)
class Record:
    """One tensor of a payload.

    Attributes:
        name: its full name.
        shape: its shape.
        codec: how it travels.
        offset: where it begins in the payload, in bytes; a multiple of 4.
        nbytes: its length, without padding.
    """

    name: str
    shape: tuple[int, ...]
    codec: TopK | Bins | Cast
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Return N."""
        return math.prod(self.shape)

    @property
    def sparse(self) -> bool:
        """Return whether only the largest entries travel."""
        return not isinstance(self.codec, Cast)

    @property
    def entries(self) -> int:
        """Return K."""
        if isinstance(self.codec, Cast):
            return self.numel
        topk = self.codec.topk if isinstance(self.codec, Bins) else self.codec
        return topk.geometry(self.numel).entries

    def encode(
        self, delta: Tensor, residual: Tensor, beta: float, new_residual: Tensor, payload: Tensor
    ) -> None:
        """Write the record of a = beta*residual + delta, and a - decoded to `new_residual`.

        Args:
            delta: fp32, N elements.
            residual: fp32, N elements; kept.
            beta: decay of the residual.
            new_residual: fp32, N elements.
            payload: uint8; bytes offset..offset+nbytes are written.
        """
        part = payload[self.offset : self.offset + self.nbytes]
        encode_with_feedback(self.codec, delta, residual, beta, new_residual=new_residual, out=part)

    def decode(self, payload: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what a payload says of this tensor: flat positions (None for all), fp32 values.

        Raises:
            WireError: indices that no encoder writes, or values that are not finite.
        """
        wire = payload[self.offset : self.offset + self.nbytes]
        position: Tensor | None = None
        if not isinstance(self.codec, Cast):
            position, value = self.codec.entries(wire, self.numel)
        else:
            value = self.codec.decode(wire, self.numel, torch.float32)
        if not bool(torch.isfinite(value).all()):
            raise WireError(f"values of {self.name!r} are not finite")
        return position, value


class Table:
    """The records of one partition's messages.

    Args:
        shapes: shape of each tensor by name.
        options: the run's settings.

    Attributes:
        records: in wire order.
        payload_nbytes: length of every payload, the same on all replicas.
        digest: 16 bytes that name tensors, shapes and coding.

    Raises:
        ConfigError: nothing would be compressed.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], options: Options) -> None:
        self.records: list[Record] = []
        offset = 0
        for name in sorted(shapes, key=lambda n: n.encode()):
            shape = tuple(int(side) for side in shapes[name])
            codec = _codec(shape, options)
            nbytes = codec.wire_nbytes(math.prod(shape), torch.float32)
            self.records.append(Record(name, shape, codec, offset, nbytes))
            offset += -(-nbytes // 4) * 4
        self.payload_nbytes = offset
        if not any(r.sparse and r.numel for r in self.records):
            raise ConfigError(
                f"none of {len(self.records)} tensors can be compressed (all have fewer than two "
                f"dimensions or under {SMALL} elements): set small_dense=False, or use DiLoCo"
            )
        listed = [[r.name, r.shape, repr(r.codec)] for r in self.records]
        self.digest = hashlib.sha256(json.dumps(listed).encode()).digest()[:16]

    @property
    def message_nbytes(self) -> int:
        """Return the bytes of a message."""
        return HEADER_NBYTES + self.payload_nbytes

    @property
    def numel(self) -> int:
        """Return the elements of all tensors."""
        return sum(r.numel for r in self.records)

    @property
    def exempt_nbytes(self) -> int:
        """Return the bytes of tensors that a message carries dense."""
        return sum(r.nbytes for r in self.records if not r.sparse)

    @property
    def density(self) -> float:
        """Return entries sent over entries of the compressed tensors."""
        sparse = [r for r in self.records if r.sparse]
        return sum(r.entries for r in sparse) / sum(r.numel for r in sparse)


def message_nbytes(shapes: Mapping[str, Sequence[int]], options: Options | None = None) -> int:
    """Return the exact bytes of one replica's message per round, from shapes alone.

    Args:
        shapes: shape of each trained tensor by name (tied ones once).
        options: the run's settings; None for the defaults.

    Example:
        >>> message_nbytes({"w": (257, 257)}, Options(k=128)) - 128
        3720
    """
    return Table(shapes, options or Options()).message_nbytes


def _codec(shape: tuple[int, ...], options: Options) -> TopK | Bins | Cast:
    small = len(shape) < 2 or math.prod(shape) < SMALL
    if math.prod(shape) == 0 or (small and options.small_dense):
        return Cast("fp32" if options.quant == "none" else "bf16")
    return options.codec(shape)
