"""Send and receive that carry a codec's buffer (pipeline boundaries)."""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.codecs.cast import Cast
from thinwire.codecs.protocol import Codec
from thinwire.comm import call, transport
from thinwire.comm.ledger import Ledger

__all__ = ["recv", "send"]


def send(
    x: Tensor,
    codec: Codec | None,
    dst: int,
    *,
    group: dist.ProcessGroup | None = None,
    link: str = "pipeline",
    ledger: Ledger | None = None,
    nonfinite: str = "raise",
) -> None:
    """Send x to rank `dst` of the group.

    A flagged message is sent before this rank raises, so that the receiver raises too.

    Args:
        x: floating tensor.
        codec: how x travels; None sends it as it is.
        dst: receiving rank within the group.
        group: process group, None for the world.
        link: ledger link to book on.
        ledger: books the call, if given.
        nonfinite: what NaN or infinity do: "raise" on both ranks, "zero" them, or "propagate".

    Raises:
        NonFiniteError: on sender and receiver, under nonfinite="raise".
    """
    how, pg = codec or Cast(), group or _compat.default_group()
    with call.timed(ledger, link, "encode_s"):
        message = how.encode(call.prepare(x, nonfinite))
    with call.timed(ledger, link, "wait_s"):
        transport.send(message, dst, pg)
    call.book(ledger, link, dense_bytes=x.numel() * x.itemsize, wire_bytes=message.numel())
    call.raise_if_flagged(how, message, x.numel(), x.dtype, nonfinite, link)


def recv(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    codec: Codec | None,
    src: int,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    link: str = "pipeline",
    ledger: Ledger | None = None,
    nonfinite: str = "raise",
) -> Tensor:
    """Receive a tensor of `shape` and `dtype` from rank `src` of the group.

    The sender books the bytes; the receiver books wait and decode seconds only.

    Args:
        shape: shape that the sender's tensor has.
        dtype: dtype that the sender's tensor has.
        codec: the sender's codec.
        src: sending rank within the group.
        device: where the tensor is to lie.
        group: process group, None for the world.
        link: ledger link for the seconds.
        ledger: books the seconds, if given and timing.
        nonfinite: the sender's policy.

    Raises:
        NonFiniteError: on sender and receiver, under nonfinite="raise".
    """
    how, pg = codec or Cast(), group or _compat.default_group()
    numel = torch.Size(shape).numel()
    with call.timed(ledger, link, "wait_s"):
        wire = transport.recv(how.wire_nbytes(numel, dtype), src, pg, torch.device(device))
    call.raise_if_flagged(how, wire, numel, dtype, nonfinite, link)
    with call.timed(ledger, link, "decode_s"):
        return how.decode(wire, numel, dtype).view(shape)
