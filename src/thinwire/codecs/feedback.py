"""Error feedback: what a lossy codec drops is added to the next message."""

import torch
from torch import Tensor

from thinwire.codecs.protocol import Codec
from thinwire.codecs.topk import TopK

__all__ = ["encode_with_feedback"]


def encode_with_feedback(
    codec: Codec,
    delta: Tensor,
    residual: Tensor,
    beta: float = 1.0,
    *,
    new_residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Encode a = beta*residual + delta and keep a - decode(message) for the next time.

    Rounding errors are fed back as well as dropped elements. `TopK` does it in one fused pass.

    Args:
        codec: any codec.
        delta: what is to be sent, any shape.
        residual: fp32, contiguous, as many elements as delta; kept when `new_residual` is given.
        beta: decay of the residual.
        new_residual: where the new residual goes, fp32 and apart from `residual`, so that a round
            can be dropped before it is committed; None: over `residual`.
        out: None or the buffer to write.

    Returns:
        The message, uint8 [W].
    """
    target = residual if new_residual is None else new_residual
    if isinstance(codec, TopK):
        fresh = torch.empty_like(residual) if new_residual is None else new_residual
        wire = codec.encode_feedback(delta, residual, beta, new_residual=fresh, out=out)
        if new_residual is None:
            residual.copy_(fresh)
        return wire
    total = (beta * residual.view(-1)).add_(delta.detach().reshape(-1))
    wire = codec.encode(total, out=out)
    sent = codec.decode(wire, total.numel(), torch.float32)
    torch.sub(total, sent, out=target.view(-1))
    return wire
