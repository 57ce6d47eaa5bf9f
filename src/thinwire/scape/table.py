"""Which elements of which tensors are sent: the table that all ranks derive from the same shapes.

A table lists pieces in wire order. A piece is a whole parameter, or with partition "rows" a run of
its rows. Dense pieces are sent in full at every step; each other piece has one owner, the rank
that builds its mask.

Legend: `N` ranks.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from thinwire.errors import ConfigError

__all__ = ["DENSE_FROM", "Piece", "Table", "assign_owners", "build_table", "keep"]

# From this density on a mask costs more than the elements that it leaves out.
DENSE_FROM = 0.98
PARTITIONS = ("tensor", "rows")
# Lengths travel as 31 bits: a mask message must stay below 2 GiB.
MAX_NUMEL = 2**34


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one parameter that share a mask.

    Attributes:
        name: the parameter's name, with its rows if it is cut.
        param: index of the parameter in wire order.
        start: flat index of the first element in this rank's part of the parameter.
        numel: elements.
        dense: why the piece is always sent in full, "" if it is sparsified.
        owner: group rank that builds the mask, -1 if dense.
    """

    name: str
    param: int
    start: int
    numel: int
    dense: str = ""
    owner: int = -1

    def kept(self, density: float) -> int:
        """Return the elements sent at `density`."""
        return self.numel if self.dense else keep(self.numel, density)


def keep(numel: int, density: float) -> int:
    """Return k of a sparsified piece: max(1, round(density * numel)), all from 0.98 on."""
    return numel if density >= DENSE_FROM else max(1, round(density * numel))


@dataclass(frozen=True)
class Table:
    """The pieces in wire order.

    Attributes:
        pieces: all of them.
        num_ranks: N.
        digest: first 4 bytes of a hash over names, sizes and owners: ranks that disagree fail.
    """

    pieces: tuple[Piece, ...]
    num_ranks: int
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        lines = [f"{p.name}/{p.numel}/{bool(p.dense)}/{p.owner}" for p in self.pieces]
        digest = hashlib.sha256("\n".join([str(self.num_ranks), *lines]).encode()).digest()[:4]
        object.__setattr__(self, "digest", digest)

    @property
    def sparse(self) -> list[Piece]:
        """Return the sparsified pieces."""
        return [p for p in self.pieces if not p.dense]

    @property
    def numel(self) -> int:
        """Return all elements."""
        return sum(p.numel for p in self.pieces)

    @property
    def dense_numel(self) -> int:
        """Return the elements of pieces that are always sent in full."""
        return sum(p.numel for p in self.pieces if p.dense)

    def owned_by(self, rank: int) -> list[Piece]:
        """Return the pieces whose masks `rank` builds."""
        return [p for p in self.pieces if p.owner == rank]

    def kept(self, density: float) -> int:
        """Return the elements sent at `density`, dense pieces included."""
        return sum(p.kept(density) for p in self.pieces)


def build_table(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    num_ranks: int,
    *,
    dense_below: int = 4096,
    dense: Collection[str] = (),
    partition: str = "tensor",
) -> Table:
    """Return the table of parameters in wire order.

    Args:
        names: full parameter names.
        shapes: their local shapes.
        num_ranks: ranks among which masks are shared out.
        dense_below: parameters with fewer elements are sent in full.
        dense: names that are sent in full on request.
        partition: "tensor" keeps parameters whole, "rows" cuts large ones along dimension 0.

    Raises:
        ConfigError: an unknown name or partition, a tensor too large, or nothing to sparsify.
    """
    if partition not in PARTITIONS:
        raise ConfigError(f"partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    unknown = sorted(set(dense) - set(names))
    if unknown:
        raise ConfigError(
            f"dense= names no parameter {unknown[0]!r}: names come from "
            "model.named_parameters(), which must be what the optimizer is given"
        )
    pieces = [
        _whole(index, name, shape, dense_below, dense)
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    total = sum(p.numel for p in pieces if not p.dense)
    if not total:
        reasons = sorted({p.dense for p in pieces})
        raise ConfigError(
            f"no parameter would be sparsified ({'; '.join(reasons) or 'there is none'}): lower "
            "dense_below, shorten dense=, or use AdamS with a dense all-reduce"
        )
    if partition == "rows":
        limit = -(-total // num_ranks)
        cut = [_cut(p, shape, limit) for p, shape in zip(pieces, shapes, strict=True)]
        pieces = [piece for rows in cut for piece in rows]
    return Table(tuple(assign_owners(pieces, num_ranks)), num_ranks)


def assign_owners(pieces: Sequence[Piece], num_ranks: int) -> list[Piece]:
    """Give sparsified pieces, largest first, to the least loaded rank (lowest rank on ties)."""
    loads = [0] * num_ranks
    owners: dict[int, int] = {}
    order = [i for i, p in enumerate(pieces) if not p.dense]
    for i in sorted(order, key=lambda i: (-pieces[i].numel, i)):
        owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        loads[owner] += pieces[i].numel
        owners[i] = owner
    return [replace(p, owner=owners.get(i, -1)) for i, p in enumerate(pieces)]


def _whole(
    index: int, name: str, shape: Sequence[int], dense_below: int, dense: Collection[str]
) -> Piece:
    numel = 1
    for size in shape:
        numel *= size
    if numel > MAX_NUMEL:
        raise ConfigError(f"parameter {name!r} has {numel} elements, masks address {MAX_NUMEL}")
    reason = ""
    if name in dense:
        reason = "named in dense="
    elif numel == 0:
        reason = "empty"
    elif len(shape) < 2:
        reason = "fewer than 2 dimensions"
    elif numel < dense_below:
        reason = f"fewer than {dense_below} elements"
    return Piece(name, index, 0, numel, reason)


def _cut(piece: Piece, shape: Sequence[int], limit: int) -> list[Piece]:
    """Return the piece in near-equal runs of rows with at most `limit` elements (or one row)."""
    if piece.dense or piece.numel <= limit:
        return [piece]
    rows, row_numel = shape[0], piece.numel // shape[0]
    parts = min(rows, -(-rows // max(1, limit // row_numel)))
    cuts = [rows * i // parts for i in range(parts + 1)]
    return [
        replace(
            piece, name=f"{piece.name}[{a}:{b}]", start=a * row_numel, numel=(b - a) * row_numel
        )
        for a, b in pairwise(cuts)
    ]
