"""Which rank of each replica owns which parameters, worked out from what all ranks hold.

Parameters with the same owners form a partition, exchanged in one group of one rank per replica. A
whole replica's rank owns several partitions; the stages of a pipeline split them. The embedding is
a partition of its own, since the later stages of compressed replicas follow it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.replicas.layout import Layout

__all__ = ["Share", "divide"]

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """One partition.

    Attributes:
        number: of the partition; ranks exchange them in this order.
        names: of its parameters.
        owners: world rank of the owner in each replica, ascending.
    """

    number: int
    names: tuple[str, ...]
    owners: tuple[int, ...]


def divide(layout: Layout, held: Sequence[Shapes], embedding: str) -> list[Share]:
    """Return the partitions, the same on all ranks.

    Args:
        layout: of the replicas.
        held: names and shapes of the trained parameters that each world rank holds.
        embedding: name of the embedding rows.

    Raises:
        ConfigError: a rank holds no parameter, replicas hold different ones, or two stages hold
            one.
    """
    for rank, names in enumerate(held):
        if not names:
            raise ConfigError(f"rank {rank} trains no parameter: give it a stage, or leave it out")
    owner = [_owners(index, replica.ranks, held) for index, replica in enumerate(layout.replicas)]
    first = layout.replicas[0]
    shapes = {name: held[rank][name] for rank in first.ranks for name in held[rank]}
    for index, replica in enumerate(layout.replicas):
        own = {name: held[rank][name] for rank in replica.ranks for name in held[rank]}
        for name in [*shapes, *own]:
            if own.get(name) != shapes.get(name):
                raise ConfigError(
                    f"parameter {name!r} has shape {shapes.get(name)} in replica 0 but "
                    f"{own.get(name)} in replica {index}: all replicas must train the same "
                    "parameters under the same names"
                )
    groups: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in shapes:
        key = (tuple(o[name] for o in owner), name == embedding)
        groups.setdefault(key, []).append(name)
    return [
        Share(number, tuple(names), owners)
        for number, ((owners, _), names) in enumerate(groups.items())
    ]


def _owners(index: int, ranks: Sequence[int], held: Sequence[Shapes]) -> dict[str, int]:
    owner: dict[str, int] = {}
    for rank in ranks:
        for name in held[rank]:
            if name in owner:
                raise ConfigError(
                    f"stages {ranks.index(owner[name])} and {ranks.index(rank)} of replica {index} "
                    f"both hold parameter {name!r}: tied or shared parameters can't be cut"
                )
            owner[name] = rank
    return owner
