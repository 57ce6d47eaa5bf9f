"""What every collective shares: packing its arguments for a custom op, booking, the NaN policy.

A custom op takes tensors, numbers and strings only, so codecs and ledgers travel as names: a
codec's `repr` (a frozen dataclass: equal names are equal codecs), a ledger's id.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.codecs.protocol import Codec
from thinwire.comm.ledger import Ledger
from thinwire.errors import ConfigError, NonFiniteError

__all__ = [
    "NONFINITE",
    "book",
    "codec_name",
    "count_flagged",
    "find_codec",
    "find_ledger",
    "gate",
    "group_name",
    "ledger_id",
    "prepare",
    "raise_flagged",
    "raise_if_flagged",
    "timed",
]

NONFINITE = ("raise", "zero", "propagate")
_codecs: dict[str, Codec] = {}
_ledgers: "weakref.WeakValueDictionary[int, Ledger]" = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result
def codec_name(codec: Codec | None, nonfinite: str | None = None) -> str:
    """Return the name under which `find_codec` gives the codec back ("" for None).

    A codec with a policy of its own on NaN and infinity gets the call's, if one is given.
    """
    if codec is None:
        return ""
    if nonfinite is not None and getattr(codec, "nonfinite", nonfinite) != nonfinite:
        codec = replace(codec, nonfinite=nonfinite)  # type: ignore[type-var]
    name = repr(codec)
    _codecs.setdefault(name, codec)
    return name


def find_codec(name: str) -> Codec | None:
    """Invert `codec_name`."""
    return _codecs[name] if name else None


@torch.compiler.assume_constant_result
def ledger_id(ledger: Ledger | None) -> int:
    """Return the number under which `find_ledger` gives the ledger back (0 for None)."""
    if ledger is None:
        return 0
    _ledgers[id(ledger)] = ledger
    return id(ledger)


def find_ledger(number: int) -> Ledger | None:
    """Invert `ledger_id`."""
    return _ledgers.get(number) if number else None


@torch.compiler.assume_constant_result
def group_name(group: dist.ProcessGroup | None) -> str:
    """Return the group's name; None is the world."""
    return (group or _compat.default_group()).group_name


def timed(ledger: Ledger | None, link: str, what: str) -> AbstractContextManager[None]:
    """Return `ledger.timed(...)`, or nothing without a ledger."""
    return nullcontext() if ledger is None else ledger.timed(link, what)


def book(
    ledger: Ledger | None, link: str, *, dense_bytes: int, wire_bytes: int, exempt: str = ""
) -> None:
    """Book one call, if there is a ledger; `exempt` says why it went uncompressed on purpose."""
    if ledger is not None:
        ledger.book(
            link,
            dense_bytes=dense_bytes,
            wire_bytes=wire_bytes,
            exempt_bytes=wire_bytes if exempt else 0,
            reason=exempt,
        )


def gate(codec: Codec, numel: int, dtype: torch.dtype, wire_bytes: int, min_bytes: int) -> str:
    """Return why a message goes as it is, "" if the codec carries it.

    Shape and dtype alone decide, so that all ranks agree.

    Args:
        codec: how it would travel.
        numel: elements of the message.
        dtype: its dtype.
        wire_bytes: bytes of its encoded form, padding included.
        min_bytes: smaller messages go as they are; negative switches the gate off.
    """
    dense_bytes = numel * dtype.itemsize
    if min_bytes < 0:
        return ""
    if dense_bytes < min_bytes:
        return f"smaller than min_bytes={min_bytes}"
    exact = codec.facts.exact  # an identity codec never shrinks and is asked for by name
    return "compression would not shrink it" if wire_bytes >= dense_bytes and not exact else ""


def prepare(x: Tensor, nonfinite: str, codec: Codec | None = None) -> Tensor:
    """Return x detached, flat and contiguous; NaN and infinity zeroed if so asked.

    A codec that has a policy of its own zeroes whole blocks itself, and counts them.
    """
    if nonfinite not in NONFINITE:
        raise ConfigError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}")
    flat = x.detach().contiguous().view(-1)
    if nonfinite != "zero" or hasattr(codec, "nonfinite"):
        return flat
    return torch.nan_to_num(flat, 0.0, 0.0, 0.0)


def count_flagged(
    codec: Codec, wires: Tensor, numel: int, dtype: torch.dtype, nonfinite: str
) -> int:
    """Return how many received blocks are flagged, 0 where such blocks don't raise."""
    if nonfinite != "raise" or not codec.facts.flags_nonfinite:
        return 0
    return codec.nonfinite_count(wires, numel, dtype)


def raise_flagged(count: int, link: str) -> None:
    """Raise NonFiniteError if `count` blocks were flagged.

    All ranks of the group hold the same wires, or wires that a rank with a bad value has flagged
    throughout, so all of them raise in the same call.
    """
    if count:
        raise NonFiniteError(
            f"{count} blocks of a message on link {link!r} hold NaN or infinity (a rank of the "
            "group diverged). All ranks raise. Lower the learning rate or clip; nonfinite='zero' "
            "or 'propagate' let training go on."
        )


def raise_if_flagged(
    codec: Codec, wires: Tensor, numel: int, dtype: torch.dtype, nonfinite: str, link: str
) -> None:
    """Raise NonFiniteError under "raise" when a received block is flagged."""
    raise_flagged(count_flagged(codec, wires, numel, dtype, nonfinite), link)
