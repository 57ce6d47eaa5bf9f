"""The mean over workers, and what it costs: the same sums in a process group and in one process.

Legend: `E` elements of a message, `N` workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Cast
from thinwire.comm.all_reduce import pick_algorithm, sent_nbytes
from thinwire.comm.ledger import Ledger, all_gather_sent, all_reduce_sent
from thinwire.errors import ConfigError
from thinwire.scape.table import DENSE_FROM, Table

__all__ = ["Books", "ValueWire", "owners_sent"]

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: None}
# Padding every owner's message to the longest may cost this much before broadcasts are used.
PADDING_LIMIT = 1.25


@dataclass(frozen=True)
class ValueWire:
    """How values travel.

    Attributes:
        dtype: float32, bfloat16, or float64 for float64 state.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise ConfigError(f"values_dtype must be float32 or bfloat16, got {self.dtype}")

    @property
    def codec(self) -> Cast:
        """Return the codec of a message."""
        return Cast(_NAMES[self.dtype])

    def quantize(self, x: Tensor) -> Tensor:
        """Return x as the wire makes it, in x's dtype."""
        return x.to(self.dtype).to(x.dtype)

    def sent_bytes(self, numel: int, num_ranks: int, *, ordered: bool = True) -> int:
        """Return what one rank sends to sum E elements over N ranks."""
        codec, dtype = self.codec, self._state_dtype
        if not ordered:
            return all_reduce_sent(codec.wire_nbytes(numel, dtype), num_ranks)
        algorithm = pick_algorithm(numel, dtype, num_ranks, codec)
        return sent_nbytes(numel, dtype, num_ranks, codec, algorithm)

    def mean(self, messages: Sequence[Tensor]) -> Tensor:
        """Return the mean [E] of the workers' messages, as `comm.all_reduce` rounds and adds."""
        numel, dtype, num_ranks = messages[0].numel(), messages[0].dtype, len(messages)
        codec = self.codec
        wires = torch.stack([codec.encode(x) for x in messages])
        total = codec.decode_sum(wires, numel, dtype)
        if num_ranks > 1 and pick_algorithm(numel, dtype, num_ranks, codec) == "two_shot":
            total = codec.decode(codec.encode(total), numel, dtype)
        return total / num_ranks

    @property
    def _state_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def owners_sent(lengths: Sequence[int]) -> tuple[bool, int]:
    """Return how owners' messages of these bytes reach all: (padded all-gather?, bytes per rank).

    Padded to the longest and gathered if that costs at most a quarter more, else broadcast one by
    one, which costs a rank its share of the whole on average.
    """
    num_ranks, total = len(lengths), sum(lengths)
    if num_ranks * max(lengths) <= PADDING_LIMIT * total:
        return True, all_gather_sent(max(lengths), num_ranks)
    return False, -(-total * (num_ranks - 1) // num_ranks)


@dataclass(frozen=True)
class Books:
    """Book a step's messages.

    Attributes:
        ledger: where; None books nothing.
        table: what is exempt.
        wire: how values travel.
        ordered: rank-order sums, or torch's own.
    """

    ledger: Ledger | None
    table: Table
    wire: ValueWire
    ordered: bool = True

    def declare(self) -> None:
        """List the dense pieces, and hold the gradients link to being compressed."""
        if self.ledger is None:
            return
        for piece in self.table.pieces:
            if piece.dense and piece.numel:
                size = piece.numel * self.wire.dtype.itemsize
                self.ledger.declare_exempt("gradients", piece.name, piece.dense, size)
        self.ledger.expect("gradients", num_ranks=self.table.num_ranks)

    def values(self, message_numels: Sequence[int], density: float) -> None:
        """Book the value messages of one step (one, or one per run that overlaps backward)."""
        num_ranks = self.table.num_ranks
        if self.ledger is None or num_ranks == 1:
            return
        sent = sum(self.wire.sent_bytes(n, num_ranks, ordered=self.ordered) for n in message_numels)
        dense = all_reduce_sent(self.table.numel * max(4, self.wire.dtype.itemsize), num_ranks)
        if density >= DENSE_FROM:
            exempt, reason = sent, "dense step of the density schedule"
        else:
            nbytes = self.table.dense_numel * self.wire.dtype.itemsize
            exempt, reason = all_reduce_sent(nbytes, num_ranks), "tensors that are always dense"
        self.ledger.book(
            "gradients", dense_bytes=dense, wire_bytes=sent, exempt_bytes=min(exempt, sent),
            calls=len(message_numels), reason=reason,
        )  # fmt: skip

    def owners(self, link: str, lengths: Sequence[int], *, dense: bool) -> None:
        """Book one exchange of owners' messages (`dense`: the uncompressed would cost the same)."""
        if self.ledger is None or self.table.num_ranks == 1 or not sum(lengths):
            return
        _, sent = owners_sent(lengths)
        self.ledger.book(link, dense_bytes=sent if dense else 0, wire_bytes=sent)

    def scalars(self, nbytes: int, num_ranks: int) -> None:
        """Book a reduction of a few numbers."""
        if self.ledger is not None and num_ranks > 1:
            sent = all_reduce_sent(nbytes, num_ranks)
            self.ledger.book("scalars", dense_bytes=sent, wire_bytes=sent)
