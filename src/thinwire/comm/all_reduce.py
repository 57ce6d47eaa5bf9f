"""All-reduce that carries codec buffers, in one or two shots.

One shot: 1. encode x. 2. gather the R buffers. 3. decode and add them in rank order, fp32.
One rounding per contribution, (R-1)*W bytes sent: right for 2 ranks and for small messages.

Two shots: 1. cut x into R chunks, encode each. 2. all-to-all. 3. add the R buffers of the own chunk
in rank order, fp32, and encode the sum. 4. gather the R sums. 5. decode. Two roundings whatever R
is, 2(R-1)*W/R bytes sent.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.codecs.protocol import Codec
from thinwire.comm import call, ledger, transport
from thinwire.comm.reduce_scatter import encode_chunks
from thinwire.errors import ConfigError

__all__ = ["ALGORITHMS", "all_reduce", "chunk_numel", "pick_algorithm"]

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

    Returns:
        A tensor like x, bit-equal on all ranks of the group.

    Raises:
        ConfigError: unknown algorithm or policy.
        NonFiniteError: on every rank of the group, under nonfinite="raise".
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return torch.ops.thinwire.all_reduce(
        x,
        call.codec_name(codec),
        call.group_name(group),
        link,
        call.ledger_id(ledger),
        algorithm,
        nonfinite,
        -1 if min_bytes is None else min_bytes,
        exempt,
    )


def chunk_numel(numel: int, num_ranks: int, codec: Codec) -> int:
    """Return the elements per chunk of the two-shot form: a multiple of the codec's granule."""
    granule = codec.facts.granule
    return -(-numel // (num_ranks * granule)) * granule


def pick_algorithm(numel: int, dtype: torch.dtype, num_ranks: int, codec: Codec) -> str:
    """Return the form that sends fewer bytes; on a tie the one with a single rounding."""
    one = ledger.all_gather_sent(codec.wire_nbytes(numel, dtype), num_ranks)
    chunk = codec.wire_nbytes(chunk_numel(numel, num_ranks, codec), dtype)
    two = 2 * ledger.all_gather_sent(chunk, num_ranks)
    return "one_shot" if one <= two else "two_shot"


def _message_nbytes(
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
) -> Tensor:
    pg, books = _compat.group_from_name(group), call.find_ledger(ledger_id)
    dense_bytes = ledger.all_reduce_sent(x.numel() * x.itemsize, pg.size())
    how = call.find_codec(codec)
    if how is not None:
        if algorithm == "auto":
            algorithm = pick_algorithm(x.numel(), x.dtype, pg.size(), how)
        message_bytes = _message_nbytes(x.numel(), x.dtype, pg.size(), how, algorithm)
        exempt = call.gate(how, x.numel(), x.dtype, message_bytes, min_bytes)
    if how is None or exempt or pg.size() == 1 or x.numel() == 0:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        if x.numel():
            dist.all_reduce(out, group=pg)
        call.book(books, link, dense_bytes=dense_bytes, wire_bytes=dense_bytes, exempt=exempt)
        return out
    form = _one_shot if algorithm == "one_shot" else _two_shot
    total, wire_bytes = form(call.prepare(x, nonfinite), how, pg, link, books, nonfinite)
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
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _one_shot(
    x: Tensor,
    codec: Codec,
    pg: dist.ProcessGroup,
    link: str,
    books: ledger.Ledger | None,
    nonfinite: str,
) -> tuple[Tensor, int]:
    with call.timed(books, link, "encode_s"):
        message = codec.encode(x)
    with call.timed(books, link, "wait_s"):
        wires, _ = transport.all_gather(message, pg)
    call.raise_if_flagged(codec, wires, x.numel(), x.dtype, nonfinite, link)
    with call.timed(books, link, "decode_s"):
        total = codec.decode_sum(wires, x.numel(), x.dtype)
    return total, ledger.all_gather_sent(message.numel(), pg.size())


def _encode_sum(total: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """Encode the fp32 sum unrounded, unless the wire then grew (a codec that keeps the dtype)."""
    same_wire = codec.wire_nbytes(total.numel(), total.dtype) == codec.wire_nbytes(
        total.numel(), dtype
    )
    return codec.encode(total if same_wire else total.to(dtype))


def _two_shot(
    x: Tensor,
    codec: Codec,
    pg: dist.ProcessGroup,
    link: str,
    books: ledger.Ledger | None,
    nonfinite: str,
) -> tuple[Tensor, int]:
    num_ranks, numel = pg.size(), x.numel()
    chunk = chunk_numel(numel, num_ranks, codec)
    if chunk * num_ranks != numel:
        x = torch.nn.functional.pad(x, (0, chunk * num_ranks - numel))
    with call.timed(books, link, "encode_s"):
        messages = encode_chunks(x.view(num_ranks, chunk), codec, nonfinite)
    with call.timed(books, link, "wait_s"):
        wires = transport.all_to_all(messages, pg)
    with call.timed(books, link, "encode_s"):
        message = _encode_sum(codec.decode_sum(wires, chunk, x.dtype), codec, x.dtype)
    with call.timed(books, link, "wait_s"):
        sums, _ = transport.all_gather(message, pg)
    call.raise_if_flagged(codec, sums, chunk, x.dtype, nonfinite, link)
    with call.timed(books, link, "decode_s"):
        out = codec.decode(sums, chunk, x.dtype).view(-1)[:numel]
    sent = ledger.all_gather_sent(messages.shape[1] + message.numel(), num_ranks)
    return out, sent
