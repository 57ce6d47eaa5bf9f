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

    Returns:
        [R, *x.shape] in x.dtype, bit-equal on all ranks.

    Raises:
        NonFiniteError: on every rank of the group, under nonfinite="raise".
    """
    return torch.ops.thinwire.all_gather(
        x,
        call.codec_name(codec),
        call.group_name(group),
        link,
        call.ledger_id(ledger),
        nonfinite,
        -1 if min_bytes is None else min_bytes,
        exempt,
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
    with call.timed(books, link, "encode_s"):
        message = how.encode(call.prepare(x, nonfinite))
    with call.timed(books, link, "wait_s"):
        wires, _ = transport.all_gather(message, pg)
    wire_bytes = ledger.all_gather_sent(message.numel(), pg.size())
    call.book(books, link, dense_bytes=dense_bytes, wire_bytes=wire_bytes)
    call.raise_if_flagged(how, wires, x.numel(), x.dtype, nonfinite, link)
    with call.timed(books, link, "decode_s"):
        return how.decode(wires, x.numel(), x.dtype).view(pg.size(), *x.shape)


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
) -> Tensor:
    return x.new_empty(_compat.group_from_name(group).size(), *x.shape)
