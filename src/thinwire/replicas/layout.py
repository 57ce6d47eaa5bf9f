"""Who is who in a run of unlike replicas: whole ones, and pipelines of weak nodes.

Legend: `R` replicas, `S` stages of a replica.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError

__all__ = ["Layout", "Replica"]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica: its ranks, one per pipeline stage.

    Attributes:
        ranks: world ranks, stage 0 first.
        rank_ratio: model width over coefficients per token at the stage boundaries; 0 compresses
            nothing (role "full").
    """

    ranks: tuple[int, ...]
    rank_ratio: int = 0

    def __post_init__(self) -> None:
        if not self.ranks or self.rank_ratio < 0:
            raise ConfigError("a replica needs at least one rank, and rank_ratio >= 0")

    @property
    def role(self) -> str:
        """Return "full" or "compressed"."""
        return "compressed" if self.rank_ratio else "full"

    @property
    def num_stages(self) -> int:
        """Return S."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All replicas, in the order of their ranks.

    Attributes:
        replicas: each rank belongs to exactly one.
        mode: of compressed replicas: "constrained" or "lossy".
        constrain_full: also keep full replicas' writes in the subspace.
        anchor: compressed replicas report changes against their "projected" start, or against the
            "unprojected" shared weights (a comparison arm: the mean drifts into the subspace).

    Raises:
        ConfigError: ranks missing, repeated or out of order, or unequal ratios.

    Example:
        >>> Layout(replicas=(Replica(ranks=(0,)), Replica(ranks=(1, 2), rank_ratio=16)))
    """

    replicas: tuple[Replica, ...]
    mode: str = "constrained"
    constrain_full: bool = False
    anchor: str = "projected"

    def __post_init__(self) -> None:
        ranks = [rank for replica in self.replicas for rank in replica.ranks]
        if ranks != list(range(len(ranks))) or not ranks:
            raise ConfigError(
                f"replicas hold ranks {ranks}: list every rank once, in ascending order, starting "
                "with 0"
            )
        if self.mode not in ("constrained", "lossy"):
            raise ConfigError(f"mode must be 'constrained' or 'lossy', got {self.mode!r}")
        if self.anchor not in ("projected", "unprojected"):
            raise ConfigError(f"anchor must be 'projected' or 'unprojected', got {self.anchor!r}")
        ratios = {replica.rank_ratio for replica in self.replicas if replica.rank_ratio}
        if len(ratios) > 1:
            raise ConfigError(
                f"compressed replicas must share one subspace: give them one rank_ratio, not "
                f"{sorted(ratios)}"
            )
        if self.constrain_full and (self.mode != "constrained" or not ratios):
            raise ConfigError("constrain_full needs constrained compressed replicas")

    @classmethod
    def of(cls, replicas: Iterable[Mapping[str, Any]], **settings: Any) -> "Layout":
        """Return the layout that tables of a configuration describe.

        Args:
            replicas: each with `ranks`, and optionally `rank_ratio` and `stages` (which must equal
                the number of ranks).
            **settings: of `Layout`.

        Raises:
            ConfigError: unknown keys, or stages that aren't one per rank.
        """
        made = []
        for index, table in enumerate(replicas):
            unknown = sorted(set(table) - {"ranks", "stages", "rank_ratio"})
            if unknown or "ranks" not in table:
                raise ConfigError(
                    f"replicas[{index}] takes ranks, stages and rank_ratio, "
                    + (f"not {unknown[0]!r}" if unknown else "and ranks is missing")
                )
            ranks = tuple(int(r) for r in table["ranks"])
            if table.get("stages", len(ranks)) != len(ranks):
                raise ConfigError(
                    f"replicas[{index}] has {len(ranks)} ranks for {table['stages']} stages: give "
                    "one rank per stage"
                )
            made.append(Replica(ranks=ranks, rank_ratio=int(table.get("rank_ratio", 0))))
        return cls(replicas=tuple(made), **settings)

    @property
    def num_ranks(self) -> int:
        """Return the ranks of all replicas."""
        return sum(replica.num_stages for replica in self.replicas)

    @property
    def ratio(self) -> int:
        """Return the compressed replicas' ratio, 0 if there are none."""
        return max(replica.rank_ratio for replica in self.replicas)

    def place(self, rank: int) -> tuple[int, int]:
        """Return (replica, stage) of a world rank."""
        for index, replica in enumerate(self.replicas):
            if rank in replica.ranks:
                return index, replica.ranks.index(rank)
        raise ConfigError(f"rank {rank} belongs to no replica of {self.num_ranks} ranks")
