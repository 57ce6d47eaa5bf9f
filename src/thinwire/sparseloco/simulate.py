"""All replicas in one process: the same core without a transport, for studies and tests."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.sparseloco.partition import Delta, Partition
from thinwire.sparseloco.rounds import Outcome, Round

__all__ = ["simulate_round"]

Tamper = Callable[[int, dict[int, Tensor]], Mapping[int, Tensor]]


def simulate_round(
    parts: Sequence[Partition],
    deltas: Sequence[Delta],
    tokens: Sequence[int],
    *,
    abstain: Mapping[int, str] | None = None,
    tamper: Tamper | None = None,
) -> list[Outcome]:
    """Take one partition of every replica through a round.

    Args:
        parts: one per replica, with equal rosters.
        deltas: their pseudo-gradients, see `Partition.prepare`.
        tokens: that each replica processed.
        abstain: reasons of replicas that take no part, by id.
        tamper: maps (receiving replica, messages by id) to what it receives, for tests.

    Returns:
        An outcome per replica.

    Raises:
        ContractError: replicas drifted apart.
    """
    if len({p.replica for p in parts}) != len(parts):
        raise ConfigError("each replica needs an id of its own")
    why = abstain or {}
    rounds = [
        Round([p], [d], n, abstain=why.get(p.replica, ""))
        for p, d, n in zip(parts, deltas, tokens, strict=True)
    ]
    sent = {p.replica: r.messages[0] for p, r in zip(parts, rounds, strict=True)}
    for part, current in zip(parts, rounds, strict=True):
        received = dict(sent) if tamper is None else tamper(part.replica, dict(sent))
        current.judge(part, received)
    notes = [r.note for r in rounds]
    for current in rounds:
        current.tally(notes)
    return [r.close(r.finite) for r in rounds]
