"""All-gather that carries a codec's buffer.

Steps: 1. encode x. 2. gather the R buffers. 3. decode all R, the own one too, so that every rank
holds the same bits.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.codecs.protocol import Codec
from thinwire.comm import call, ledger, transport
from thinwire.comm.shots import Shot, check_slices, cut

__all__ = ["all_gather"]


def all_gather(
    x: Tensor,
    codec: Codec | None,
    *,
    group: dist.ProcessGroup | None = None,
    link: str = "weights",
    ledger: ledger.Ledger | None = None,
    nonfinite: str = "raise",
    min_bytes: int | None = None,
    exempt: str = "",
    slices: int = 1,
) -> Tensor:
    """Gather x from all ranks, stacked in rank order.

    Args:
        x: floating tensor of the same shape and dtype on every rank.
        codec: how x travels; None sends it as it is with torch's own collective.
        group: process group, None for the world.
        link: ledger link to book on.
        ledger: books the call, if given.
        nonfinite: what NaN or infinity do: "raise" on all ranks, "zero" them, or "propagate".
        min_bytes: a message of fewer dense bytes, or one that would not shrink, goes as it is
            (booked as exempt); None lets the codec carry every message.
        exempt: with codec=None, why this message is left uncompressed on purpose (for the ledger).
        slices: parts into which the message is cut, so that one is coded while another flies;
            values and bytes stay the same.

    Returns:
        [R, *x.shape] in x.dtype, bit-equal on all ranks.

    Raises:
        NonFiniteError: on every rank of the group, under nonfinite="raise".
    """
    check_slices(codec, slices)
    return torch.ops.thinwire.all_gather(
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


@torch.library.custom_op("thinwire::all_gather", mutates_args=())
def _all_gather(
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
    dense_bytes = ledger.all_gather_sent(x.numel() * x.itemsize, pg.size())
    how = call.find_codec(codec)
    if how is not None:
        exempt = call.gate(how, x.numel(), x.dtype, how.wire_nbytes(x.numel(), x.dtype), min_bytes)
    if how is None or exempt or pg.size() == 1 or x.numel() == 0:
        out = x.new_empty(pg.size(), *x.shape)
        if x.numel():
            _compat.all_gather_single(out.view(-1), x.detach().contiguous().view(-1), group=pg)
        call.book(books, link, dense_bytes=dense_bytes, wire_bytes=dense_bytes, exempt=exempt)
        return out
    shot = Shot(codec=how, group=pg, link=link, books=books, nonfinite=nonfinite, slices=slices)
    out_RN, wire_bytes = _gather(call.prepare(x, nonfinite, how), shot)
    call.book(books, link, dense_bytes=dense_bytes, wire_bytes=wire_bytes)
    return out_RN.view(pg.size(), *x.shape)


def _gather(x: Tensor, shot: Shot) -> tuple[Tensor, int]:
    """Return flat x of all ranks as [R, N], and the bytes sent."""
    codec, flagged, sent = shot.codec, 0, 0
    parts = cut(x.numel(), codec.facts.granule, shot.slices)
    flights = []
    for start, stop in parts:
        with call.timed(shot.books, shot.link, "encode_s"):
            message = codec.encode(x[start:stop])
        shot.note(message, stop - start, x.dtype)
        sent += ledger.all_gather_sent(message.numel(), shot.group.size())
        flights.append(transport.all_gather(message, shot.group, async_op=True))
    out_RN = x.new_empty(shot.group.size(), x.numel())
    for (start, stop), (wires, work) in zip(parts, flights, strict=True):
        transport.wait(work, shot.books, shot.link)
        flagged += shot.check(wires, stop - start, x.dtype)
        with call.timed(shot.books, shot.link, "decode_s"):
            codec.decode(wires, stop - start, x.dtype, out=out_RN[:, start:stop])
    call.raise_flagged(flagged, shot.link)
    return out_RN, sent


@_all_gather.register_fake
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
    return x.new_empty(_compat.group_from_name(group).size(), *x.shape)
