"""One outer round of a rank that owns some partitions and may follow the embedding.

As `thinwire.sparseloco.rounds`, with three steps more:
1. A replica that must abstain with one stage does so with all: its stages tell each other.
2. The first stage of a compressed pipeline hands the embedding's messages on to the later stages,
   which judge them like any owner and vote on them. No dense rows travel.
3. Followers take part in the commit: all stages of all replicas, or none.

Ranks walk partitions in ascending number, so no two wait for each other in a circle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm import Ledger, transport
from thinwire.comm.ledger import all_reduce_sent
from thinwire.errors import PeerError
from thinwire.sparseloco import GroupTransport, Outcome, Partition
from thinwire.sparseloco.partition import Delta
from thinwire.sparseloco.rounds import Round, decide, note

__all__ = ["Follower", "MixedRound"]

_FOLLOWS = "follows another stage's rows"


class Follower:
    """A later stage's copy of the embedding rows, moved by the same messages as the owner's.

    Attributes:
        part: holds the rows; it never sends.
    """

    def __init__(self, part: Partition) -> None:
        self.part = part
        self._note = b""

    def prepare(self) -> None:
        """Open a round."""
        self.part.prepare(lambda name: self.part.theta[name], 0, abstain=_FOLLOWS)

    def judge(self, messages: dict[int, Tensor]) -> bytes:
        """Return the note of what was handed on."""
        return note(self.part, self.part.judge(messages))

    def close(self, update: dict[str, Tensor] | None, accepted: Sequence[int]) -> None:
        """Commit with the others, or abort with them."""
        if update is None:
            self.part.abort()
        else:
            self.part.commit(update, accepted)


class MixedRound:
    """What every round of a rank needs.

    Args:
        parts: partitions that this rank owns, by number.
        transport: exchanges and votes.
        inner: the replica's ranks, None for one.
        embedding: number of the embedding's partition.
        follower: of a later stage of a compressed replica.
        feeds: this rank hands the embedding's messages on.
        ledger: books link "outer".
    """

    def __init__(
        self,
        parts: Sequence[Partition],
        transport: GroupTransport,
        *,
        inner: dist.ProcessGroup | None,
        embedding: int,
        follower: Follower | None,
        feeds: bool,
        ledger: Ledger | None,
    ) -> None:
        self.parts, self.transport, self.inner = list(parts), transport, inner
        self.embedding, self.follower, self.feeds = embedding, follower, feeds
        self.ledger = ledger

    def run(self, delta: Delta, tokens: int, abstain: str) -> Outcome:
        """Take all partitions through a round; collective over the world.

        Raises:
            PeerError: a rank was lost; partitions are as before the round.
            ContractError: replicas drifted apart; likewise.
        """
        try:
            return self._run(delta, tokens, abstain)
        except BaseException:
            for part in self._all():
                part.roll_back()
            raise

    def _all(self) -> list[Partition]:
        return self.parts + ([self.follower.part] if self.follower is not None else [])

    def _run(self, delta: Delta, tokens: int, abstain: str) -> Outcome:
        current = Round(self.parts, [delta] * len(self.parts), tokens, abstain=abstain)
        self._abstain_together(current)
        sent = received = handed = 0
        rows: dict[int, Tensor] = {}
        for part, message in zip(current.parts, current.messages, strict=True):
            messages = self.transport.exchange(part, message)
            sent += message.numel()
            received += sum(m.numel() for r, m in messages.items() if r != part.replica)
            current.judge(part, messages)
            if part.stage == self.embedding:
                rows = messages
        ballot = current.note
        if self.feeds and self.inner is not None:
            handed = self._hand_on(rows, self.parts[0].device)
        elif self.follower is not None:
            self.follower.prepare()
            ballot += self.follower.judge(self._take_on(self.follower.part))
        notes = self.transport.vote(ballot)
        num_stages = current.tally(notes)
        accepted = decide(current.parts[0], notes)[0]
        update = None
        finite = current.finite
        if self.follower is not None and not current.why:
            update = self.follower.part.update(accepted)
            finite = finite and update is not None
        if num_stages > 1:
            ballots = self.transport.vote(bytes([finite]))
            notes += ballots
            finite = all(b == b"\1" for b in ballots)
        votes = len(ballot) + (num_stages > 1)
        received += max(0, sum(map(len, notes)) - votes)
        self._book(received, handed)
        outcome = current.close(finite)
        self.transport.ended(current.parts)
        if self.follower is not None:
            self.follower.close(update if outcome.committed else None, outcome.accepted)
        return replace(outcome, sent_bytes=sent + votes + handed, received_bytes=received)

    def _abstain_together(self, current: Round) -> None:
        """Withhold this stage's messages where another stage of the replica abstains."""
        if self.inner is None:
            return
        mine = bool(current.parts[0].abstains)
        flag = torch.tensor([mine], dtype=torch.uint8, device=current.parts[0].device)
        with _lost_peers("stages of this replica told each other whether they abstain"):
            rows, _ = transport.all_gather(flag, self.inner)
        if self.ledger is not None:
            nbytes = self.inner.size() - 1
            self.ledger.book("scalars", dense_bytes=nbytes, wire_bytes=nbytes)
        if bool(rows.any()) and not mine:
            why = f"stage {int(rows.view(-1).argmax())} of this replica abstains"
            current.messages = [part.withhold(why) for part in current.parts]

    def _hand_on(self, messages: dict[int, Tensor], device: torch.device) -> int:
        """Send the embedding's messages to the later stages; return the bytes."""
        assert self.inner is not None
        stacked = torch.stack([messages[r] for r in sorted(messages)]).to(device)
        with _lost_peers("the embedding's messages were handed on to the later stages"):
            transport.broadcast(stacked.view(-1), 0, self.inner)
        return stacked.numel() * (self.inner.size() - 1)

    def _take_on(self, part: Partition) -> dict[int, Tensor]:
        assert self.inner is not None
        shape = (len(part.roster), part.table.message_nbytes)
        stacked = torch.empty(shape, dtype=torch.uint8, device=part.device)
        with _lost_peers("the embedding's messages were handed on to the later stages"):
            transport.broadcast(stacked.view(-1), 0, self.inner)
        return dict(zip(part.roster, stacked, strict=True))

    def _book(self, received: int, handed: int) -> None:
        """Book as `thinwire.sparseloco` does; rows handed on beside dense rows sent to all."""
        if self.ledger is None:
            return
        dense = sum(all_reduce_sent(4 * p.table.numel, len(p.roster)) for p in self.parts)
        exempt = sum(p.table.exempt_nbytes * (len(p.roster) - 1) for p in self.parts)
        self.ledger.book(
            "outer",
            dense_bytes=dense,
            wire_bytes=received,
            exempt_bytes=min(exempt, received, dense),
            calls=len(self.parts),
        )
        if handed and self.inner is not None:
            rows = next(p for p in self.parts if p.stage == self.embedding)
            self.ledger.book(
                "outer",
                dense_bytes=4 * rows.table.numel * (self.inner.size() - 1),
                wire_bytes=handed,
            )


@contextmanager
def _lost_peers(what: str) -> Iterator[None]:
    """Turn what torch raises for a lost peer and for a timeout into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"a peer was lost while {what}; weights and residuals are as after the last committed "
            f"round: resume from there ({reason})"
        ) from error
