"""All-reduce that carries codec buffers, in one or two shots or in tiers of nodes."""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.codecs.protocol import Codec
from thinwire.comm import call, ledger
from thinwire.comm.hierarchical import Hierarchy, three_shot
from thinwire.comm.shots import Shot, check_slices, one_shot, two_shot
from thinwire.errors import ConfigError

__all__ = [
    "ALGORITHMS",
    "all_reduce",
    "chunk_numel",
    "message_nbytes",
    "pick_algorithm",
    "sent_nbytes",
]

ALGORITHMS = ("auto", "one_shot", "two_shot")


def all_reduce(
    x: Tensor,
    codec: Codec | None,
    *,
    group: dist.ProcessGroup | None = None,
    link: str = "gradients",
    ledger: ledger.Ledger | None = None,
    algorithm: str = "auto",
    nonfinite: str = "raise",
    min_bytes: int | None = None,
    exempt: str = "",
    slices: int = 1,
    tiers: Hierarchy | None = None,
) -> Tensor:
    """Return the sum of x over all ranks.

    Args:
        x: floating tensor of the same shape and dtype on every rank.
        codec: how messages travel; None uses torch's own collective (its own sum order).
        group: process group, None for the world.
        link: ledger link to book on.
        ledger: books the call, if given.
        algorithm: "one_shot", "two_shot" or "auto" (fewest bytes, one shot on a tie).
        nonfinite: what NaN or infinity do: "raise" on all ranks, "zero" them, or "propagate".
        min_bytes: a message of fewer dense bytes, or one that would not shrink, goes as it is
            (booked as exempt); None lets the codec carry every message.
        exempt: with codec=None, why this message is left uncompressed on purpose (for the ledger).
        slices: parts into which the message is cut, so that one is coded while another flies;
            values and bytes stay the same.
        tiers: all-reduce inside nodes, then across them, in place of `algorithm`; cuts `group`.

    Returns:
        A tensor like x, bit-equal on all ranks of the group.

    Raises:
        ConfigError: unknown algorithm or policy, or slices that the codec can't take.
        NonFiniteError: on every rank of the group, under nonfinite="raise".
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    check_slices(codec, slices)
    return torch.ops.thinwire.all_reduce(
        x,
        call.codec_name(codec, nonfinite),
        call.group_name(group),
        link,
        call.ledger_id(ledger),
        algorithm,
        nonfinite,
        -1 if min_bytes is None else min_bytes,
        exempt,
        slices,
        "" if tiers is None else tiers.intra.group_name,
        "" if tiers is None else tiers.inter.group_name,
    )


def chunk_numel(numel: int, num_ranks: int, codec: Codec) -> int:
    """Return the elements per chunk of the two-shot form: a multiple of the codec's granule."""
    granule = codec.facts.granule
    return -(-numel // (num_ranks * granule)) * granule


def sent_nbytes(
    numel: int, dtype: torch.dtype, num_ranks: int, codec: Codec, algorithm: str
) -> int:
    """Return the bytes one rank sends in a form, "one_shot" or "two_shot" in one slice."""
    if algorithm == "one_shot":
        return ledger.all_gather_sent(codec.wire_nbytes(numel, dtype), num_ranks)
    chunk = codec.wire_nbytes(chunk_numel(numel, num_ranks, codec), dtype)
    return ledger.reduce_scatter_sent(chunk, num_ranks) + ledger.all_gather_sent(chunk, num_ranks)


def pick_algorithm(numel: int, dtype: torch.dtype, num_ranks: int, codec: Codec) -> str:
    """Return the form that sends fewer bytes; on a tie the one with a single rounding."""
    one, two = (
        sent_nbytes(numel, dtype, num_ranks, codec, form) for form in ("one_shot", "two_shot")
    )
    return "one_shot" if one <= two else "two_shot"


def message_nbytes(
    numel: int, dtype: torch.dtype, num_ranks: int, codec: Codec, algorithm: str
) -> int:
    """Return the encoded bytes of x, padding included, as the form cuts it."""
    if algorithm == "one_shot":
        return codec.wire_nbytes(numel, dtype)
    return num_ranks * codec.wire_nbytes(chunk_numel(numel, num_ranks, codec), dtype)


@torch.library.custom_op("thinwire::all_reduce", mutates_args=())
def _all_reduce(
    x: Tensor,
    codec: str,
    group: str,
    link: str,
    ledger_id: int,
    algorithm: str,
    nonfinite: str,
    min_bytes: int = -1,
    exempt: str = "",
    slices: int = 1,
    intra: str = "",
    inter: str = "",
) -> Tensor:
    pg, books = _compat.group_from_name(group), call.find_ledger(ledger_id)
    dense_bytes = ledger.all_reduce_sent(x.numel() * x.itemsize, pg.size())
    how = call.find_codec(codec)
    if how is not None:
        if algorithm == "auto":
            algorithm = pick_algorithm(x.numel(), x.dtype, pg.size(), how)
        message_bytes = message_nbytes(x.numel(), x.dtype, pg.size(), how, algorithm)
        exempt = call.gate(how, x.numel(), x.dtype, message_bytes, min_bytes)
    if how is None or exempt or pg.size() == 1 or x.numel() == 0:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        if x.numel():
            dist.all_reduce(out, group=pg)
        call.book(books, link, dense_bytes=dense_bytes, wire_bytes=dense_bytes, exempt=exempt)
        return out
    x_N = call.prepare(x, nonfinite, how)
    shot = Shot(
        codec=how,
        group=_compat.group_from_name(intra) if intra else pg,
        link=link,
        books=books,
        nonfinite=nonfinite,
        slices=slices,
    )
    if inter:
        total, wire_bytes = three_shot(x_N, shot, _compat.group_from_name(inter))
    elif algorithm == "one_shot":
        total, wire_bytes = one_shot(x_N, shot)
    else:
        total, wire_bytes = two_shot(x_N, shot)
    call.book(books, link, dense_bytes=dense_bytes, wire_bytes=wire_bytes)
    return total.to(x.dtype).view(x.shape)


@_all_reduce.register_fake
def _(
    x: Tensor,
    codec: str,
    group: str,
    link: str,
    ledger_id: int,
    algorithm: str,
    nonfinite: str,
    min_bytes: int = -1,
    exempt: str = "",
    slices: int = 1,
    intra: str = "",
    inter: str = "",
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
