"""Reduce-scatter that carries codec buffers, one rounding per contribution.

Steps: 1. cut x into R chunks and encode each. 2. all-to-all: chunk r goes to rank r. 3. decode the
R buffers received and add them in fp32, in rank order.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.codecs.protocol import Codec
from thinwire.comm import call, ledger, transport
from thinwire.comm.shots import Shot, check_slices, cut, encode_chunks, join
from thinwire.errors import ConfigError

__all__ = ["reduce_scatter"]


def reduce_scatter(
    x: Tensor,
    codec: Codec | None,
    *,
    group: dist.ProcessGroup | None = None,
    link: str = "gradients",
    ledger: ledger.Ledger | None = None,
    nonfinite: str = "raise",
    min_bytes: int | None = None,
    exempt: str = "",
    slices: int = 1,
) -> Tensor:
    """Sum x over all ranks and return this rank's part of the sum.

    Args:
        x: floating tensor [R*n, ...], the same shape on every rank.
        codec: how each chunk travels; None sends it as it is (see
            `transport.dense_reduce_scatter`; torch decides the order of the sum but on gloo).
        group: process group, None for the world.
        link: ledger link to book on.
        ledger: books the call, if given.
        nonfinite: what NaN or infinity do: "raise" on all ranks, "zero" them, or "propagate".
        min_bytes: a message of fewer dense bytes, or one that would not shrink, goes as it is
            (booked as exempt); None lets the codec carry every message.
        exempt: with codec=None, why this message is left uncompressed on purpose (for the ledger).
        slices: parts into which each chunk is cut, so that one is coded while another flies;
            values and bytes stay the same.

    Returns:
        [n, ...] in x.dtype; the sum runs in fp32 in rank order.

    Raises:
        ConfigError: x.shape[0] is no multiple of the group's size.
        NonFiniteError: on every rank of the group, under nonfinite="raise".
    """
    num_ranks = (group or _compat.default_group()).size()
    if x.dim() == 0 or x.shape[0] % num_ranks:
        raise ConfigError(
            f"reduce_scatter cuts dimension 0 into {num_ranks} equal parts, got shape "
            f"{tuple(x.shape)}: pad it to a multiple of {num_ranks}"
        )
    check_slices(codec, slices)
    return torch.ops.thinwire.reduce_scatter(
        x,
        call.codec_name(codec, nonfinite),
        call.group_name(group),
        link,
        call.ledger_id(ledger),
        nonfinite,
        -1 if min_bytes is None else min_bytes,
        exempt,
        slices,
    )


@torch.library.custom_op("thinwire::reduce_scatter", mutates_args=())
def _reduce_scatter(
    x: Tensor,
    codec: str,
    group: str,
    link: str,
    ledger_id: int,
    nonfinite: str,
    min_bytes: int = -1,
    exempt: str = "",
    slices: int = 1,
) -> Tensor:
    pg, books = _compat.group_from_name(group), call.find_ledger(ledger_id)
    num_ranks = pg.size()
    shape = (x.shape[0] // num_ranks, *x.shape[1:])
    numel = x.numel() // num_ranks
    dense_bytes = ledger.reduce_scatter_sent(numel * x.itemsize, num_ranks)
    how = call.find_codec(codec)
    if how is not None:
        wire_bytes = num_ranks * how.wire_nbytes(numel, x.dtype)
        exempt = call.gate(how, x.numel(), x.dtype, wire_bytes, min_bytes)
    if how is None or exempt or pg.size() == 1 or numel == 0:
        out = x.new_empty(shape)
        if numel:
            transport.dense_reduce_scatter(out.view(-1), x.detach().contiguous().view(-1), pg)
        call.book(books, link, dense_bytes=dense_bytes, wire_bytes=dense_bytes, exempt=exempt)
        return out
    shot = Shot(codec=how, group=pg, link=link, books=books, nonfinite=nonfinite, slices=slices)
    total, wire_bytes = _scatter(call.prepare(x, nonfinite, how).view(num_ranks, numel), shot)
    call.book(books, link, dense_bytes=dense_bytes, wire_bytes=wire_bytes)
    return total.to(x.dtype).view(shape)


def _scatter(x_RN: Tensor, shot: Shot) -> tuple[Tensor, int]:
    """Return the fp32 sum [N] of this rank's row over the group, and the bytes sent."""
    codec, flagged, sent = shot.codec, 0, 0
    parts = cut(x_RN.shape[1], codec.facts.granule, shot.slices)
    flights = []
    for start, stop in parts:
        with call.timed(shot.books, shot.link, "encode_s"):
            messages = encode_chunks(x_RN[:, start:stop], codec, shot.nonfinite)
        shot.note(messages, stop - start, x_RN.dtype)
        sent += ledger.reduce_scatter_sent(messages.shape[1], shot.group.size())
        flights.append(transport.start_all_to_all(messages, shot.group))
    totals = []
    for (start, stop), (wires, work) in zip(parts, flights, strict=True):
        transport.wait(work, shot.books, shot.link)
        flagged += shot.check(wires, stop - start, x_RN.dtype)
        with call.timed(shot.books, shot.link, "decode_s"):
            totals.append(codec.decode_sum(wires, stop - start, x_RN.dtype))
    call.raise_flagged(flagged, shot.link)
    return join(totals), sent


@_reduce_scatter.register_fake
def _(
    x: Tensor,
    codec: str,
    group: str,
    link: str,
    ledger_id: int,
    nonfinite: str,
    min_bytes: int = -1,
    exempt: str = "",
    slices: int = 1,
) -> Tensor:
    return x.new_empty(x.shape[0] // _compat.group_from_name(group).size(), *x.shape[1:])
