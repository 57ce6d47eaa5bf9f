"""One partition (pipeline stage, or the whole model) of one replica: state, message, commit.

A round, with theta the weights all replicas share, e this replica's residual:

1. delta = theta - local weights (the caller's own, where its anchor is another).
2. a = beta*e + delta; the message says D = what is sent of a; e' = a - D as it decodes.
3. Messages are exchanged, judged, and one set of them is agreed on (`rounds`).
4. theta = theta - alpha * mean of the accepted D.

Nothing that lasts changes before `commit`, which replaces everything at once:

    own message accepted        e = e'
    not accepted (late, lost)   e = a
    abstained (delta has NaN)   e stays
    aborted                     e stays, theta stays

Theta and e are fp32 whatever the parameters' dtype. A `Partition` knows no process group.

Legend: `N` elements of a tensor.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.errors import ConfigError, ContractError, WireError
from thinwire.kernels.finite import all_finite
from thinwire.sparseloco.aggregate import Mean
from thinwire.sparseloco.message import ABSTAIN, Header, Message, pack, unpack
from thinwire.sparseloco.options import Options
from thinwire.sparseloco.table import HEADER_NBYTES, Record, Table

__all__ = ["Delta", "Partition", "Verdict", "fingerprint"]

Delta = Callable[[str], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What one replica makes of a round's messages.

    Attributes:
        accepted: replicas whose messages are sound and don't abstain, ascending.
        abstained: replicas that sent a sound message without a share in the mean.
        reasons: why each other replica of the roster is left out.
        tokens: what each replica with a sound message says it processed.
        digest: names accepted replicas and their messages; equal digests mean equal means.
    """

    accepted: tuple[int, ...]
    abstained: tuple[int, ...]
    reasons: dict[int, str]
    tokens: dict[int, int]
    digest: bytes


@dataclass
class _Pending:
    """What a prepared round holds until commit.

    `sent` lists, per tensor, where the message took from the residual (None: everywhere) and what
    stood there, so that an undelivered message can be taken back exactly.
    """

    message: Tensor
    why_abstained: str = ""
    residual: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, tuple[Tensor | None, Tensor]] = field(default_factory=dict)


def fingerprint(theta: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of weights, tensors in the mapping's order."""
    total = hashlib.sha256()
    for x in theta.values():
        if x.numel():
            total.update(x.reshape(-1).cpu().view(torch.uint8).numpy().data)
    return total.digest()


class Partition:
    """The state of one partition, and what a round does with it.

    Args:
        tensors: initial weights by name; copied to fp32.
        options: the run's settings.
        replica: this replica's id.
        roster: ids of all replicas that may take part.
        stage: the partition's number.
        basis_version: of a pipeline's subspace; 0 for none. May be set between rounds.
        extra: bytes that must agree between replicas beside the options.
        device: where weights, residual and messages live; None: beside the tensors.

    Attributes:
        theta: weights that all replicas share, fp32 by name.
        residual: what this replica still owes the mean, fp32 by name.
        round: rounds ended so far, committed or aborted.
        commits: rounds committed.

    Raises:
        ConfigError: no tensor to compress, or a tensor that is not floating.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        options: Options,
        *,
        replica: int = 0,
        roster: Collection[int] = (0,),
        stage: int = 0,
        basis_version: int = 0,
        extra: bytes = b"",
        device: torch.device | None = None,
    ) -> None:
        for name, x in tensors.items():
            if not x.is_floating_point():
                raise ConfigError(f"{name!r} is {x.dtype}: only floating tensors are synchronized")
        if options.min_quorum > len(roster):
            raise ConfigError(
                f"min_quorum {options.min_quorum} can't be met by {len(roster)} replicas: no round "
                "would ever commit"
            )
        self.options, self.replica, self.stage = options, replica, stage
        self.table = Table({name: x.shape for name, x in tensors.items()}, options)
        self.basis_version, self.extra = basis_version, extra
        self.theta = {
            r.name: tensors[r.name].detach().to(device, torch.float32, copy=True).contiguous()
            for r in self.table.records
        }
        self.residual = {name: torch.zeros_like(x) for name, x in self.theta.items()}
        self.round = self.commits = 0
        self.set_roster(roster)
        self._pending: _Pending | None = None
        self._messages: dict[int, Message] = {}
        self._tokens = 0

    def set_roster(self, roster: Collection[int]) -> None:
        """Name the replicas of the rounds to come.

        Raises:
            ConfigError: this replica is not among them.
        """
        self.roster = tuple(sorted(set(roster)))
        if self.replica not in self.roster:
            raise ConfigError(f"replica {self.replica} is not in the roster {self.roster}")

    @property
    def device(self) -> torch.device:
        """Return where the state lives."""
        return next(iter(self.theta.values())).device

    def fingerprint(self) -> bytes:
        """Return the SHA-256 of theta, tensors in wire order."""
        return fingerprint(self.theta)

    def header(self, replica: int | None = None, tokens: int = 0) -> Header:
        """Return the header of this round's message."""
        every = self.options.check_every
        checked = every > 0 and self.round % every == 0
        return Header(
            flags=self.options.flags,
            round=self.round,
            replica=self.replica if replica is None else replica,
            stage=self.stage,
            tokens=tokens,
            payload_nbytes=self.table.payload_nbytes,
            num_tensors=len(self.table.records),
            basis_version=self.basis_version,
            config_hash=self.options.config_hash(self.extra),
            table_hash=self.table.digest,
            anchor=self.fingerprint()[:12] if checked else bytes(12),
        )

    @torch.no_grad()
    def prepare(self, delta: Delta, tokens: int, *, abstain: str = "") -> Tensor:
        """Return this round's message, uint8 [W].

        Args:
            delta: gives the pseudo-gradient of a tensor by name, fp32 in the tensor's shape; called
                once for every tensor in wire order (it may communicate), also when abstaining.
            tokens: that this replica processed in the round.
            abstain: why this replica takes no part; "" lets it take part unless a value is not
                finite or not representable.

        Raises:
            ConfigError: the last round was not ended.
        """
        if self._pending is not None:
            raise ConfigError("the last round was neither committed nor aborted")
        message = torch.zeros(self.table.message_nbytes, dtype=torch.uint8, device=self.device)
        pending = _Pending(message, abstain)
        for record in self.table.records:
            d = delta(record.name).detach().reshape(-1).to(self.device, torch.float32)
            if not pending.why_abstained and record.numel:
                pending.why_abstained = self._encode(record, d.contiguous(), pending)
        self._pending, self._tokens = pending, tokens
        if pending.why_abstained:
            return self.withhold(pending.why_abstained)
        pack(self.header(tokens=tokens), message)
        return message

    def withhold(self, why: str) -> Tensor:
        """Turn the prepared message into an abstention of the same length, and return it.

        Args:
            why: for the record; a replica that abstains with one partition does so with all.
        """
        pending = self._need_pending()
        pending.why_abstained = why
        pending.message.zero_()
        pending.residual.clear()
        pending.sent.clear()
        head = self.header(tokens=self._tokens)
        pack(replace(head, flags=head.flags | ABSTAIN), pending.message)
        return pending.message

    def _encode(self, record: Record, d: Tensor, pending: _Pending) -> str:
        """Write one record; return why the replica must abstain, "" if it need not."""
        if not all_finite(d):
            return f"the pseudo-gradient of {record.name!r} is not finite"
        old = self.residual[record.name].view(-1)
        new = torch.empty_like(old)
        payload = pending.message[HEADER_NBYTES:]
        record.encode(d, old, self.options.beta, new, payload)
        try:
            position, _ = record.decode(payload)
        except WireError:
            return (
                f"values of {record.name!r} lie beyond the wire's range "
                f"(level_dtype {self.options.level_dtype!r})"
            )
        if position is None:
            sent = (self.options.beta * old).add_(d)
        else:
            sent = (self.options.beta * old[position]).add_(d[position])
        pending.residual[record.name] = new.view(record.shape)
        pending.sent[record.name] = (position, sent)
        return ""

    @property
    def abstains(self) -> str:
        """Return why this replica abstains from the prepared round, "" if it takes part."""
        return self._pending.why_abstained if self._pending is not None else ""

    def judge(self, messages: Mapping[int, Tensor]) -> Verdict:
        """Check every message of the round.

        Args:
            messages: uint8 [W] by replica id, this replica's own included; those of replicas that
                sent nothing are left out.

        Raises:
            ContractError: a replica holds another anchor.
        """
        self._messages = {}
        accepted: list[int] = []
        abstained: list[int] = []
        reasons: dict[int, str] = {}
        want = self.header()
        total = hashlib.sha256(f"{self.round} {self.stage}".encode())
        for replica in self.roster:
            if replica not in messages:
                reasons[replica] = "no message"
                continue
            try:
                expected = replace(want, replica=replica)
                message = unpack(messages[replica].to(self.device), self.table, expected)
            except WireError as error:
                reasons[replica] = str(error)
                continue
            total.update(replica.to_bytes(4, "little") + message.header.payload_sha)
            self._messages[replica] = message
            (abstained if message.header.abstains else accepted).append(replica)
        tokens = {r: m.header.tokens for r, m in self._messages.items()}
        return Verdict(tuple(accepted), tuple(abstained), reasons, tokens, total.digest())

    @torch.no_grad()
    def update(self, accepted: Sequence[int]) -> dict[str, Tensor] | None:
        """Return theta after the round, changing nothing; None where it would not be finite.

        Args:
            accepted: replicas whose judged messages count.
        """
        mean = Mean([self._messages[r] for r in sorted(accepted)], self.options)
        alpha = self.options.alpha_at(self.commits)
        theta = {}
        for index, record in enumerate(self.table.records):
            new = mean.step(record, index, self.theta[record.name], alpha)
            if new is None:
                return None
            theta[record.name] = new
        return theta

    @torch.no_grad()
    def commit(self, theta: dict[str, Tensor], accepted: Collection[int]) -> None:
        """Take what `update` returned, and the residual that belongs to it."""
        pending = self._need_pending()
        self.theta = theta
        if not pending.why_abstained:
            if self.replica not in accepted:
                for name, (position, value) in pending.sent.items():
                    target = pending.residual[name].view(-1)
                    if position is None:
                        target.copy_(value)
                    else:
                        target[position] = value
            self.residual.update(pending.residual)
        self.commits += 1
        self._end()

    def abort(self) -> None:
        """End the round without effect; the next one has a new number."""
        self._need_pending()
        self._end()

    def roll_back(self) -> None:
        """Forget the prepared round, if there is one, as if it had never begun."""
        self._pending, self._messages = None, {}

    def _need_pending(self) -> _Pending:
        if self._pending is None:
            raise ConfigError("no round was prepared")
        return self._pending

    def _end(self) -> None:
        self._pending, self._messages = None, {}
        self.round += 1

    def state_dict(self) -> dict[str, object]:
        """Return all that a resumed run needs of this partition, the tensors as copies.

        Raises:
            ConfigError: a round is open between `prepare` and `commit`.
        """
        if self._pending is not None:
            raise ConfigError("save between rounds, not between prepare and commit")
        return {
            "round": self.round,
            "commits": self.commits,
            "replica": self.replica,
            "roster": list(self.roster),
            "stage": self.stage,
            "basis_version": self.basis_version,
            "config_hash": self.options.config_hash(self.extra).hex(),
            "theta_sha256": self.fingerprint().hex(),
            "theta": {name: x.clone() for name, x in self.theta.items()},
            "residual": {name: x.clone() for name, x in self.residual.items()},
        }

    def identity(self) -> bytes:
        """Return 16 bytes of the settings' hash and 16 of the weights', for `check_same_start`."""
        return self.options.config_hash(self.extra) + self.fingerprint()[:16]

    def check_same_start(self, identities: Mapping[int, bytes]) -> None:
        """Raise ContractError unless all replicas have these settings and hold this theta."""
        mine = self.identity()
        others = [r for r, i in sorted(identities.items()) if i[:16] != mine[:16]]
        if others:
            raise ContractError(
                f"replicas {others} run with other settings than replica {self.replica}: give all "
                f"the same options (here: {self.options})"
            )
        others = [r for r, i in sorted(identities.items()) if i != mine]
        if others:
            raise ContractError(
                f"replicas {others} hold other weights than replica {self.replica}: start all from "
                "the same seed or checkpoint"
            )
