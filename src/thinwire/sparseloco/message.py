"""One replica's message of a round: a header of 128 bytes, then the payload.

Little-endian: magic, version, flags, round, replica, stage, tokens, payload bytes, tensors, basis
version, config hash, table hash, SHA-256 of the payload, start of the anchor's SHA-256 (or zeros),
CRC-32 of what stands before it. Flags: bit 0 abstain; 1-2 quant (0 none, 1 paper, 2 sym, 3 paper
of more bins); 3-4 chunking; 5 bf16 levels.

A message is judged before any of its numbers is used, and rejected whole.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.errors import ContractError, WireError
from thinwire.sparseloco.table import HEADER_NBYTES, Record, Table

__all__ = ["ABSTAIN", "Header", "Message", "pack", "sha256", "unpack"]

MAGIC, VERSION, ABSTAIN = b"TWSL", 1, 1
_LAYOUT = struct.Struct("<4sHHQIIQQII16s16s32s12s")
_NO_ANCHOR = bytes(12)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a message.

    Attributes:
        flags: see the module.
        round: number of the outer round.
        replica: who sends.
        stage: partition (pipeline stage).
        tokens: processed by the sender in this round.
        payload_nbytes: length of the payload, in bytes.
        num_tensors: records of the payload.
        basis_version: of the pipeline's subspace; 0 for none.
        config_hash, table_hash: 16 bytes each, equal on all replicas.
        anchor: first 12 bytes of the anchor's SHA-256, or zeros where it isn't compared.
        payload_sha: SHA-256 of the payload.
    """

    flags: int
    round: int
    replica: int
    stage: int
    tokens: int
    payload_nbytes: int
    num_tensors: int
    basis_version: int
    config_hash: bytes
    table_hash: bytes
    anchor: bytes = _NO_ANCHOR
    payload_sha: bytes = bytes(32)

    @property
    def abstains(self) -> bool:
        """Return whether the sender takes no part in the mean."""
        return bool(self.flags & ABSTAIN)


@dataclass(frozen=True)
class Message:
    """A message that passed every check.

    Attributes:
        header: its header.
        payload: uint8 [payload_nbytes].
        norms: L2 norm of each record as decoded, in wire order.
    """

    header: Header
    payload: Tensor
    norms: tuple[float, ...]


def sha256(x: Tensor) -> bytes:
    """Return the hash of a contiguous tensor's bytes."""
    flat = x.detach().reshape(-1).cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()


def pack(header: Header, message: Tensor) -> None:
    """Write the header, with the hash of the payload behind it, into uint8 [128 + payload]."""
    h = replace(header, payload_sha=sha256(message[HEADER_NBYTES:]))
    head = _LAYOUT.pack(
        MAGIC, VERSION, h.flags, h.round, h.replica, h.stage, h.tokens, h.payload_nbytes,
        h.num_tensors, h.basis_version, h.config_hash, h.table_hash, h.payload_sha, h.anchor,
    )  # fmt: skip
    head += struct.pack("<I", zlib.crc32(head))
    message[:HEADER_NBYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)


def read_header(message: Tensor) -> Header:
    """Return the header of uint8 [W].

    Raises:
        WireError: too short, damaged, or not such a message.
    """
    if message.numel() < HEADER_NBYTES:
        raise WireError(f"{message.numel()} bytes are no message")
    head = message[:HEADER_NBYTES].cpu().numpy().tobytes()
    if struct.unpack("<I", head[124:])[0] != zlib.crc32(head[:124]):
        raise WireError("the header's CRC does not fit")
    magic, version, *rest = _LAYOUT.unpack(head[:124])
    if magic != MAGIC or version != VERSION:
        raise WireError(f"magic {magic!r}, version {version}: not a message of version {VERSION}")
    flags, round_, replica, stage, tokens, nbytes, tensors, basis, config, table, sha, anchor = rest
    return Header(
        flags=flags, round=round_, replica=replica, stage=stage, tokens=tokens,
        payload_nbytes=nbytes, num_tensors=tensors, basis_version=basis, config_hash=config,
        table_hash=table, anchor=anchor, payload_sha=sha,
    )  # fmt: skip


def unpack(message: Tensor, table: Table, want: Header) -> Message:
    """Judge a message and return it with the norms of its tensors.

    Args:
        message: uint8 [W].
        table: this side's records.
        want: this side's header; tokens, hash of the payload and the abstain bit may differ.

    Raises:
        WireError: whatever is wrong with it, in words.
        ContractError: a sound message whose sender holds another anchor.
    """
    got = read_header(message)
    for name in ("round", "replica", "stage", "payload_nbytes", "num_tensors", "basis_version"):
        if getattr(got, name) != getattr(want, name):
            raise WireError(f"{name} is {getattr(got, name)}, not {getattr(want, name)}")
    for name, what in (("config_hash", "settings"), ("table_hash", "tensors")):
        if getattr(got, name) != getattr(want, name):
            raise WireError(f"the sender has other {what}")
    if got.flags & ~ABSTAIN != want.flags & ~ABSTAIN:
        raise WireError(f"flags are {got.flags:#x}, not {want.flags:#x}")
    payload = message[HEADER_NBYTES:]
    if payload.numel() != table.payload_nbytes:
        raise WireError(f"{payload.numel()} bytes of payload, not {table.payload_nbytes}")
    if sha256(payload) != got.payload_sha:
        raise WireError("the payload's SHA-256 does not fit")
    if _NO_ANCHOR not in (got.anchor, want.anchor) and got.anchor != want.anchor:
        raise ContractError(
            f"replica {got.replica} holds another anchor than replicas here in round {got.round}: "
            "replicas drifted, or started from other weights"
        )
    if got.abstains:
        return Message(got, payload, (0.0,) * len(table.records))
    return Message(got, payload, tuple(_norm(record, payload) for record in table.records))


def _norm(record: Record, payload: Tensor) -> float:
    if record.numel == 0:
        return 0.0
    _, value = record.decode(payload)
    norm = torch.linalg.vector_norm(value.double()).float().item()
    # Squares beyond fp32's range: with smaller ones, no mean of messages can overflow.
    if not norm < 1e18:
        raise WireError(f"the norm of {record.name!r} is {norm:g}")
    return norm
