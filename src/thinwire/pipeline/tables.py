"""X0: the part of a token's activation that never changes, so that no boundary has to carry it.

A token's embedding row splits into T_S = row P, which training moves, and T_perp = row - T_S, which
stays. X0[b, t] = T_perp[token] (plus the same of a learned or sinusoidal position row). Every stage
holds these rows; rotary positions add nothing.

Legend: `B` sequences, `T` tokens, `V` vocabulary, `D` width, P the projection on the subspace.
"""

import torch
from torch import Tensor, nn

from thinwire.pipeline.basis import Basis, wide

__all__ = ["FixedRows"]


class FixedRows(nn.Module):
    """The fixed parts of the token and position rows.

    Args:
        tokens: T_perp [V, D], fp32 (fp64 for an fp64 model).
        positions: the same of position rows [T, D], if the model adds any.
    """

    tokens: Tensor
    positions: Tensor | None

    def __init__(self, tokens: Tensor, positions: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("positions", positions, persistent=False)

    @classmethod
    @torch.no_grad()
    def of(cls, basis: Basis, embedding: Tensor, positions: Tensor | None = None) -> "FixedRows":
        """Split an embedding [V, D] (and position rows [T, D]); both stay as they are."""
        rows = None if positions is None else _outside(basis, positions)
        return cls(_outside(basis, embedding), rows)

    @torch.no_grad()
    def resplit(self, basis: Basis, embedding: Tensor, positions: Tensor | None = None) -> None:
        """Split anew, in place, after rows were changed from outside (a synchronization)."""
        self.tokens.copy_(_outside(basis, embedding))
        if positions is not None and self.positions is not None:
            self.positions.copy_(_outside(basis, positions))

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return self.tokens.shape[0]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return X0 [B, T, D]; no gradient flows into it."""
        rows = nn.functional.embedding(ids_BT, self.tokens)
        if self.positions is None:
            return rows
        return rows + self.positions[: ids_BT.shape[1]]


def _outside(basis: Basis, rows: Tensor) -> Tensor:
    rows = wide(rows.detach())
    return rows - basis.keep_rows(rows)
