"""What `attach` returns: the run's precision, its epoch of weights, its state.

The *epoch* counts states of the weights: it advances with every optimizer step, load or explicit
refresh, on all ranks alike. Encoded and kept messages belong to one epoch.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from thinwire import _compat
from thinwire.aquavit.difference import DifferenceGather
from thinwire.aquavit.gather import WeightGather
from thinwire.aquavit.reduce import GradientReduce
from thinwire.aquavit.schedule import Difference, Level, Schedule, Static
from thinwire.aquavit.segments import recodes
from thinwire.codecs import Blockwise, Codec
from thinwire.comm.ledger import Ledger
from thinwire.errors import CheckpointError, ConfigError
from thinwire.kernels.random import RandomKey, tensor_id

__all__ = ["KEEP_WIRE", "Handle", "LevelFor"]

KEEP_WIRE = ("none", "forward", "accumulate")
LevelFor = Callable[[int, str], tuple[int, int] | None]


class Handle:
    """Follow the optimizer, say which precision each gather uses; returned by `attach`.

    The handle counts a step whenever an optimizer that holds the model's first quantized parameter
    has stepped (a step that a gradient scaler skips is not counted); `set_step` overrides it.

    Attributes:
        step: optimizer steps taken.
        epoch: states of the weights seen.
        trains: whether the forward under way records gradients; one that does not has no backward
            that would use a kept wire.
        stores: whether some weights are stored quantized.
    """

    def __init__(
        self,
        *,
        schedule: Schedule | Static | Difference | None,
        ledger: Ledger | None,
        keep_wire: str,
        gradients: Codec | None,
        error_feedback: bool,
        source: str,
        layout: str,
        meta: str,
        nonfinite: str,
        level_for: LevelFor | None,
        rounding: str = "nearest",
        seed: int = 0,
    ):
        self.schedule = schedule
        self.ledger = ledger
        self.keep_wire = keep_wire
        self.gradients = gradients
        self.error_feedback = error_feedback
        self.source = source
        self.nonfinite = nonfinite
        self.step = 0
        self.epoch = 0
        self.trains = True
        self.stores = False
        self.gathers: dict[str, WeightGather | DifferenceGather] = {}
        self.reduces: dict[str, GradientReduce] = {}
        self._layout, self._meta = layout, meta
        self._rounding, self._seed = rounding, seed
        self._level_for = level_for
        self._index = -1
        self._module_bpw: dict[str, float] = {}
        self._codecs: dict[tuple[int, int], Blockwise] = {}
        self._full_precision = False
        self._set_index()

    # -- precision ------------------------------------------------------------------------------

    @property
    def level(self) -> Level | None:
        """Return the level in force, None without a schedule of levels."""
        return self.schedule.grid[self._index] if isinstance(self.schedule, Schedule) else None

    def codec_for(self, module_name: str) -> Codec | None:
        """Return how a module's quantized weights travel now; None sends them raw."""
        if self.schedule is None or self._full_precision:
            return None
        if not isinstance(self.schedule, Schedule):
            return self.schedule.codec
        level = self.schedule.grid[self._index]
        pair = (level.bits, level.block_size)
        if self._level_for is not None:
            pair = self._level_for(self.step, module_name) or pair
            self._hold_monotone(module_name, Level(*pair).bpw)
        if pair not in self._codecs:
            codec = self.schedule.codec(Level(*pair), self._layout, self._meta)
            self._codecs[pair] = replace(codec, rounding=self._rounding)
        return self._codecs[pair]

    def keyed(self, codec: Codec, name: str, offset: int) -> Codec:
        """Return the codec with the random numbers of this step, for stochastic rounding.

        Args:
            codec: what `codec_for` returned.
            name: full parameter name.
            offset: flat index of the shard's first element in the padded parameter.
        """
        if not isinstance(codec, Blockwise) or codec.rounding != "stochastic":
            return codec
        key = RandomKey(run_key=self._seed, tensor=tensor_id(name), step=self.step, offset=offset)
        return replace(codec, key=key)

    def _hold_monotone(self, module_name: str, bpw: float) -> None:
        assert isinstance(self.schedule, Schedule)
        before = self._module_bpw.get(module_name, 0.0)
        if self.schedule.monotone and bpw < before:
            raise ConfigError(
                f"level_for lowered module {module_name!r} from {before} to {bpw} bits per weight "
                f"at step {self.step}; precision ascends (Schedule(monotone=False) lifts this)"
            )
        self._module_bpw[module_name] = bpw

    def _set_index(self) -> None:
        if isinstance(self.schedule, Schedule):
            self._index = self.schedule.index(self.step, self._index)

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Gather unquantized weights inside the block, on every rank (to evaluate the masters)."""
        self._full_precision = True
        try:
            yield
        finally:
            self._full_precision = False

    # -- steps ----------------------------------------------------------------------------------

    def set_step(self, step: int) -> None:
        """Set the optimizer step by hand, on every rank alike."""
        self.step = step
        self._set_index()
        self.refresh()

    def refresh(self) -> None:
        """Forget encoded and kept messages: the weights changed, on every rank alike."""
        self.epoch += 1
        for gather in self.gathers.values():
            gather.drop()

    def follow(self, param: Tensor) -> None:
        """Count the steps of whichever optimizer holds `param`."""
        _follow(param, self)

    # -- what users see -------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return what belongs into a line of metrics: bits per weight and kept memory."""
        out: dict[str, float] = {}
        if isinstance(self.schedule, Schedule):
            out["bits"] = self.schedule.grid[self._index].bpw
        elif self.schedule is not None and self.schedule.bpw is not None:
            out["bits"] = self.schedule.bpw
        if self.keep_wire != "none" or isinstance(self.schedule, Difference):
            out["kept_wire_bytes"] = sum(g.kept_bytes for g in self.gathers.values())
        return out

    @torch.no_grad()
    def layer_errors(self) -> dict[str, float]:
        """Return |w^ - w|^2 / |w|^2 per quantized parameter over its shard group, at this level.

        A collective: every rank of the shard group must call it.
        """
        local: dict[str, Tensor] = {}
        for module_name, gather in self.gathers.items():
            codec = self.codec_for(module_name)
            for segment in gather.segments if codec is not None else ():
                if segment.reason is None and not segment.stored_nbytes:
                    w = _compat.fsdp_param_data(segment.param)
                elif segment.stored_nbytes and recodes(segment, codec):
                    w = segment.shard.values().view(-1)
                else:
                    continue
                local[segment.name] = _square_sums(w, codec)  # type: ignore[arg-type]
        if not local:
            return {}
        sums = torch.stack(list(local.values()))
        dist.all_reduce(sums, group=self._group)
        if self.ledger is not None:
            nbytes = sums.numel() * sums.itemsize
            self.ledger.book("scalars", dense_bytes=nbytes, wire_bytes=nbytes)
        return {name: (e / w).item() for name, (e, w) in zip(local, sums, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return what resume needs: schedule, step, running level, and this rank's residuals.

        Residuals differ between ranks, so their keys name the rank; a checkpoint that has them
        resumes on the same number of ranks.
        """
        schedule = asdict(self.schedule) if isinstance(self.schedule, Schedule) else None
        state: dict[str, Any] = {"schedule": schedule, "step": self.step, "index": self._index}
        residuals = {n: r.residual for n, r in self.reduces.items() if r.residual is not None}
        if residuals:
            state["residuals"] = {f"rank{dist.get_rank()}": residuals}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved step and level; `total_steps` may have changed, no other constant.

        Raises:
            CheckpointError: the saved schedule has other constants than this run's.
        """
        saved, own = state["schedule"], self.state_dict()["schedule"]
        ignore = {"total_steps"}
        differ = [
            key
            for key in (own or {})
            if key not in ignore and _plain(own[key]) != _plain((saved or {}).get(key))
        ]
        if (saved is None) != (own is None) or differ:
            raise CheckpointError(
                "the checkpoint was written with another precision schedule "
                f"(differs in: {', '.join(differ) or 'kind'}): use the same one, or start anew"
            )
        for name, residual in state.get("residuals", {}).get(f"rank{dist.get_rank()}", {}).items():
            reduce = self.reduces[name]
            if reduce.residual is None or reduce.residual.shape != residual.shape:
                raise CheckpointError(
                    f"the gradient residual of module {name!r} was saved on another number of "
                    "ranks: resume on that number, or without error feedback"
                )
            reduce.residual.copy_(residual)
        self._index = state["index"]
        self.set_step(state["step"])

    def bind_group(self, group: dist.ProcessGroup | None) -> None:
        """Set the group over which `layer_errors` sums."""
        self._group = group


def _plain(value: Any) -> Any:
    """Return sequences as nested lists: what a checkpoint gives back for tuples."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _square_sums(w: Tensor, codec: Codec) -> Tensor:
    """Return [|w^ - w|^2, |w|^2] in fp64."""
    decoded = codec.decode(codec.encode(w), w.numel(), torch.float32)
    error = (decoded.double() - w.double()).square().sum()
    return torch.stack([error, w.double().square().sum()])


# One global hook for all handles of the process, registered at the first attach and never removed:
# torch iterates over its hooks during a step, so the set must not change under a running thread.
# Keyed by id, since tensors compare element by element; a dead entry is told by its reference.
_followers: "dict[int, tuple[weakref.ref[Tensor], weakref.ref[Handle]]]" = {}
_followers_lock = threading.Lock()
_hooked = False


def _follow(param: Tensor, handle: Handle) -> None:
    global _hooked
    with _followers_lock:
        for key in [k for k, (p, h) in _followers.items() if p() is None or h() is None]:
            del _followers[key]
        _followers[id(param)] = (weakref.ref(param), weakref.ref(handle))
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = optimizer.param_groups
    # Steps at rate 0 change no weight and are not counted: checkpoint libraries make one to fill
    # an optimizer's empty state.
    if all(float(group.get("lr", 1.0)) == 0.0 for group in groups):
        return
    for param in (p for group in groups for p in group["params"]):
        refs = _followers.get(id(param))
        handle = refs[1]() if refs is not None and refs[0]() is param else None
        if handle is not None:
            handle.set_step(handle.step + 1)
