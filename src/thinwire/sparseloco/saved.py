"""A partition's state back from a checkpoint, by one replica or by another number of them.

When replicas are gone, their residuals are added to those that stay, in turn, so that the sum of
all residuals (what the run still owes the shared weights) is conserved; or they are dropped, on
demand. New replicas start with none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.sparseloco.partition import Partition

__all__ = ["load_partition"]

State = Mapping[str, Any]


@torch.no_grad()
def load_partition(part: Partition, states: Sequence[State], *, gone: str = "add") -> None:
    """Continue a partition from what `Partition.state_dict` gave.

    Args:
        part: built with the same tensors and options, with the roster that goes on.
        states: this replica's own, or those of all replicas that saved.
        gone: what becomes of residuals of replicas that are not in the roster: "add" or "drop".

    Raises:
        CheckpointError: of other tensors, settings or weights, damaged, or incomplete.
    """
    if gone not in ("add", "drop"):
        raise CheckpointError(f"gone must be 'add' or 'drop', got {gone!r}")
    by_replica = {int(s["replica"]): s for s in states}
    own = by_replica.get(part.replica)
    saved_roster = set(states[0]["roster"]) if states else set()
    moved = saved_roster != set(part.roster)
    if own is None and not (moved and set(by_replica) >= saved_roster):
        raise CheckpointError(
            f"the state holds nothing of replica {part.replica}; with another set of replicas, "
            f"give the states of all {len(saved_roster)} that saved"
        )
    if moved and not set(by_replica) >= saved_roster:
        raise CheckpointError(
            f"replicas were {sorted(saved_roster)} and are {list(part.roster)}: give the states of "
            "all that saved"
        )
    base = own if own is not None else by_replica[min(by_replica)]
    _check(part, base, by_replica if moved else {part.replica: base})
    _copy(part.theta, base["theta"], "weights")
    if part.fingerprint().hex() != base["theta_sha256"]:
        raise CheckpointError("the saved weights do not fit their SHA-256: the file is damaged")
    for e in part.residual.values():
        e.zero_()
    if own is not None:
        _copy(part.residual, own["residual"], "residual")
    if moved and gone == "add":
        for replica in _heirs(saved_roster, part):
            for name, e in part.residual.items():
                e += by_replica[replica]["residual"][name].to(e.device)
    part.round, part.commits = int(base["round"]), int(base["commits"])
    part.basis_version = int(base["basis_version"])


def _heirs(saved: set[int], part: Partition) -> list[int]:
    """Return the replicas that are gone and whose residuals this one takes over."""
    stay = sorted(saved & set(part.roster)) or list(part.roster)
    left = sorted(saved - set(part.roster))
    return [r for i, r in enumerate(left) if stay[i % len(stay)] == part.replica]


def _check(part: Partition, base: State, states: Mapping[int, State]) -> None:
    expected = part.options.config_hash(part.extra).hex()
    if base["config_hash"] != expected:
        raise CheckpointError(
            "the state was saved with other options (or other extra bytes) than this replica has"
        )
    if base["stage"] != part.stage:
        raise CheckpointError(f"the state is of stage {base['stage']}, not {part.stage}")
    for replica, state in states.items():
        for key in ("theta_sha256", "round", "commits"):
            if state[key] != base[key]:
                raise CheckpointError(
                    f"replica {replica} saved another {key} than the others: the states are not of "
                    "one moment"
                )


def _copy(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], what: str) -> None:
    for name, target in targets.items():
        value = values.get(name)
        if value is None or value.shape != target.shape or value.dtype != torch.float32:
            found = "missing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise CheckpointError(
                f"the {what} of {name!r} must be float32 {tuple(target.shape)}, found {found}"
            )
        target.copy_(value)
    extra = sorted(set(values) - set(targets))
    if extra:
        raise CheckpointError(f"the state holds {what} of {extra[0]!r}, which this model has not")
