"""The sparse step through fused kernels, one call per piece; equal to `rules.Adams` bit for bit.

Legend: `N` elements of a piece, `K` of them in its mask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import adams
from thinwire.scape.layout import Run
from thinwire.scape.rules import Adams, Arrived, Hyper, Rule
from thinwire.scape.table import Piece

__all__ = ["commit", "fits", "outgoing", "pieces_of"]

State = dict[str, Tensor]
# Where the kernels beat plain torch; other devices take the plain rule.
_DEVICES = ("cpu",)


@dataclass(frozen=True, slots=True)
class _Part:
    piece: Piece
    span: slice
    sent: slice
    positions: Tensor
    grad: Tensor


def fits(rule: Rule, run: Run) -> bool:
    """Return whether the kernels cover this rule, mask and state."""
    return (
        rule in (Adams("transfer"), Adams("decay"))
        and run.index is not None
        and run.entries[0].param.device.type in _DEVICES
        and all(x.dtype == torch.float32 for x in run.state.values())
    )


def pieces_of(run: Run) -> list[tuple[Piece, slice, slice, Tensor]]:
    """Return each piece's place in the run, its place among what is sent, and its positions."""
    assert run.index is not None
    starts = run.starts()
    edges = torch.tensor([[starts[p], starts[p] + p.numel] for p in run.pieces])
    cuts = torch.searchsorted(run.index, edges.to(run.index.device)).tolist()
    return [
        (p, slice(starts[p], starts[p] + p.numel), slice(a, b), run.index[a:b] - starts[p])
        for p, (a, b) in zip(run.pieces, cuts, strict=True)
    ]


def _parts(run: Run, scale: Tensor | None) -> Iterator[_Part]:
    grads = run.piece_grads()
    for (piece, span, sent, positions), g in zip(pieces_of(run), grads, strict=True):
        if piece.numel:
            yield _Part(
                piece, span, sent, positions, g if scale is None else g.float() * scale.float()
            )


def outgoing(run: Run, state: State, h: Hyper, scale: Tensor | None) -> Tensor:
    """Return x [E] of a run from its whole state."""
    assert run.index is not None
    x = torch.empty(run.index.numel(), dtype=torch.float32, device=run.index.device)
    for part in _parts(run, scale):
        m, r = state["exp_avg"][part.span], state["residual"][part.span]
        adams.gather(m, part.grad, r, part.positions, h.beta1, out=x[part.sent])
    return x


def commit(
    run: Run,
    state: State,
    h: Hyper,
    rule: Adams,
    got: Arrived,
    scale: Tensor | None,
    own: Sequence[Piece],
    stepped: Sequence[Piece],
) -> list[Tensor]:
    """Update state and the weights of the `stepped` pieces; return the statistics of `own`."""
    weights = dict(zip(stepped, run.weights(stepped), strict=True))
    kept = None if got.q is got.x else got.x - got.q
    wanted, statistics = set(own), {}
    for part in _parts(run, scale):
        piece = part.piece
        decay = run.group["weight_decay"] if run.param(piece).ndim > 1 else 0.0
        constants = adams.Step(
            h.lr, h.beta1, h.beta2, h.eps, decay, rule.unmasked == "transfer", got.clip
        )
        if piece in wanted:
            statistics[piece] = torch.empty(piece.numel, device=part.grad.device)
        adams.sweep_(
            weights.get(piece),
            state["exp_avg"][part.span],
            part.grad,
            state["residual"][part.span],
            part.positions,
            got.p[part.sent].contiguous(),
            None if kept is None else kept[part.sent],
            constants,
            statistic=statistics.get(piece),
        )
    return [statistics[p] for p in own]
