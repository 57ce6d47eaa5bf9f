"""Mask messages: one per owner and step, for the pieces that the owner builds masks of.

    [0:4] "TWMK" | [4:8] step the mask is for | [8:12] body bytes | [12:16] table digest | body

little-endian, zero-padded to a multiple of 16. The body holds, per piece in wire order, the
positions as `bits` or `index12` (see `packing`). The top bit of the body length marks the delta
form: keep bits over the old positions, then the added positions as index12.

Legend: `K` positions.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.scape import packing
from thinwire.scape.table import Piece

__all__ = ["MASK_FORMATS", "MaskWire", "body_nbytes", "message_nbytes"]

MASK_FORMATS = ("auto", "bits", "index12", "delta")
MAGIC = b"TWMK"
HEADER_BYTES = 16
_DELTA = 1 << 31


def body_nbytes(pieces: Sequence[Piece], density: float, mask_format: str) -> int:
    """Return the body's length without the delta form: of shapes and density alone."""
    return sum(_piece_nbytes(p.numel, p.kept(density), mask_format) for p in pieces)


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
            delta = torch.cat([_delta(p, n, o) for p, n, o in rows if o is not None])
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
        parts = []
        for piece, positions in zip(self.pieces, new, strict=True):
            form = packing.form_of(piece.numel, positions.numel(), self.mask_format)
            pack = packing.pack_bits if form == "bits" else packing.pack_index12
            parts.append(pack(positions, piece.numel))
        return torch.cat(parts)

    def _read_plain(self, body: Tensor) -> list[Tensor]:
        if body.numel() != body_nbytes(self.pieces, self.density, self.mask_format):
            raise WireError(f"a mask message of {body.numel()} bytes is truncated or of another k")
        out, at = [], 0
        for piece in self.pieces:
            k = piece.kept(self.density)
            nbytes = _piece_nbytes(piece.numel, k, self.mask_format)
            part = body[at : at + nbytes]
            at += nbytes
            if packing.form_of(piece.numel, k, self.mask_format) == "bits":
                out.append(_counted(packing.unpack_bits(part, piece.numel), k))
            else:
                out.append(packing.unpack_index12(part, piece.numel, k))
        return out

    def _read_delta(self, body: Tensor, old: Sequence[Tensor | None]) -> list[Tensor]:
        out, at = [], 0
        for piece, before in zip(self.pieces, old, strict=True):
            if before is None:
                raise WireError("a delta mask arrived, but this rank holds no earlier mask")
            k, nbytes = piece.kept(self.density), packing.bits_nbytes(before.numel())
            kept = before[packing.unpack_bits(body[at : at + nbytes], before.numel())]
            at += nbytes
            added, nbytes = k - kept.numel(), packing.index12_nbytes(piece.numel, k - kept.numel())
            new = packing.unpack_index12(body[at : at + nbytes], piece.numel, added)
            at += nbytes
            out.append(torch.cat((kept, new)).sort().values)
        return out


def _delta(piece: Piece, new: Tensor, old: Tensor) -> Tensor:
    kept = torch.isin(old, new, assume_unique=True).nonzero().view(-1)
    added = new[~torch.isin(new, old, assume_unique=True)]
    return torch.cat(
        (packing.pack_bits(kept, old.numel()), packing.pack_index12(added, piece.numel))
    )


def _counted(positions: Tensor, k: int) -> Tensor:
    if positions.numel() != k:
        raise WireError(f"a mask of {k} positions has {positions.numel()} bits set")
    return positions


def _piece_nbytes(numel: int, k: int, mask_format: str) -> int:
    if packing.form_of(numel, k, mask_format) == "bits":
        return packing.bits_nbytes(numel)
    return packing.index12_nbytes(numel, k)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
