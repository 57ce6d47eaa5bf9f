"""Dense baselines of the outer loop: DiLoCo, and the plain average of local SGD."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import _compat, comm
from thinwire.codecs import Codec
from thinwire.comm import Ledger
from thinwire.errors import CheckpointError, ConfigError, ContractError, NonFiniteError
from thinwire.sparseloco.outer import OuterLoop
from thinwire.sparseloco.partition import Delta, fingerprint
from thinwire.sparseloco.rounds import Outcome, book_hashes
from thinwire.sparseloco.transport import gather_hashes

__all__ = ["DiLoCo", "Nesterov"]


class Nesterov:
    """SGD on the shared weights, with Nesterov momentum.

        b = momentum*b + d;  theta = theta - alpha*(d + momentum*b)

    With momentum 0 and alpha 1 theta becomes the average of the replicas' weights.

    Args:
        theta: initial weights, fp32 by name.
        alpha: outer learning rate.
        momentum: in [0, 1).

    Raises:
        ConfigError: a rate or momentum out of range.
    """

    def __init__(self, theta: dict[str, Tensor], alpha: float, momentum: float) -> None:
        if not alpha > 0 or not 0.0 <= momentum < 1.0:
            raise ConfigError(
                f"alpha must be positive and momentum in [0, 1), got {alpha!r} and {momentum!r}"
            )
        self.theta, self.alpha, self.momentum = theta, alpha, momentum
        self.momenta = {n: torch.zeros_like(x) for n, x in theta.items()} if momentum else {}

    @torch.no_grad()
    def step(self, mean: dict[str, Tensor]) -> None:
        """Move theta by the replicas' mean pseudo-gradient, fp32 by name."""
        for name, d in mean.items():
            step = d
            if self.momentum:
                b = self.momenta[name]
                b.mul_(self.momentum).add_(d)
                step = d + self.momentum * b
            self.theta[name] = self.theta[name] - self.alpha * step


class DiLoCo(OuterLoop):
    """Average what replicas changed in `sync_every` steps, dense, with an outer Nesterov momentum.

    Args:
        model, inner_optimizer, sync_every, group, inner_group, ledger, device: as for `SparseLoCo`.
        alpha: outer learning rate (0.7 and 0.6 are in use); 1 with momentum 0 is local SGD's
            plain average.
        momentum: of the outer Nesterov SGD.
        codec: how pseudo-gradients travel, `Blockwise(bits=8, ...)` say; None: fp32.

    Raises:
        ConfigError, ContractError: as `SparseLoCo`.

    A value that is not finite raises `NonFiniteError` on all replicas.

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
        Models", arXiv 2311.08105.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        inner_optimizer: Optimizer | None,
        *,
        sync_every: int = 30,
        alpha: float = 0.7,
        momentum: float = 0.9,
        codec: Codec | None = None,
        group: dist.ProcessGroup | None = None,
        inner_group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            model, inner_optimizer, sync_every=sync_every, inner_group=inner_group, ledger=ledger
        )
        if group is None and self.inner.size > 1:
            raise ConfigError("with several ranks per replica, pass group: one rank of each")
        whole = self.initial()

        def build() -> None:
            theta = {n: x.to(device) for n, x in sorted(whole.items(), key=lambda i: i[0].encode())}
            rule = Nesterov(theta, alpha, momentum)
            self.core = _DenseCore(rule, codec, group or _compat.default_group(), ledger)

        self.inner.lead(build)


class _DenseCore:
    """One all-reduce per tensor, then the outer step."""

    def __init__(
        self, rule: Nesterov, codec: Codec | None, group: dist.ProcessGroup, ledger: Ledger | None
    ) -> None:
        self.rule, self.codec, self.group, self.ledger = rule, codec, group, ledger
        self.round = 0
        if codec is not None and ledger is not None:
            ledger.expect("outer", num_ranks=group.size())
        device = next(iter(rule.theta.values())).device
        digest = fingerprint(rule.theta)
        hashes = gather_hashes(digest, group, device)
        book_hashes(ledger, group.size())
        others = [r for r, h in enumerate(hashes) if h != digest]
        if others:
            raise ContractError(
                f"replicas {others} hold other weights than replica {group.rank()}: start all from "
                "the same seed or checkpoint"
            )

    @property
    def theta(self) -> dict[str, Tensor]:
        return self.rule.theta

    def sync(self, delta: Delta, tokens: int, abstain: str) -> Outcome:
        if abstain:
            raise ConfigError("a dense average has no place for a replica that abstains")
        mean: dict[str, Tensor] = {}
        for name, x in self.theta.items():
            d = delta(name).to(x.device)
            total = comm.all_reduce(
                d, self.codec, group=self.group, link="outer", ledger=self.ledger, min_bytes=0
            )
            mean[name] = total / self.group.size()
            if not bool(torch.isfinite(mean[name]).all()):
                raise NonFiniteError(
                    f"the mean pseudo-gradient of {name!r} is not finite in round {self.round}: a "
                    "replica diverged; all replicas raise"
                )
        self.rule.step(mean)
        self.round += 1
        return Outcome(
            round=self.round - 1,
            committed=True,
            accepted=tuple(range(self.group.size())),
            own="sent",
        )

    def due(self, elapsed_s: float) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "theta": {n: x.clone() for n, x in self.theta.items()},
            "momenta": {n: x.clone() for n, x in self.rule.momenta.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        state = states[0]
        for kind, held in (("theta", self.rule.theta), ("momenta", self.rule.momenta)):
            if set(held) != set(state[kind]):
                raise CheckpointError(f"the saved {kind} are of other tensors or another momentum")
            for name, x in held.items():
                x.copy_(state[kind][name])
        self.round = state["round"]
