"""What one step of a run does, on one rank: a list of operations that the timeline puts in time.

An operation computes, encodes, decodes, or sends; it names the earlier operations it waits for.
Ranks of one pipeline stage do alike, so a stage stands for all of them, and the list's length
doesn't depend on the number of ranks. Sizes come from the codecs and from the formulas that the
ledger's callers use.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from thinwire.codecs import Codec
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent, reduce_scatter_sent
from thinwire.errors import ConfigError

__all__ = [
    "DENSE_STEP", "SELECT", "SPARSE", "SYNC", "Coding", "Compute", "Costs", "Message", "Op",
    "Phase", "Workload", "as_gather", "sent_bytes",
]  # fmt: skip

# Arms' own passes over their state: names in `Compute.what`, and beside the codecs in links.json.
SELECT, SPARSE = "select", "sparse"
# What a phase's name holds where its steps send everything, and where they end a round.
DENSE_STEP, SYNC = "dense step", "sync"


@dataclass(frozen=True, slots=True)
class Compute:
    """Arithmetic of the model or the optimizer.

    Attributes:
        what: "forward", "backward", "optimizer", or an arm's own passes over its state: `SELECT`
            (the largest values picked and added back), `SPARSE` (SCAPE's step beyond AdamS's).
        flops: floating-point operations of matrix products.
        nbytes: memory traffic of element-wise passes, in bytes.
        numel: values that such a pass goes over.
        calls: tensors that they are cut into.
    """

    what: str
    flops: float = 0.0
    nbytes: float = 0.0
    numel: int = 0
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Coding:
    """Encode or decode messages.

    Attributes:
        what: "encode" or "decode".
        link: ledger link.
        codec: how.
        numel: values in all.
        calls: messages they are cut into.
    """

    what: str
    link: str
    codec: Codec
    numel: int
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, or a message between two stages.

    Attributes:
        link: ledger link.
        axis: mesh axis whose groups take part.
        collective: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", or
            "broadcast", by the first rank.
        nbytes: bytes of what one rank hands in: its shard for an all-gather, the whole input for
            the others.
        num_ranks: ranks of the group.
        dense_bytes: what the uncompressed collective would have sent, by the ledger.
    """

    link: str
    axis: str
    collective: str
    nbytes: int
    num_ranks: int
    dense_bytes: int

    @property
    def sent(self) -> int:
        """Return the bytes that this rank sends, by the ledger's formulas."""
        return sent_bytes(self.collective, self.nbytes, self.num_ranks)


def as_gather(message: Message) -> Message:
    """Return the all-gather that takes about as long as a broadcast: pieces of what it carries."""
    piece = -(-message.nbytes // message.num_ranks)
    return replace(message, collective="all_gather", nbytes=piece)


def sent_bytes(collective: str, nbytes: int, num_ranks: int) -> int:
    """Return the bytes one rank sends in a collective whose every rank hands in `nbytes`."""
    if collective == "all_gather":
        return all_gather_sent(nbytes, num_ranks)
    if collective == "all_reduce":
        return all_reduce_sent(nbytes, num_ranks)
    if collective in ("reduce_scatter", "all_to_all"):
        return reduce_scatter_sent(-(-nbytes // num_ranks), num_ranks)
    if collective == "send_recv":
        return nbytes
    if collective == "broadcast":
        return (num_ranks - 1) * nbytes
    raise ConfigError(f"unknown collective {collective!r}")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        work: what it does.
        after: indices of the operations of this step that must have ended.
        carried: indices of operations of the step before that must have ended.
        stage: pipeline stage that does it; the sending one of a message.
        to_stage: receiving stage of a message between stages, -1 else.
    """

    work: Compute | Coding | Message
    after: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    stage: int = 0
    to_stage: int = -1


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that do alike.

    Attributes:
        name: for people, "(6, 32)" or "sync".
        share: fraction of a run's steps.
        ops: in the order in which the host issues them.
    """

    name: str
    share: float
    ops: tuple[Op, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run as the model sees it.

    Attributes:
        name: the arm's name.
        phases: shares add up to 1.
        num_ranks: ranks in all.
        mesh: ranks per axis.
        tokens: tokens of a step over all ranks.
        params: parameters of the whole model.
        flops: of a step on one rank of the busiest stage, recomputation included.
        forward_flops: the part of forward passes.
        rank_tokens: tokens of a step on one rank.
        rank_params: parameters that a rank computes with, before tensor parallelism.
        memory: bytes on one rank by what they hold.
        systems: ledger link -> what compresses it, for words.
        speeds: computing speed of each stage beside the described device; empty: 1 each.
    """

    name: str
    phases: tuple[Phase, ...]
    num_ranks: int
    mesh: Mapping[str, int]
    tokens: int
    params: int
    flops: float
    forward_flops: float
    rank_tokens: int
    rank_params: int
    memory: Mapping[str, int] = field(default_factory=dict)
    systems: Mapping[str, str] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()

    def sent(self, *, dense: bool = False, stage: int | None = None) -> dict[str, float]:
        """Return the mean bytes of a step per link that one rank sends.

        Args:
            dense: what the uncompressed collectives would have sent.
            stage: the pipeline stage whose ranks send; None: per link, the stage that sends most.
        """
        stages = {op.stage for phase in self.phases for op in phase.ops}
        if stage is None:
            every = [self.sent(dense=dense, stage=s) for s in sorted(stages)]
            links = dict.fromkeys(link for one in every for link in one)
            return {link: max(one.get(link, 0.0) for one in every) for link in links}
        totals: Counter[str] = Counter()
        for phase in self.phases:
            for op in phase.ops:
                if isinstance(op.work, Message) and op.stage == stage:
                    nbytes = op.work.dense_bytes if dense else op.work.sent
                    totals[op.work.link] += nbytes * phase.share  # type: ignore[assignment]
        return dict(totals)

    def codecs(self) -> list[Codec]:
        """Return the codecs in use, each once."""
        works = [op.work for phase in self.phases for op in phase.ops]
        return list(dict.fromkeys(w.codec for w in works if isinstance(w, Coding)))


class Costs(Protocol):
    """What operations cost on given hardware: a described cluster, or measured links.

    Attributes:
        burst_s: seconds of its own speed that an idle wire saves up and lets pass at once.
    """

    @property
    def burst_s(self) -> float:
        """Return the most that a wire saves up (0 for most links)."""
        ...

    def least_s(self, message: Message) -> float:
        """Return the seconds of a message that a burst carries whole."""
        ...

    def seconds(self, message: Message) -> float:
        """Return the seconds of a message on an idle link."""
        ...

    def wake_s(self, message: Message) -> float:
        """Return the seconds that it takes longer where the host has computed before."""
        ...

    def wire(self, axis: str) -> str:
        """Return the name of the wire that an axis's messages queue on."""
        ...

    def coding_s(self, coding: Coding) -> float:
        """Return the seconds to encode or decode."""
        ...

    def compute_s(self, compute: Compute, workload: Workload) -> float:
        """Return the seconds of arithmetic."""
        ...


def check_shares(phases: Sequence[Phase]) -> None:
    """Raise ConfigError unless the phases make up a whole run."""
    total = sum(phase.share for phase in phases)
    if not phases or abs(total - 1) > 1e-9:
        raise ConfigError(f"the phases of a workload must add up to 1, got {total}")
