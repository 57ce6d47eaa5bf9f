"""Keep every write to the residual stream inside the subspace, so that boundaries lose nothing.

Around each optimizer step, for output matrices W (attention output, feed-forward down), their
biases, and embedding rows:
1. Gradients are projected: P g of matrices [D, in], g P of rows [V, D]. Do it before the gradient
   norm is taken and clipped (`project_gradients`); a repetition changes nothing.
2. The optimizer steps. Adam is element-wise, so its update leaves the subspace again.
3. Weights are projected: W <- P W; rows E <- T_perp + (E - T_perp) P, whose fixed part T_perp
   boundaries don't carry (`thinwire.pipeline.tables`).

Legend: `D` width of the residual stream, `V` vocabulary, P the projection on the subspace.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.pipeline.basis import Basis

__all__ = ["WRITES", "Constraint", "find_writes"]

# Weights that write into the residual stream, by the names that common models give them.
WRITES = (
    "*.wo.weight",
    "*.w2.weight",
    "*.w2",
    "*.o_proj.weight",
    "*.down_proj.weight",
    "*.c_proj.weight",
    "*.out_proj.weight",
)


class Constraint:
    """Project chosen parameters and their gradients around optimizer steps.

    Args:
        basis: the subspace.
        writes: output matrices [D, in] (or stacked [E, D, in]) and output biases [D], by name.
        rows: embedding rows [V, D] by name, each with its fixed part T_perp [V, D].

    Example:
        >>> handle = stage.constraint.attach(optimizer)
        >>> loss.backward()
        >>> stage.constraint.project_gradients()  # before the norm
        >>> torch.nn.utils.clip_grad_norm_(params, 1.0)
        >>> optimizer.step()  # projects weights afterwards
    """

    def __init__(
        self,
        basis: Basis,
        writes: Mapping[str, nn.Parameter],
        rows: Mapping[str, tuple[nn.Parameter, Tensor]] | None = None,
    ) -> None:
        self.basis, self.writes, self.rows = basis, dict(writes), dict(rows or {})
        for name, p in self.writes.items():
            _plain(p, name)
        for name, (p, fixed) in self.rows.items():
            _own_rows(p, fixed, name)

    @property
    def names(self) -> list[str]:
        """Return the constrained parameters' names."""
        return [*self.writes, *self.rows]

    @torch.no_grad()
    def project(self) -> None:
        """Put the weights into the subspace; frozen ones too."""
        for name, p in self.writes.items():
            w = _plain(p, name)
            w.copy_(self.basis.keep_columns(w))
        for name, (p, fixed) in self.rows.items():
            rows, own = _own_rows(p, fixed, name)
            rows.copy_(own + self.basis.keep_rows(rows - own))

    @torch.no_grad()
    def project_gradients(self) -> None:
        """Put the gradients into the subspace: call it after backward, before clipping."""
        for name, p in self.writes.items():
            if p.grad is not None:
                g = _plain(p.grad, name)
                g.copy_(self.basis.keep_columns(g))
        for name, (p, fixed) in self.rows.items():
            if p.grad is not None:
                g, _ = _own_rows(p.grad, fixed, name)
                g.copy_(self.basis.keep_rows(g))

    @torch.no_grad()
    def anchor(self, name: str, weight: Tensor) -> Tensor:
        """Return where a projected start from `weight` lies: what deltas are measured against.

        Output matrices give P W, embedding rows T_perp + (E - T_perp) P, bit for bit what `project`
        makes of them. Other names give the weight back.
        """
        if name in self.writes:
            return self.basis.keep_columns(weight).to(weight.dtype)
        if name in self.rows:
            fixed = self.rows[name][1]
            return (fixed + self.basis.keep_rows(weight - fixed)).to(weight.dtype)
        return weight

    def attach(self, optimizer: Optimizer) -> "Attached":
        """Project gradients before each of the optimizer's steps, weights after it."""

        def before(*_: Any) -> None:
            self.project_gradients()

        def after(*_: Any) -> None:
            self.project()

        return Attached(
            [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        )

    @torch.no_grad()
    def leaked(self) -> float:
        """Return the largest share of a constrained matrix's norm that lies off the subspace."""
        shares = [0.0]
        for name, p in self.writes.items():
            w = _plain(p, name).float()
            norm = w.norm().item()
            if norm > 0:
                shares.append((w - self.basis.keep_columns(w)).norm().item() / norm)
        return max(shares)


class Attached:
    """What `Constraint.attach` hooked on; `remove` takes it off."""

    def __init__(self, hooks: Iterable[Any]) -> None:
        self._hooks = list(hooks)

    def remove(self) -> None:
        """Stop projecting."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def find_writes(
    module: nn.Module, dim: int, patterns: Iterable[str] = WRITES
) -> dict[str, nn.Parameter]:
    """Return the module's parameters that match a pattern, and the biases beside them, by name.

    Raises:
        ConfigError: none matches, or one that matches doesn't write `dim` channels.
    """
    params = dict(module.named_parameters())
    patterns = tuple(patterns)
    found: dict[str, nn.Parameter] = {}
    for name, p in params.items():
        if not any(fnmatchcase(f".{name}", pattern) for pattern in patterns):
            continue
        if p.ndim < 2 or p.shape[-2] != dim:
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(p.shape)} matches writes but does not write "
                f"the {dim} channels of the residual stream ([out, in] = [{dim}, ...]): narrow "
                "writes=, or give the basis the model's width"
            )
        found[name] = p
        bias = f"{name.removesuffix('.weight')}.bias"
        if name.endswith(".weight") and bias in params:
            found[bias] = params[bias]
    if not found:
        raise ConfigError(
            f"no parameter matches writes={', '.join(patterns)}: name the matrices that write into "
            "the residual stream (attention output, feed-forward down)"
        )
    return found


def _plain(p: Tensor, name: str) -> Tensor:
    """Return the tensor itself, or the local part of one that is cut over its inputs at most."""
    if isinstance(p, DTensor):
        for axis, placement in enumerate(p.placements):
            # By dimension: torch's strided shards (FSDP2 over tensor parallel) are no plain ones.
            whole = placement.is_replicate() or getattr(placement, "dim", None) == p.ndim - 1
            if p.device_mesh.size(axis) > 1 and not (whole and p.ndim > 1):
                raise ConfigError(
                    f"parameter {name!r} is cut over {p.device_mesh.size(axis)} ranks as "
                    f"{placement}: a constrained pipeline stage needs all rows of output matrices "
                    "on a rank: shard them over their last dimension, or use mode='lossy'"
                )
        return p.to_local().detach()
    plain = p.detach()
    if type(plain) is not Tensor:
        raise ConfigError(
            f"parameter {name!r} is stored as {type(plain).__name__}: constrained pipeline stages "
            "need plain weights"
        )
    return plain


def _own_rows(p: Tensor, fixed: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the rows [V, D] that this rank holds, FSDP2's shard say, and their fixed part."""
    if not isinstance(p, DTensor):
        return _plain(p, name), fixed
    start, end = 0, fixed.shape[0]
    for axis, placement in enumerate(p.placements):
        ranks = p.device_mesh.size(axis)
        if ranks == 1 or placement.is_replicate():
            continue
        if not placement.is_shard(0):
            raise ConfigError(
                f"embedding rows {name!r} are cut over {ranks} ranks as {placement}: a constrained "
                "pipeline stage needs whole rows"
            )
        size = -(-(end - start) // ranks)  # as torch.chunk cuts
        start = min(end, start + size * p.device_mesh.get_local_rank(axis))
        end = min(end, start + size)
    return p.to_local().detach(), fixed[start:end]
