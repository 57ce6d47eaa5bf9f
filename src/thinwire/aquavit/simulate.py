"""Train one process with the weights that sharded ranks would compute with: for quality studies.

No byte travels. Every weight is cut into the shards that FSDP2 would give `num_ranks` ranks, each
is encoded and decoded as the gather would, and the result is what forward and backward see; the
gradient reaches the full-precision weight unchanged (straight-through), as under FSDP2. A run is
the one of `num_ranks` ranks up to the order of their gradients' sum.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.aquavit.handle import Handle
from thinwire.aquavit.schedule import Difference, Schedule, Static
from thinwire.aquavit.segments import Rules, reason_raw
from thinwire.codecs import Codec
from thinwire.errors import ConfigError

__all__ = ["SimulatedHandle", "simulate"]


class SimulatedHandle(Handle):
    """A `Handle` whose model gathers nothing."""

    def __init__(self, schedule: Schedule | Static | Difference, num_ranks: int):
        super().__init__(
            schedule=schedule,
            ledger=None,
            keep_wire="none",
            gradients=None,
            error_feedback=False,
            source="master",
            layout="split",
            meta="fp16",
            nonfinite="propagate",
            level_for=None,
        )
        self.num_ranks = num_ranks
        self.views: dict[str, _Decoded] = {}

    def layer_errors(self) -> dict[str, float]:
        """Return |w^ - w|^2 / |w|^2 per quantized parameter, at this level."""
        return {name: view.error() for name, view in self.views.items()}


def simulate(
    model: nn.Module,
    schedule: Schedule | Static | Difference,
    *,
    num_ranks: int,
    exclude: tuple[str, ...] = (),
    min_shard_numel: int = 4096,
) -> SimulatedHandle:
    """Let a plain model compute with the weights that `num_ranks` sharded ranks would gather.

    Quantized weights become parametrizations (`torch.nn.utils.parametrize`); the optimizer sees
    the full-precision originals, which stay the same objects.

    Args:
        model: a model on one rank, not sharded.
        schedule: as for `attach`.
        num_ranks: shards to cut every weight into, along dimension 0.
        exclude: as for `attach`.
        min_shard_numel: as for `attach`.

    Returns:
        A handle with the metrics and state of `attach`'s.

    Raises:
        ConfigError: nothing in the model qualifies, or a quantized weight is tied to another.
    """
    rules = Rules(exclude=exclude, min_shard_numel=min_shard_numel)
    handle = SimulatedHandle(schedule, num_ranks)
    seen: set[int] = set()
    for module_name, module in list(model.named_modules()):
        for leaf, param in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{leaf}" if module_name else leaf
            rows = -(-param.shape[0] // num_ranks) if param.dim() else 1
            shard_numel = rows * param[0].numel() if param.numel() else 0
            if reason_raw(rules, name, param.dim(), param.requires_grad, shard_numel):
                continue
            if id(param) in seen:
                raise ConfigError(f"weight {name!r} is tied to another: simulate untied models")
            seen.add(id(param))
            view = _Decoded(handle, module_name, param)
            handle.views[name] = view
            parametrize.register_parametrization(module, leaf, view, unsafe=True)
            if len(handle.views) == 1:
                handle.follow(module.parametrizations[leaf].original)
    if not handle.views:
        raise ConfigError("no parameter of the model qualifies for compression")
    return handle


class _StraightThrough(torch.autograd.Function):
    """Give `decoded` for a weight, and its gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, decoded: Tensor) -> Tensor:
        return decoded.view_as(decoded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Decoded(nn.Module):
    """Map a weight to what its ranks would decode, once per state of the weight."""

    def __init__(self, handle: SimulatedHandle, module_name: str, weight: Tensor):
        super().__init__()
        self._handle = handle
        self._module_name = module_name
        self._key: Any = None
        self._decoded = weight.detach()
        self._original = weight

    def forward(self, weight: Tensor) -> Tensor:
        """Return the decoded weight."""
        codec = self._handle.codec_for(self._module_name)
        if codec is None:
            return weight
        key = (codec, weight._version, self._handle.epoch)
        if key != self._key:
            self._decoded = self._round_trip(weight.detach(), codec)
            self._key = key
        return _StraightThrough.apply(weight, self._decoded)

    def _round_trip(self, weight: Tensor, codec: Codec) -> Tensor:
        base: Tensor | None = None
        if isinstance(self._handle.schedule, Difference):
            if self._key is None:  # the first gather is exact
                return weight.clone()
            base = self._decoded
            weight = weight - base
        rows = -(-weight.shape[0] // self._handle.num_ranks)
        parts = []
        for shard in weight.split(rows):
            padding = (rows - shard.shape[0]) * shard[0].numel()
            flat = nn.functional.pad(shard.reshape(-1), (0, padding))
            decoded = codec.decode(codec.encode(flat), flat.numel(), flat.dtype)
            parts.append(decoded[: shard.numel()].view_as(shard))
        total = torch.cat(parts)
        return total if base is None else base + total

    def error(self) -> float:
        """Return |w^ - w|^2 / |w|^2 of the last forward."""
        weight = self._original.detach().double()
        return ((self._decoded.double() - weight).square().sum() / weight.square().sum()).item()
