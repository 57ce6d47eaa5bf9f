"""Rounds over a `torch.distributed` store, for sites that fail, lag, come and go.

Why a store. Messages are small and are bytes, every replica reads the same ones, and sites have to
agree on a few short values only: who is in a round, and what became of it. `compare_set` of torch's
own stores (`TCPStore`, which torch elastic runs too; `FileStore` on a shared disk; `HashStore` in a
process) settles each of them once and for all. A process group dies with its first member and has
to be rebuilt by those left, who must first agree on who that is: the same problem again. torchft
solves it with a server and process groups of its own, made for collectives over live gradients,
which messages of this kind don't need. The one process that must live on is the store's: keep it
apart from the training processes.

A round, on every replica:
1. Upload the message in pieces, then a mark that it is whole.
2. Wait until every awaited replica's mark is there, or the deadline has passed, or someone closed.
3. Close: propose the replicas whose marks are there; the first proposal stands.
4. Download and judge their messages; put the verdict; wait for theirs; propose the list of verdicts
   seen; the first list stands, so that all commit or all abort.
A replica that comes too late takes part in 4 alone: the weights move on without its message, its
residual keeps it. One that died isn't awaited in the next round; one that is late, or that joins,
says so and is awaited again.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from thinwire.errors import ConfigError, PeerError
from thinwire.sparseloco import joining
from thinwire.sparseloco.deadline import Deadline
from thinwire.sparseloco.partition import Partition

__all__ = ["StoreTransport"]

KEPT_ROUNDS = 2


class StoreTransport:
    """Carry rounds through a store (see the module).

    Args:
        store: reached by the leaders of all replicas.
        replica: this replica's id.
        replicas: ids of all replicas that may ever take part.
        run: names the run in the store; a restarted run needs another name.
        timeout_s: seconds to wait for messages and votes where no deadline is known.
        deadline: closes rounds without stragglers; None waits `timeout_s` for them.
        grace_s: seconds after the deadline for a straggler's last step and upload.
        member: number of this rank among its replica's voters; with several partitions held by
            several ranks, each votes.
        members: how many voters each replica has, or a replica has by id.
        poll_s: seconds between looks at the store.

    Attributes:
        awaited: replicas that the next round waits for.

    Example:
        >>> store = dist.TCPStore(host, port, is_master=False)  # the master is a process apart
        >>> sites = StoreTransport(store, replica=2, replicas=range(4), deadline=Deadline())
        >>> outer = SparseLoCo(model, optimizer, transport=sites, join=came_late)
    """

    def __init__(
        self,
        store: Store,
        replica: int,
        replicas: Sequence[int],
        *,
        run: str = "run",
        timeout_s: float = 600.0,
        deadline: Deadline | None = None,
        grace_s: float = 10.0,
        member: int = 0,
        members: int | Mapping[int, int] = 1,
        poll_s: float = 0.02,
    ) -> None:
        if replica not in replicas:
            raise ConfigError(f"replica {replica} is not among {list(replicas)}")
        self.store = PrefixStore(f"thinwire/{run}", store)
        self._replica, self._replicas = replica, tuple(sorted(replicas))
        self.timeout_s, self.deadline, self.grace_s = timeout_s, deadline, grace_s
        self.members = members if isinstance(members, Mapping) else dict.fromkeys(replicas, members)
        self.member, self.poll_s = member, poll_s
        self.awaited = set(self._replicas)
        self._served = 0
        self._began_s = time.monotonic()
        self._broken: PeerError | None = None
        self._fresh()

    def _fresh(self) -> None:
        self._round = -1
        self._in: set[int] = set()
        self._wanted = self._votes = 0
        self._late = False

    @property
    def replica(self) -> int:
        """Return the id of this rank's replica."""
        return self._replica

    @property
    def replicas(self) -> tuple[int, ...]:
        """Return the ids of all replicas that may take part."""
        return self._replicas

    def start(self, part: Partition) -> bool:
        """Check that replicas start alike; return whether rounds have deadlines.

        Raises:
            ContractError: they don't.
            PeerError: not all came within `timeout_s`.
        """
        with _store_errors("start"):
            self.store.set(f"start/s{part.stage}/{self.replica}", part.identity().hex())
            keys = {r: f"start/s{part.stage}/{r}" for r in self.replicas}
            missing = self._wait_for(set(keys), keys, time.monotonic() + self.timeout_s)
            if missing:
                raise PeerError(f"replicas {sorted(missing)} did not start in {self.timeout_s} s")
            hashes = {r: bytes.fromhex(self.store.get(key).decode()) for r, key in keys.items()}
        part.check_same_start(hashes)
        self._began_s = time.monotonic()
        return self.deadline is not None

    def due(self, elapsed_s: float) -> bool:
        """Return whether the deadline has passed (see `rounds.Transport`)."""
        seconds = None if self.deadline is None else self.deadline.seconds
        return seconds is not None and elapsed_s >= seconds

    def exchange(self, part: Partition, message: Tensor) -> dict[int, Tensor]:
        """Return the messages of the round's replicas (see `rounds.Transport`).

        Raises:
            PeerError: the store is gone, or this replica is too far behind to follow.
        """
        if self._broken is not None:
            raise self._broken
        if part.round != self._round:
            self._fresh()
            self._round = part.round
        at = f"r{part.round}/s{part.stage}"
        with _store_errors(f"round {part.round}"):
            elapsed = time.monotonic() - self._began_s
            self._upload(f"{at}/m{self.replica}", message, elapsed)
            closed = self._close(at)
            self._in |= set(closed["in"])
            self._wanted = max(self._wanted, closed["want"])
            self._late |= self.replica not in closed["in"]
            return {
                r: message if r == self.replica else self._download(f"{at}/m{r}", message.device)
                for r in closed["in"]
            }

    def vote(self, note: bytes) -> list[bytes]:
        """Return the notes that stand (see `rounds.Transport`).

        Raises:
            PeerError: this rank's own note differs from those that stand: it cannot follow.
        """
        at = f"r{self._round}/v{self._votes}"
        self._votes += 1
        with _store_errors(f"vote of round {self._round}"):
            self.store.set(f"{at}/{self.replica}.{self.member}", note.hex())
            keys = {(r, i): f"{at}/{r}.{i}" for r in self._in for i in range(self.members[r])}
            deadline = time.monotonic() + (self.grace_s if self.deadline else self.timeout_s)
            missing = self._wait_for(set(keys), keys, deadline, f"{at}/list")
            seen = [self.store.get(keys[k]).decode() for k in sorted(set(keys) - missing)]
            standing = self.store.compare_set(f"{at}/list", "", json.dumps(seen)).decode()
        notes = [bytes.fromhex(text) for text in json.loads(standing)]
        if note not in b"".join(notes):
            raise PeerError(
                f"the replicas settled round {self._round} on other messages than replica "
                f"{self.replica} could read: join them anew"
            )
        return notes

    def ended(self, parts: Sequence[Partition]) -> None:
        """Prepare for the next round: whom to await, who joins, which messages can go.

        The round is over by now: a store that fails here is reported by the next exchange.
        """
        self.awaited = set(self._in)
        try:
            with _store_errors(f"the end of round {self._round}"):
                if self._late:
                    key = f"r{self._round + 1}/late"
                    self.store.append(key, f"{self.replica},")  # type: ignore[attr-defined]
                for number in range(self._served + 1, self._wanted + 1):
                    joining.serve(self.store, number, parts, self._in, self.replica)
                self._forget(self._round - KEPT_ROUNDS, parts)
        except PeerError as error:
            self._broken = error
        self._served = max(self._served, self._wanted)
        self._began_s = time.monotonic()

    def join(self, parts: Sequence[Partition]) -> None:
        """Take weights, round and number of commits from the replicas at their next boundary.

        The residual starts at zero. With two or more replicas in the run, two must tell the same.

        Raises:
            PeerError: nobody answered within `timeout_s`, or answers differ.
            ConfigError: the run has other options or tensors.
        """
        with _store_errors("joining"):
            answer = joining.request(self.store, self.replica, parts, self.timeout_s, self.poll_s)
            self.awaited = set(answer["in"]) | {self.replica}
            self._served = int(answer["number"])
        self._began_s = time.monotonic()

    # -- steps -----------------------------------------------------------------------------------

    def _upload(self, key: str, message: Tensor, elapsed_s: float) -> None:
        joining.put_bytes(self.store, key, message.cpu().numpy().tobytes())
        self.store.set(f"{key}/whole", json.dumps({"elapsed_s": elapsed_s}))

    def _download(self, key: str, device: torch.device) -> Tensor:
        data = joining.get_bytes(self.store, key)
        if data is None:
            raise PeerError(
                f"messages of round {self._round} are no longer kept: replica {self.replica} is "
                "too far behind and must join anew"
            )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)

    def _close(self, at: str) -> dict[str, Any]:
        """Wait, propose who is in, and return what stands."""
        keys = {r: f"{at}/m{r}/whole" for r in self.replicas}
        late = f"r{self._round}/late"
        waited = set(self.awaited)
        if self.store.check([late]):
            waited |= {int(r) for r in self.store.get(late).decode().split(",") if r}
        self._wait_for(waited, keys, self._closing_s(), f"{at}/closed")
        arrived = [r for r, key in keys.items() if self.store.check([key])]
        proposal = {"in": arrived, "want": joining.number_of_requests(self.store)}
        standing = self.store.compare_set(f"{at}/closed", "", json.dumps(proposal))
        closed = json.loads(standing)
        if self.deadline is not None:
            marks = (json.loads(self.store.get(keys[r])) for r in closed["in"])
            self.deadline.observe(mark["elapsed_s"] for mark in marks)
        return closed

    def _closing_s(self) -> float:
        """Return the moment after which nobody is waited for."""
        now = time.monotonic()
        seconds = None if self.deadline is None else self.deadline.seconds
        if seconds is None:
            return now + self.timeout_s
        return max(now, self._began_s + seconds) + self.grace_s

    def _wait_for(self, wanted: set[Any], keys: dict[Any, str], until: float, end: str = "") -> set:
        """Wait for the keys of `wanted`, a moment, or the key `end`; return what is missing."""
        missing = set(wanted)
        while True:
            missing = {k for k in missing if not self.store.check([keys[k]])}
            if not missing or time.monotonic() > until or (end and self.store.check([end])):
                return missing
            time.sleep(self.poll_s)

    def _forget(self, round_: int, parts: Sequence[Partition]) -> None:
        if round_ < 0:
            return
        for part in parts:
            joining.delete_bytes(self.store, f"r{round_}/s{part.stage}/m{self.replica}")


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Turn a lost or slow store into a PeerError."""
    try:
        yield
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(f"the store failed during {what}: {reason}") from error
