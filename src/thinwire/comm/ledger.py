"""Books every byte that a run sends, per link, beside what the dense collective would have sent.

Both sides count what one rank sends under the bandwidth-optimal algorithm; the functions below are
the only place where those formulas stand (tests, benchmarks and the cost model call them).

Legend: `R` ranks of the group.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from thinwire.errors import ConfigError, ContractError

__all__ = [
    "LINKS",
    "ExemptCalls",
    "Exemption",
    "Ledger",
    "LinkTotals",
    "all_gather_sent",
    "all_reduce_sent",
    "reduce_scatter_sent",
]

LINKS = ("weights", "gradients", "tensor", "pipeline", "masks", "outer", "scalars")


def all_gather_sent(shard_bytes: int, num_ranks: int) -> int:
    """Return the bytes one rank sends to gather shards of `shard_bytes`: s(R-1)."""
    return shard_bytes * (num_ranks - 1)


def reduce_scatter_sent(chunk_bytes: int, num_ranks: int) -> int:
    """Return the bytes one rank sends to reduce-scatter or all-to-all R chunks: c(R-1)."""
    return chunk_bytes * (num_ranks - 1)


def all_reduce_sent(nbytes: int, num_ranks: int) -> int:
    """Return the bytes one rank sends to all-reduce `nbytes`: 2n(R-1)/R, rounded up."""
    return -(-2 * nbytes * (num_ranks - 1) // num_ranks)


@dataclass(slots=True)
class LinkTotals:
    """Sums for one link, bytes as sent by this rank.

    Attributes:
        calls: collectives or messages booked.
        dense_bytes: what the uncompressed collective of the declared dtype would have sent.
        wire_bytes: what was sent: payload, scales, indices, padding and exempt tensors.
        exempt_bytes: the part of wire_bytes that a codec's exemptions sent uncompressed.
        nonfinite_blocks: blocks of own messages that held NaN or infinity and were zeroed or sent
            on as NaN (policies "zero" and "propagate").
        encode_s: seconds spent encoding (0.0 unless the ledger times).
        decode_s: seconds spent decoding (0.0 unless the ledger times).
        wait_s: seconds spent waiting for the wire (0.0 unless the ledger times).
    """

    calls: int = 0
    dense_bytes: int = 0
    wire_bytes: int = 0
    exempt_bytes: int = 0
    nonfinite_blocks: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Return dense over wire bytes of the whole link (1.0 while nothing was sent)."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def compressed_ratio(self) -> float:
        """Return dense over wire bytes of the part that is not exempt."""
        wire = self.wire_bytes - self.exempt_bytes
        return (self.dense_bytes - self.exempt_bytes) / wire if wire else 1.0

    def to_dict(self) -> dict[str, float]:
        """Return the sums and both ratios, for run.json."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"ratio": self.ratio, "compressed_ratio": self.compressed_ratio}


@dataclass(frozen=True, slots=True)
class Exemption:
    """A tensor that a system sends uncompressed, declared at set-up.

    Attributes:
        link: the link it travels on.
        name: the tensor's full name.
        reason: why it is exempt, in words for the report.
        nbytes: its uncompressed size on this rank, in bytes.
    """

    link: str
    name: str
    reason: str
    nbytes: int


@dataclass(slots=True)
class ExemptCalls:
    """Calls that went uncompressed for one reason.

    Attributes:
        calls: collectives.
        nbytes: bytes sent by this rank.
    """

    calls: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Expectation:
    min_ratio: float
    num_ranks: int


@dataclass
class Ledger:
    """Count bytes per link, prove that compression happened.

    A ledger belongs to one rank; systems take it in their constructor and book each call. Without
    a ledger there are no hooks at all. Thread-safe.

    Attributes:
        timing: also book encode, decode and wait seconds (costs a clock read around each).
        exemptions: tensors that systems declared uncompressed at set-up.
        exempt_calls: what calls sent uncompressed, per (link, reason).

    Example:
        >>> ledger = Ledger()
        >>> handle = tw.aquavit.attach(model, schedule, ledger=ledger)
        >>> ...
        >>> ledger.check()  # raises ContractError unless the weights link was compressed
    """

    timing: bool = False
    exemptions: list[Exemption] = field(default_factory=list, init=False)
    exempt_calls: dict[tuple[str, str], ExemptCalls] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._totals = {link: LinkTotals() for link in LINKS}
        self._expected: dict[str, _Expectation] = {}
        self._step_start = dict.fromkeys(LINKS, 0)
        self._lock = threading.Lock()

    def __getitem__(self, link: str) -> LinkTotals:
        """Return the live totals of a link."""
        return self._totals[_known(link)]

    def book(
        self,
        link: str,
        *,
        dense_bytes: int,
        wire_bytes: int,
        exempt_bytes: int = 0,
        calls: int = 1,
        reason: str = "",
    ) -> None:
        """Add one call, in bytes sent by this rank.

        Args:
            link: one of `LINKS`.
            dense_bytes: what the uncompressed collective would have sent.
            wire_bytes: what was sent.
            exempt_bytes: the part of wire_bytes that was sent uncompressed on purpose.
            calls: collectives or messages.
            reason: why bytes were exempt; sums per reason stand in `exempt_calls`.
        """
        totals = self[link]
        with self._lock:
            if reason:
                gated = self.exempt_calls.setdefault((link, reason), ExemptCalls())
                gated.calls += calls
                gated.nbytes += exempt_bytes
            totals.calls += calls
            totals.dense_bytes += dense_bytes
            totals.wire_bytes += wire_bytes
            totals.exempt_bytes += exempt_bytes

    def book_nonfinite(self, link: str, blocks: int) -> None:
        """Add blocks that held NaN or infinity."""
        totals = self[link]
        with self._lock:
            totals.nonfinite_blocks += blocks

    def all_exemptions(self) -> list[Exemption]:
        """Return the declared exemptions, and what single calls sent uncompressed."""
        calls = [
            Exemption(link, f"{gated.calls} calls", reason, gated.nbytes)
            for (link, reason), gated in self.exempt_calls.items()
        ]
        return self.exemptions + calls

    def declare_exempt(self, link: str, name: str, reason: str, nbytes: int) -> None:
        """List a tensor that will travel uncompressed; systems call this at set-up."""
        self.exemptions.append(Exemption(_known(link), name, reason, nbytes))

    @contextmanager
    def timed(self, link: str, what: str) -> Iterator[None]:
        """Add the seconds of the block to `what` ("encode_s", "decode_s", "wait_s") if timing."""
        if not self.timing:
            yield
            return
        start = time.perf_counter()
        yield
        totals = self[link]
        with self._lock:
            setattr(totals, what, getattr(totals, what) + time.perf_counter() - start)

    def expect(self, link: str, *, num_ranks: int, min_ratio: float = 1.0) -> None:
        """Declare that `link` must be compressed, by more than `min_ratio`; `check` holds it to it.

        Args:
            link: one of `LINKS`.
            num_ranks: ranks of the group; with 1 nothing travels and the check passes.
            min_ratio: dense over wire bytes of the non-exempt part must exceed this.
        """
        self._expected[_known(link)] = _Expectation(min_ratio, num_ranks)

    def check(self) -> str:
        """Return a line per expected link that says what it carried, or raise ContractError."""
        lines = []
        for link, want in self._expected.items():
            totals = self._totals[link]
            if want.num_ranks == 1:
                lines.append(f"{link}: one rank, nothing to send")
                continue
            if totals.calls == 0:
                raise ContractError(
                    f"link {link!r} was to be compressed but carried no message: the hook was "
                    "removed, bypassed by a wrapper, or no step has run yet"
                )
            if not totals.compressed_ratio > want.min_ratio:
                raise ContractError(
                    f"link {link!r} was to be compressed by more than {want.min_ratio:g}x but sent "
                    f"{totals.wire_bytes - totals.exempt_bytes} bytes for "
                    f"{totals.dense_bytes - totals.exempt_bytes} dense bytes "
                    f"({totals.exempt_bytes} more were exempt)"
                )
            lines.append(
                f"{link}: {totals.wire_bytes} bytes in {totals.calls} calls, "
                f"{totals.ratio:.2f}x below dense"
            )
        return "\n".join(lines)

    def end_step(self) -> dict[str, int]:
        """Return the wire bytes per link since the last call, links that sent nothing left out."""
        now = {link: totals.wire_bytes for link, totals in self._totals.items()}
        sent = {k: now[k] - self._step_start[k] for k in LINKS if now[k] > self._step_start[k]}
        self._step_start = now
        return sent

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the totals of every link that carried something, for run.json."""
        return {link: t.to_dict() for link, t in self._totals.items() if t.calls}

    def load_totals(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the totals of an earlier run's `to_dict`."""
        for link, values in saved.items():
            totals = self[link]
            for f in fields(totals):
                setattr(totals, f.name, values.get(f.name, f.default))
            self._step_start[link] = totals.wire_bytes


def _known(link: str) -> str:
    if link not in LINKS:
        raise ConfigError(f"unknown link {link!r}: choose one of {', '.join(LINKS)}")
    return link
