"""The compressed forms of all-reduce over one flat group, whole or in slices.

One shot: 1. encode x. 2. gather the R buffers. 3. decode and add them in rank order, fp32.
One rounding per contribution, (R-1)*W bytes sent: right for 2 ranks and for small messages.

Two shots: 1. cut x into R chunks, encode each. 2. all-to-all. 3. add the R buffers of the own chunk
in rank order, fp32, and encode the sum. 4. gather the R sums. 5. decode. Two roundings whatever R
is, 2(R-1)*W/R bytes sent.

In slices: the message is cut at multiples of the codec's granule (times R for two shots), and a
slice is coded while the one before it flies. Blocks stay whole, so values and bytes don't change.

Legend: `R` ranks, `W` wire bytes, `N` elements.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.protocol import Codec
from thinwire.comm import call, ledger, transport
from thinwire.errors import ConfigError

__all__ = [
    "Shot",
    "as_sent",
    "check_slices",
    "cut",
    "encode_chunks",
    "encode_sum",
    "join",
    "one_shot",
    "pad_to",
    "two_shot",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """What one call passes to its form.

    Attributes:
        codec: how messages travel.
        group: the ranks.
        link: ledger link.
        books: the ledger, if any.
        nonfinite: "raise", "zero" or "propagate".
        slices: parts that overlap coding and sending.
    """

    codec: Codec
    group: dist.ProcessGroup
    link: str
    books: ledger.Ledger | None
    nonfinite: str
    slices: int = 1

    def check(self, wires: Tensor, numel: int, dtype: torch.dtype) -> int:
        """Return how many received blocks are flagged, 0 unless such blocks must raise."""
        return call.count_flagged(self.codec, wires, numel, dtype, self.nonfinite)

    def note(self, wires: Tensor, numel: int, dtype: torch.dtype) -> None:
        """Book how many blocks of own messages are flagged, where such blocks don't raise."""
        silent = self.nonfinite != "raise" and self.codec.facts.flags_nonfinite
        if silent and self.books is not None:
            count = self.codec.nonfinite_count(wires, numel, dtype)
            self.books.book_nonfinite(self.link, count)


def check_slices(codec: Codec | None, slices: int) -> None:
    """Raise ConfigError for a number of slices that would change what the codec sends."""
    if slices < 1 or slices > 64:
        raise ConfigError(f"slices must lie between 1 and 64, got {slices}")
    if slices == 1 or codec is None:
        return
    part = 16 * codec.facts.granule
    one, two = (codec.wire_nbytes(k * part, torch.bfloat16) for k in (1, 2))
    if two != 2 * one:
        raise ConfigError(
            f"slices={slices} would change the message of {codec!r}, whose header or scale belongs "
            "to the whole of it: use slices=1"
        )


def cut(numel: int, unit: int, slices: int) -> list[tuple[int, int]]:
    """Return (start, stop) of at most `slices` parts of N, cut at multiples of `unit`."""
    units = max(-(-numel // unit), 1)
    count = min(slices, units)
    marks = [(units * i // count) * unit for i in range(count)] + [numel]
    return list(pairwise(marks))


def pad_to(x: Tensor, numel: int) -> Tensor:
    """Return flat x with zeros appended up to `numel`."""
    return x if x.numel() == numel else torch.nn.functional.pad(x, (0, numel - x.numel()))


def encode_chunks(x_RN: Tensor, codec: Codec, nonfinite: str) -> Tensor:
    """Return the rows of x [R, N] as messages [R, W].

    Under "raise", a rank with a NaN or infinity anywhere flags all its messages: each peer sees
    only its own chunk, and all must raise alike.
    """
    num_chunks, numel = x_RN.shape
    wires = x_RN.new_empty(num_chunks, codec.wire_nbytes(numel, x_RN.dtype), dtype=torch.uint8)
    for row, wire in zip(x_RN, wires, strict=True):
        codec.encode(row, out=wire)
    flags = nonfinite == "raise" and codec.facts.flags_nonfinite and numel > 0
    if flags and codec.nonfinite_count(wires, numel, x_RN.dtype):
        wires[:] = codec.encode(torch.full_like(x_RN[0], float("nan")))
    return wires


def encode_sum(wires: Tensor, numel: int, dtype: torch.dtype, codec: Codec) -> Tensor:
    """Return the sum of R buffers [R, W], in rank order, as one buffer [W].

    A codec with a `decode_sum_encode` of its own does it in one pass, and decides whether the sum
    is rounded to `dtype` between; else the sum stays fp32.
    """
    fused = getattr(codec, "decode_sum_encode", None)
    if fused is not None:
        return fused(wires, numel, dtype)
    return codec.encode(as_sent(codec.decode_sum(wires, numel, dtype), codec, dtype))


def as_sent(total: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """Return an fp32 sum unrounded, unless the wire then grew (a codec that keeps the dtype)."""
    numel = total.numel()
    same_wire = codec.wire_nbytes(numel, total.dtype) == codec.wire_nbytes(numel, dtype)
    return total if same_wire else total.to(dtype)


def one_shot(x: Tensor, shot: Shot) -> tuple[Tensor, int]:
    """Return the fp32 sum of flat x over the group, and the bytes sent."""
    codec, flagged, sent = shot.codec, 0, 0
    parts = cut(x.numel(), codec.facts.granule, shot.slices)
    flights = []
    for start, stop in parts:
        with call.timed(shot.books, shot.link, "encode_s"):
            message = codec.encode(x[start:stop])
        shot.note(message, stop - start, x.dtype)
        sent += ledger.all_gather_sent(message.numel(), shot.group.size())
        flights.append(transport.all_gather(message, shot.group, async_op=True))
    totals = []
    for (start, stop), (wires, work) in zip(parts, flights, strict=True):
        transport.wait(work, shot.books, shot.link)
        flagged += shot.check(wires, stop - start, x.dtype)
        with call.timed(shot.books, shot.link, "decode_s"):
            totals.append(codec.decode_sum(wires, stop - start, x.dtype))
    call.raise_flagged(flagged, shot.link)
    return join(totals), sent


def two_shot(x: Tensor, shot: Shot) -> tuple[Tensor, int]:
    """Return the sum of flat x over the group in its dtype, and the bytes sent."""
    codec, num_ranks, flagged, sent = shot.codec, shot.group.size(), 0, 0
    numel, dtype = x.numel(), x.dtype
    unit = num_ranks * codec.facts.granule
    x = pad_to(x, -(-numel // unit) * unit)
    parts = cut(x.numel(), unit, shot.slices)
    chunks = [(stop - start) // num_ranks for start, stop in parts]
    flights = []
    for (start, stop), chunk in zip(parts, chunks, strict=True):
        with call.timed(shot.books, shot.link, "encode_s"):
            messages = encode_chunks(x[start:stop].view(num_ranks, chunk), codec, shot.nonfinite)
        shot.note(messages, chunk, dtype)
        sent += ledger.reduce_scatter_sent(messages.shape[1], num_ranks)
        flights.append(transport.start_all_to_all(messages, shot.group))
    sums = []
    for chunk, (wires, work) in zip(chunks, flights, strict=True):
        transport.wait(work, shot.books, shot.link)
        with call.timed(shot.books, shot.link, "encode_s"):
            message = encode_sum(wires, chunk, dtype, codec)
        sent += ledger.all_gather_sent(message.numel(), num_ranks)
        sums.append(transport.all_gather(message, shot.group, async_op=True))
    outs = []
    for chunk, (wires, work) in zip(chunks, sums, strict=True):
        transport.wait(work, shot.books, shot.link)
        flagged += shot.check(wires, chunk, dtype)
        with call.timed(shot.books, shot.link, "decode_s"):
            outs.append(codec.decode(wires, chunk, dtype).view(-1))
    call.raise_flagged(flagged, shot.link)
    return join(outs)[:numel], sent


def join(parts: list[Tensor]) -> Tensor:
    """Return flat parts as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
