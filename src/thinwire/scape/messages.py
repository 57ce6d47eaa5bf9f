"""Mask messages: one per owner and step, for the pieces that the owner builds masks of.

    [0:4] "TWMK" | [4:8] step the mask is for | [8:12] body bytes | [12:16] table digest | body

little-endian, zero-padded to a multiple of 16. The body holds, per piece in wire order, the
positions as `codecs.bitmask.Bitmask` packs them. The top bit of the body length marks the delta
form: keep bits over the old positions, then the added positions as index12.

Legend: `K` positions.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.bitmask import Bitmask, decode_delta, encode_delta
from thinwire.errors import WireError
from thinwire.kernels.bitmask import bits_nbytes, index12_nbytes
from thinwire.scape.table import Piece

__all__ = ["MASK_FORMATS", "MaskWire", "body_nbytes", "codec", "message_nbytes"]

MASK_FORMATS = ("auto", "bits", "index12", "delta")
MAGIC = b"TWMK"
HEADER_BYTES = 16
_DELTA = 1 << 31


def body_nbytes(pieces: Sequence[Piece], density: float, mask_format: str) -> int:
    """Return the body's length without the delta form: of shapes and density alone."""
    return sum(codec(p.kept(density), mask_format).wire_nbytes(p.numel) for p in pieces)


def message_nbytes(pieces: Sequence[Piece], density: float, mask_format: str) -> int:
    """Return the length of an owner's message in bytes, 0 for an owner of nothing."""
    return _padded(HEADER_BYTES + body_nbytes(pieces, density, mask_format)) if pieces else 0


@dataclass(frozen=True)
class MaskWire:
    """Encode and decode the message of one owner.

    Attributes:
        pieces: the owner's pieces, in wire order.
        density: density of the step that the masks are for.
        step: that step.
        digest: the table's 4 bytes.
        mask_format: one of `MASK_FORMATS`.
    """

    pieces: Sequence[Piece]
    density: float
    step: int
    digest: bytes
    mask_format: str

    def encode(self, new: Sequence[Tensor], old: Sequence[Tensor | None]) -> Tensor:
        """Return the message, uint8.

        Args:
            new: ascending positions per piece, int64 [K].
            old: positions of the step before, None where everything was sent.
        """
        device = new[0].device
        body, flag = self._plain_body(new), 0
        if self.mask_format == "delta" and all(o is not None for o in old):
            rows = zip(self.pieces, new, old, strict=True)
            parts = [encode_delta(o, n, p.numel) for p, n, o in rows if o is not None]
            delta = torch.cat(parts)
            if delta.numel() < body.numel():
                body, flag = delta, _DELTA
        head = MAGIC + struct.pack("<II", self.step, body.numel() | flag) + self.digest
        message = torch.zeros(
            _padded(HEADER_BYTES + body.numel()), dtype=torch.uint8, device=device
        )
        message[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        message[HEADER_BYTES : HEADER_BYTES + body.numel()] = body
        return message

    def decode(self, message: Tensor, old: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the positions per piece.

        Raises:
            WireError: the message is of another step or table, or broken.
        """
        head = bytes(message[:HEADER_BYTES].tolist())
        if len(head) < HEADER_BYTES or head[:4] != MAGIC:
            raise WireError("a mask message does not start with its header: ranks disagree")
        step, length = struct.unpack("<II", head[4:12])
        if step != self.step:
            raise WireError(f"a mask for step {step} arrived in step {self.step}: ranks drifted")
        if head[12:16] != self.digest:
            raise WireError(
                "a mask message was made for another table of parameters: every rank of the group "
                "must give the optimizer the same parameters, in the same order"
            )
        body = message[HEADER_BYTES : HEADER_BYTES + (length & ~_DELTA)]
        if length & _DELTA:
            return self._read_delta(body, old)
        return self._read_plain(body)

    def _plain_body(self, new: Sequence[Tensor]) -> Tensor:
        rows = zip(self.pieces, new, strict=True)
        return torch.cat(
            [codec(at.numel(), self.mask_format).encode_index(at, p.numel) for p, at in rows]
        )

    def _read_plain(self, body: Tensor) -> list[Tensor]:
        if body.numel() != body_nbytes(self.pieces, self.density, self.mask_format):
            raise WireError(f"a mask message of {body.numel()} bytes is truncated or of another k")
        out, at = [], 0
        for piece in self.pieces:
            how = codec(piece.kept(self.density), self.mask_format)
            nbytes = how.wire_nbytes(piece.numel)
            out.append(how.decode_index(body[at : at + nbytes], piece.numel))
            at += nbytes
        return out

    def _read_delta(self, body: Tensor, old: Sequence[Tensor | None]) -> list[Tensor]:
        out, at = [], 0
        for piece, before in zip(self.pieces, old, strict=True):
            if before is None:
                raise WireError("a delta mask arrived, but this rank holds no earlier mask")
            k, keep_nbytes = piece.kept(self.density), bits_nbytes(before.numel())
            added = k - _count_bits(body[at : at + keep_nbytes])
            nbytes = keep_nbytes + index12_nbytes(piece.numel, max(0, added))
            out.append(decode_delta(body[at : at + nbytes], before, piece.numel, k))
            at += nbytes
        return out


def codec(k: int, mask_format: str) -> Bitmask:
    """Return how k positions of a piece are packed; a function of shape and density alone."""
    return Bitmask(k=k, form="auto" if mask_format == "delta" else mask_format)


def _count_bits(wire: Tensor) -> int:
    shifts = torch.arange(8, dtype=torch.uint8, device=wire.device)
    return int(((wire[:, None] >> shifts) & 1).sum())


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
