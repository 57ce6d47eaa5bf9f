"""The outer loop around any inner optimizer: count steps, close rounds, hand weights back."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.comm import Ledger
from thinwire.errors import CheckpointError, ConfigError, ThinwireError
from thinwire.sparseloco.partition import Delta
from thinwire.sparseloco.replica import Inner
from thinwire.sparseloco.rounds import Outcome

__all__ = ["Core", "OuterLoop"]


class Core(Protocol):
    """The shared weights and how replicas move them; lives on each replica's leader."""

    @property
    def theta(self) -> dict[str, Tensor]:
        """Return the shared weights, fp32 by name."""
        ...

    def sync(self, delta: Delta, tokens: int, abstain: str) -> Outcome:
        """Take part in a round; collective over the replicas' leaders."""
        ...

    def due(self, elapsed_s: float) -> bool:
        """Return whether the round should close `elapsed_s` after it began, full or not."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what resume needs."""
        ...

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from the states of all replicas, or from this replica's alone."""
        ...


class OuterLoop:
    """Let a replica train alone for `sync_every` steps, then agree with the others.

    Each `step()` of the inner optimizer counts; the last one of a round ends it: weights become
    the shared ones, the optimizer's own state stays. `SparseLoCo` and `DiLoCo` differ in how the
    shared weights move.

    Args:
        model: a module, or names and parameters.
        inner_optimizer: whose steps are counted; None: call `step()` of this object yourself.
        sync_every: inner steps of a round.
        inner_group: ranks of this replica; None: one rank, or the mesh of the parameters.
        ledger: books every byte.

    Attributes:
        steps: inner steps of the round that is open.
        progress: inner steps since the last commit.
        tokens: tokens counted since then (`count`); without a count, a step weighs one.
        last: how the last round ended, None before the first.
        rounds: how many rounds were committed and aborted, and how many were committed without
            this replica.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        inner_optimizer: Optimizer | None,
        *,
        sync_every: int,
        inner_group: dist.ProcessGroup | None,
        ledger: Ledger | None,
    ) -> None:
        if sync_every < 1:
            raise ConfigError(f"sync_every must be at least 1, got {sync_every}")
        named = model.named_parameters() if isinstance(model, nn.Module) else model
        self.inner = Inner(named, inner_group, ledger)
        self.inner_optimizer, self.sync_every, self.ledger = inner_optimizer, sync_every, ledger
        self.core: Core | None = None
        self.steps = self.progress = self.tokens = 0
        self.rounds = {"committed": 0, "aborted": 0, "left_out": 0}
        self.last: Outcome | None = None
        self._began_s = time.monotonic()
        self._watches_clock = False
        self._handle = None
        if inner_optimizer is not None:
            _check_covers(inner_optimizer, self.inner)
            self._handle = inner_optimizer.register_step_post_hook(self._stepped)

    def initial(self) -> dict[str, Tensor]:
        """Return whole copies of the parameters on the leader, nothing elsewhere; collective."""
        whole = {}
        for name in self.inner.params:
            full = self.inner.whole(name)
            if self.inner.is_leader:
                whole[name] = full.float() if full.dtype != torch.float32 else full.clone()
        return whole

    def count(self, tokens: int) -> None:
        """Add tokens that this replica processed, for its weight in the mean."""
        self.tokens += tokens

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_probe(optimizer):
            self.step()

    def step(self) -> None:
        """Count an inner step; end the round when it is full or its deadline has passed."""
        self.steps += 1
        self.progress += 1
        if self._is_due():
            self.end_round()

    def _is_due(self) -> bool:
        if self.steps >= self.sync_every:
            return True
        if not self._watches_clock:
            return False
        core, elapsed = self.core, time.monotonic() - self._began_s
        return self.inner.lead(lambda: core is not None and core.due(elapsed))

    def begin_round(self) -> None:
        """Start counting anew; runs by itself at the end of a round."""
        self.steps = self.progress = self.tokens = 0
        self._began_s = time.monotonic()

    def end_round(self, *, abstain: str = "") -> Outcome:
        """Agree with the other replicas now; collective.

        After a commit, parameters hold the shared weights. After an abort they stay, and the next
        round's pseudo-gradient goes on against the same shared weights. A replica whose values were
        not finite starts again from the shared weights, its optimizer's moments at zero.

        Args:
            abstain: why this replica takes no part in the mean, or "".

        Raises:
            PeerError: a peer was lost; weights and state are as before the call.
            ContractError: replicas drifted apart; likewise.
        """
        outcome = self._sync(abstain)
        diverged = outcome.own.startswith("abstained") and not abstain
        if outcome.committed or diverged:
            self.inner.place(self.core.theta if self.core is not None else None)
        if diverged and self.inner_optimizer is not None:
            _zero_moments(self.inner_optimizer)
        self.last = outcome
        self.rounds["committed" if outcome.committed else "aborted"] += 1
        self.rounds["left_out"] += outcome.committed and outcome.own != "sent"
        if outcome.committed or diverged:
            self.begin_round()
        else:
            self.steps = 0  # progress and tokens go on: so does the pseudo-gradient
            self._began_s = time.monotonic()
        return outcome

    def _sync(self, abstain: str) -> Outcome:
        core, ungathered = self.core, _wire_order(self.inner.params)
        if core is None:
            for name in ungathered:
                self.inner.whole(name)
            return self.inner.lead(_unreachable)

        def delta(name: str) -> Tensor:
            ungathered.remove(name)
            local = self.inner.whole(name)
            start = self.inner.start(name, core.theta[name])
            return start.float() - local.to(start.device).float()

        def sync() -> Outcome:
            try:
                return core.sync(delta, self.tokens or self.progress, abstain)
            except ThinwireError:
                for name in ungathered:  # the replica's other ranks gather all of them
                    self.inner.whole(name)
                raise

        return self.inner.lead(sync)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Hold the shared weights in the parameters inside the block, as for evaluation.

        Collective over the inner group.
        """
        held = {name: _local(p).clone() for name, p in self.inner.params.items()}
        self.inner.place(None if self.core is None else self.core.theta)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.inner.params.items():
                    _local(p).copy_(held[name])

    def metrics(self) -> dict[str, Any]:
        """Return how the last round ended: who was in the mean and who was not, and bytes."""
        if self.last is None:
            return {}
        left_out = {str(r): why for r, why in self.last.reasons.items()}
        left_out |= {str(r): "abstained" for r in self.last.abstained}
        return {
            "round": self.last.round,
            "committed": self.last.committed,
            "why": self.last.why,
            "accepted": list(self.last.accepted),
            "left_out": left_out,
            "tokens": {str(r): n for r, n in self.last.tokens.items()},
            "sent_bytes": self.last.sent_bytes,
            "received_bytes": self.last.received_bytes,
        }

    def detach(self) -> None:
        """Stop following the inner optimizer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: counters, and on the leader the core's state.

        Model, inner optimizer, its schedule and the data's position are the caller's to save, on
        every replica: between rounds they differ.
        """
        return {
            "steps": self.steps,
            "progress": self.progress,
            "tokens": self.tokens,
            "rounds": dict(self.rounds),
            "sync_every": self.sync_every,
            "core": None if self.core is None else self.core.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue from `state_dict`.

        Args:
            state: what this rank saved; or a list of what all replicas' leaders saved, if the
                number of replicas has changed: residuals of replicas that are gone are added to
                those that stay (their sum is conserved), new replicas start with none.

        Raises:
            CheckpointError: of other tensors or settings.
        """
        states = state if isinstance(state, list) else [state]
        first = states[0]
        if first["sync_every"] != self.sync_every:
            raise CheckpointError(
                f"saved with sync_every {first['sync_every']}, this loop has {self.sync_every}"
            )
        if self.core is not None:
            self.core.load_state_dict([s["core"] for s in states if s["core"] is not None])
        self.steps, self.progress = first["steps"], first["progress"]
        self.tokens = first["tokens"]
        self.rounds = dict(first["rounds"])
        self._began_s = time.monotonic()


def _wire_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda n: n.encode())


def _unreachable() -> Outcome:
    raise AssertionError("only the leader runs this")


def _check_covers(optimizer: Optimizer, inner: Inner) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in inner.params.items() if id(p) not in stepped]
    if missing:
        raise ConfigError(
            f"the inner optimizer does not step {missing[0]!r} ({len(missing)} such parameters): "
            "give it the model's parameters, or freeze those it leaves out"
        )


def _local(p: Tensor) -> Tensor:
    data = p.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def _is_probe(optimizer: Optimizer) -> bool:
    """Tell the step by which torch's checkpoint tools make an optimizer create its state."""
    if any(float(group.get("lr", 1.0)) != 0.0 for group in optimizer.param_groups):
        return False
    grads = (p.grad for group in optimizer.param_groups for p in group["params"])
    return not any(bool(_local(g).any()) for g in grads if g is not None)


def _zero_moments(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                value.zero_()
