"""Find what breaks the constraint at set-up, by running a stage on a few tokens.

The input lies in the subspace; so must each branch's output. One-dimensional weights (gains) are
scaled at random for the run: a gain of ones hides what training would do to it.

Legend: `T` tokens, `D` width; X0 the fixed part of the residual stream.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from thinwire.errors import ConfigError
from thinwire.pipeline.basis import Basis, wide
from thinwire.pipeline.constraint import Constraint
from thinwire.pipeline.tables import FixedRows

__all__ = ["probe"]

_TOKENS = 4
_ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3}


@torch.no_grad()
def probe(
    module: nn.Module,
    constraint: Constraint,
    tables: FixedRows,
    *,
    first: bool,
    where: str,
) -> None:
    """Run `module` once and raise if its output leaves the subspace.

    Args:
        module: stage that maps token ids (first) or activations [1, T, D] to activations.
        constraint: projects what the stage writes.
        tables: X0 rows.
        first: the stage takes token ids.
        where: the stage in words.

    Raises:
        ConfigError: naming the module that takes its input out of the subspace, or the block.
    """
    params = dict(module.named_parameters())
    if any(isinstance(p, DTensor) for p in params.values()):
        return  # sharded: the run-time health check stands alone
    basis = constraint.basis
    device = tables.tokens.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(tables.vocab_size, (1, _TOKENS), generator=generator).to(device)
    fixed = tables(ids)
    x = fixed
    if not first:
        z = torch.randn(1, _TOKENS, basis.rank, generator=generator, dtype=torch.float64)
        x = fixed + basis.expand(z.to(fixed)) * fixed.norm() / (z.norm() + 1e-12).to(fixed)
    dtype = next(iter(params.values())).dtype
    allowed = _ALLOWED.get(dtype, 2e-2)
    moved = {
        name: p * (0.5 + torch.rand(p.shape, generator=generator).to(p))
        for name, p in params.items()
        if p.ndim == 1 and name not in constraint.writes
    }
    culprits: list[str] = []
    hooks = [
        m.register_forward_hook(_watch(name, basis, allowed, culprits))
        for name, m in module.named_modules()
        if name
    ]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            out = functional_call(module, moved, (ids if first else x.to(dtype),))
    finally:
        for hook in hooks:
            hook.remove()
    if out.shape == fixed.shape and _off(wide(out) - fixed, basis) <= allowed:
        return
    reason = (
        f"module {culprits[0]!r} takes what a constrained matrix wrote out of the subspace (a gain "
        "or mean behind the write, a layer scale, or dropout)"
        if culprits
        else "a matrix that writes into the residual stream is missing in writes="
        f" (constrained: {', '.join(constraint.names)})"
    )
    raise ConfigError(f"{where} leaves the subspace: {reason}; change it, or use mode='lossy'")


def _off(x: Tensor, basis: Basis) -> float:
    """Return the share of x's norm off the subspace (0 for zeros)."""
    x = wide(x)
    norm = x.norm().item()
    return (x - basis.keep_rows(x)).norm().item() / norm if norm > 0 else 0.0


def _watch(name: str, basis: Basis, allowed: float, culprits: list[str]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        tensors = [args[0] if args else None, out]
        if not all(
            isinstance(t, Tensor) and t.is_floating_point() and t.shape[-1] == basis.dim
            for t in tensors
        ):
            return
        before, after = (_off(t, basis) for t in tensors)
        # Modules end innermost first: the first one found is the closest to the cause.
        if before <= allowed < after:
            culprits.append(name)

    return hook
