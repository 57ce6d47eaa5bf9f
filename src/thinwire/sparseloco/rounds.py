"""One outer round over any number of partitions: all of them commit, or none.

1. Every partition of this replica prepares its message; if one must abstain, all do.
2. Messages are exchanged, one call per partition, in ascending stage order on every rank.
3. Each replica judges what it received. The verdicts (stage, mask of accepted replicas, digest) are
   gathered; within a stage all must be equal, else the round is aborted everywhere.
4. The mean is over the replicas accepted in every stage. With fewer than `min_quorum` of them, or a
   result that is not finite in any stage, the round is aborted everywhere.
5. All partitions commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from thinwire.comm.ledger import Ledger, all_gather_sent, all_reduce_sent
from thinwire.sparseloco.partition import Delta, Partition, Verdict

__all__ = [
    "Outcome",
    "Round",
    "Transport",
    "book_hashes",
    "decide",
    "note",
    "note_nbytes",
    "run_round",
]

_DIGEST = 32


class Transport(Protocol):
    """Carries bytes between the owners of one partition, and votes between all of them."""

    @property
    def replica(self) -> int:
        """Return the id of this rank's replica."""
        ...

    @property
    def replicas(self) -> tuple[int, ...]:
        """Return the ids of all replicas that may take part."""
        ...

    def start(self, part: Partition) -> bool:
        """Check that replicas start from the same weights; return whether rounds have deadlines.

        Raises:
            ContractError: they don't.
        """
        ...

    def due(self, elapsed_s: float) -> bool:
        """Return whether a round that began `elapsed_s` ago should close before it is full."""
        ...

    def exchange(self, part: Partition, message: Tensor) -> dict[int, Tensor]:
        """Return the messages of the round by replica id, this replica's included.

        Replicas whose message did not arrive are left out.

        Raises:
            PeerError: the round cannot go on.
        """
        ...

    def vote(self, note: bytes) -> list[bytes]:
        """Return the notes of all ranks that end this round, the same list on every rank.

        Raises:
            PeerError: the round cannot go on.
        """
        ...

    def ended(self, parts: Sequence[Partition]) -> None:
        """Learn that the partitions committed or aborted the round; does not raise."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a round ended, the same on all replicas except `own`.

    Attributes:
        round: its number.
        committed: whether theta moved.
        accepted: replicas in the mean.
        abstained: replicas that asked to be left out.
        reasons: why each other replica was left out.
        why: why the round was aborted, or "".
        own: "sent" (in the mean), "left out" or "abstained: reason".
        tokens: processed by each replica whose message was sound.
        sent_bytes: of this replica's messages and votes, once.
        received_bytes: of the peers' messages and votes.
    """

    round: int
    committed: bool
    accepted: tuple[int, ...] = ()
    abstained: tuple[int, ...] = ()
    reasons: dict[int, str] = field(default_factory=dict)
    why: str = ""
    own: str = ""
    tokens: dict[int, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0


def note(part: Partition, verdict: Verdict) -> bytes:
    """Return a verdict as bytes: stage, masks of accepted and abstaining replicas, digest."""
    mask = _mask(part, verdict.accepted) + _mask(part, verdict.abstained)
    return part.stage.to_bytes(4, "little") + mask + verdict.digest


def note_nbytes(num_replicas: int) -> int:
    """Return the bytes of a stage's note."""
    return 4 + 2 * ((num_replicas + 7) // 8) + _DIGEST


def decide(part: Partition, notes: Sequence[bytes]) -> tuple[tuple[int, ...], int, str]:
    """Return the replicas accepted in every stage, the number of stages, and why to abort.

    Args:
        part: any partition of this replica (all have the same roster).
        notes: of every rank, each the notes of its stages in a row.
    """
    width = (len(part.roster) + 7) // 8
    size = note_nbytes(len(part.roster))
    stages: dict[bytes, bytes] = {}
    accepted = (1 << len(part.roster)) - 1
    for single in (n[i : i + size] for n in notes for i in range(0, len(n), size)):
        stage, rest = single[:4], single[4:]
        if stages.setdefault(stage, rest) != rest:
            number = int.from_bytes(stage, "little")
            return (), 0, f"replicas disagree on the accepted messages of stage {number}"
        accepted &= int.from_bytes(rest[:width], "little")
    chosen = tuple(r for i, r in enumerate(part.roster) if accepted >> i & 1)
    return chosen, len(stages), ""


class Round:
    """The steps of one round on one rank, without the transport that joins them.

    Args:
        parts: this rank's partitions, all of one replica, with equal rosters.
        deltas: their pseudo-gradients, see `Partition.prepare`.
        tokens: that this replica processed.
        abstain: why this replica takes no part, or "".

    Attributes:
        parts: by ascending stage.
        messages: one per partition.
    """

    def __init__(
        self,
        parts: Sequence[Partition],
        deltas: Sequence[Delta],
        tokens: int,
        *,
        abstain: str = "",
    ) -> None:
        order = sorted(range(len(parts)), key=lambda i: parts[i].stage)
        self.parts = [parts[i] for i in order]
        self.messages = [parts[i].prepare(deltas[i], tokens, abstain=abstain) for i in order]
        why = next((p.abstains for p in parts if p.abstains), "")
        if why:
            self.messages = [p.withhold(why) for p in self.parts]
        self._verdicts: list[Verdict] = []
        self._accepted: tuple[int, ...] = ()
        self._updates: list[dict[str, Tensor] | None] = []
        self.why = ""

    def judge(self, part: Partition, received: Mapping[int, Tensor]) -> None:
        """Check the messages of a partition; call it in the order of `parts`."""
        self._verdicts.append(part.judge(received))

    @property
    def note(self) -> bytes:
        """Return this rank's verdicts, to be gathered from all."""
        return b"".join(note(p, v) for p, v in zip(self.parts, self._verdicts, strict=True))

    def tally(self, notes: Sequence[bytes]) -> int:
        """Settle whose messages count and compute the new weights; return the number of stages.

        With several stages, `finite` must be gathered before `close`.
        """
        first = self.parts[0]
        self._accepted, num_stages, self.why = decide(first, notes)
        quorum = first.options.min_quorum
        if not self.why and len(self._accepted) < quorum:
            self.why = (
                f"{len(self._accepted)} replicas sent a usable message, min_quorum is {quorum}"
            )
        if not self.why:
            self._updates = [p.update(self._accepted) for p in self.parts]
        return num_stages

    @property
    def finite(self) -> bool:
        """Return whether the new weights of this rank's partitions are finite."""
        return all(update is not None for update in self._updates)

    def close(self, finite: bool) -> Outcome:
        """Commit all partitions, or abort them; `finite` as all ranks say."""
        first = self.parts[0]
        why = self.why or ("" if finite else "the new weights are not finite")
        own = "sent" if first.replica in self._accepted else "left out"
        if first.abstains:
            own = f"abstained: {first.abstains}"
        outcome = Outcome(
            round=first.round,
            committed=not why,
            accepted=() if why else self._accepted,
            abstained=tuple(sorted({r for v in self._verdicts for r in v.abstained})),
            reasons={r: text for v in self._verdicts for r, text in v.reasons.items()},
            why=why,
            own=own,
            tokens={r: n for v in self._verdicts for r, n in v.tokens.items()},
        )
        for i, part in enumerate(self.parts):
            update = None if why else self._updates[i]
            if update is None:
                part.abort()
            else:
                part.commit(update, self._accepted)
        return outcome


def run_round(
    parts: Sequence[Partition],
    deltas: Sequence[Delta],
    tokens: int,
    transport: Transport,
    *,
    abstain: str = "",
    ledger: Ledger | None = None,
) -> Outcome:
    """Take this replica's partitions through a round; collective over all owners.

    Args:
        parts: this rank's partitions, all of one replica, with equal rosters.
        deltas: their pseudo-gradients, see `Partition.prepare`.
        tokens: that this replica processed.
        transport: carries messages and votes.
        abstain: why this replica takes no part, or "".
        ledger: books link "outer": what an all-reduce of fp32 deltas would have sent, and what the
            messages and votes take; every rank sends what it receives, as in a ring.

    Raises:
        PeerError: the transport failed; the partitions are as before the round.
        ContractError: replicas drifted apart; likewise.
    """
    try:
        current = Round(parts, deltas, tokens, abstain=abstain)
        sent = received = 0
        for part, message in zip(current.parts, current.messages, strict=True):
            messages = transport.exchange(part, message)
            sent += message.numel()
            received += sum(m.numel() for r, m in messages.items() if r != part.replica)
            current.judge(part, messages)
        notes = transport.vote(current.note)
        num_stages = current.tally(notes)
        finite = current.finite
        if num_stages > 1:
            ballots = transport.vote(bytes([finite]))
            notes += ballots
            finite = all(b == b"\1" for b in ballots)
    except BaseException:
        for part in parts:
            part.roll_back()
        raise
    votes = len(current.note) + (num_stages > 1)
    received += max(0, sum(map(len, notes)) - votes)
    if ledger is not None:
        _book(ledger, current.parts, received)
    outcome = current.close(finite)
    transport.ended(current.parts)
    return replace(outcome, sent_bytes=sent + votes, received_bytes=received)


def book_hashes(ledger: Ledger | None, num_replicas: int) -> None:
    """Book the SHA-256 by which replicas compare their weights at the start."""
    if ledger is not None:
        sent = all_gather_sent(_DIGEST, num_replicas)
        ledger.book("scalars", dense_bytes=sent, wire_bytes=sent)


def _book(ledger: Ledger, parts: Sequence[Partition], received: int) -> None:
    dense = sum(all_reduce_sent(4 * p.table.numel, len(p.roster)) for p in parts)
    exempt = sum(p.table.exempt_nbytes * (len(p.roster) - 1) for p in parts)
    ledger.book(
        "outer",
        dense_bytes=dense,
        wire_bytes=received,
        exempt_bytes=min(exempt, received, dense),
        calls=len(parts),
    )


def _mask(part: Partition, replicas: Sequence[int]) -> bytes:
    bits = sum(1 << i for i, r in enumerate(part.roster) if r in replicas)
    return bits.to_bytes((len(part.roster) + 7) // 8, "little")
