"""What each collective of `thinwire.comm` codes and sends, from shapes alone.

Every function returns, in order, the codings and messages of one call; sizes are those that the
collective itself computes (same codec methods, same gate, same choice of form).
"""

import torch

from thinwire.codecs import Codec
from thinwire.comm import call
from thinwire.comm.all_reduce import chunk_numel, message_nbytes, pick_algorithm
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent, reduce_scatter_sent
from thinwire.plan.workload import Coding, Message

__all__ = ["Work", "all_gather", "all_reduce", "owners", "plain_all_reduce", "reduce_scatter"]

Work = Coding | Message


def plain_all_reduce(nbytes: int, *, link: str, axis: str, num_ranks: int) -> list[Work]:
    """Return an uncompressed all-reduce of `nbytes`."""
    dense = all_reduce_sent(nbytes, num_ranks)
    return [Message(link, axis, "all_reduce", nbytes, num_ranks, dense)]


def all_reduce(
    numel: int,
    dtype: torch.dtype,
    codec: Codec | None,
    *,
    link: str,
    axis: str,
    num_ranks: int,
    algorithm: str = "auto",
    min_bytes: int = -1,
    dense_bytes: int | None = None,
) -> list[Work]:
    """Return the work of `comm.all_reduce`.

    Args:
        numel: values.
        dtype: their dtype.
        codec: how they travel; None: as they are.
        link: ledger link.
        axis: mesh axis.
        num_ranks: ranks of the group.
        algorithm: "auto", "one_shot" or "two_shot".
        min_bytes: as for `comm.all_reduce`; negative switches the gate off.
        dense_bytes: what the dense collective would have sent, where that isn't this call's own.
    """
    nbytes = numel * dtype.itemsize
    if codec is not None and algorithm == "auto":
        algorithm = pick_algorithm(numel, dtype, num_ranks, codec)
    if codec is None or call.gate(
        codec, numel, dtype, message_nbytes(numel, dtype, num_ranks, codec, algorithm), min_bytes
    ):
        return plain_all_reduce(nbytes, link=link, axis=axis, num_ranks=num_ranks)
    dense = all_reduce_sent(nbytes, num_ranks) if dense_bytes is None else dense_bytes
    if algorithm == "one_shot":
        return _gathered(numel, dtype, codec, link, axis, num_ranks, dense)
    chunk = chunk_numel(numel, num_ranks, codec)
    wire = codec.wire_nbytes(chunk, dtype)
    return [
        Coding("encode", link, codec, num_ranks * chunk, num_ranks),
        Message(link, axis, "all_to_all", num_ranks * wire, num_ranks, dense),
        Coding("decode", link, codec, num_ranks * chunk),
        Coding("encode", link, codec, chunk),
        Message(link, axis, "all_gather", wire, num_ranks, 0),
        Coding("decode", link, codec, num_ranks * chunk),
    ]


def all_gather(
    numel: int,
    dtype: torch.dtype,
    codec: Codec | None,
    *,
    link: str,
    axis: str,
    num_ranks: int,
    min_bytes: int = -1,
) -> list[Work]:
    """Return the work of `comm.all_gather` of `numel` values per rank (see `all_reduce`)."""
    nbytes = numel * dtype.itemsize
    dense = all_gather_sent(nbytes, num_ranks)
    if codec is None or call.gate(codec, numel, dtype, codec.wire_nbytes(numel, dtype), min_bytes):
        return [Message(link, axis, "all_gather", nbytes, num_ranks, dense)]
    return _gathered(numel, dtype, codec, link, axis, num_ranks, dense)


def _gathered(
    numel: int,
    dtype: torch.dtype,
    codec: Codec,
    link: str,
    axis: str,
    num_ranks: int,
    dense: int,
) -> list[Work]:
    """Return the work of gathering every rank's encoded message and decoding them all."""
    return [
        Coding("encode", link, codec, numel),
        Message(link, axis, "all_gather", codec.wire_nbytes(numel, dtype), num_ranks, dense),
        Coding("decode", link, codec, num_ranks * numel),
    ]


def reduce_scatter(
    numel: int,
    dtype: torch.dtype,
    codec: Codec | None,
    *,
    link: str,
    axis: str,
    num_ranks: int,
    min_bytes: int = -1,
) -> list[Work]:
    """Return the work of `comm.reduce_scatter` that leaves `numel` values per rank."""
    nbytes = numel * dtype.itemsize
    dense = reduce_scatter_sent(nbytes, num_ranks)
    whole = num_ranks * numel
    if codec is None or call.gate(
        codec, whole, dtype, num_ranks * codec.wire_nbytes(numel, dtype), min_bytes
    ):
        return [Message(link, axis, "reduce_scatter", num_ranks * nbytes, num_ranks, dense)]
    wire = num_ranks * codec.wire_nbytes(numel, dtype)
    return [
        Coding("encode", link, codec, whole, num_ranks),
        Message(link, axis, "all_to_all", wire, num_ranks, dense),
        Coding("decode", link, codec, whole),
    ]


def owners(nbytes: int, *, link: str, axis: str, num_ranks: int) -> list[Work]:
    """Return owners' messages that reach all ranks, as one all-gather of their mean.

    Args:
        nbytes: bytes one rank sends (see `scape.reduce.owners_sent`).
        link: ledger link.
        axis: mesh axis.
        num_ranks: ranks of the group.
    """
    shard = -(-nbytes // (num_ranks - 1))
    return [Message(link, axis, "all_gather", shard, num_ranks, 0)]
