"""What EcoAdamW and EcoSGD have in common: the order of a step over quantized and plain weights.

One step:
1. All ranks of the group agree that every gradient is finite, or skip the step together.
2. Where a scale's block is spread over ranks, maxima of the unrounded new weights are combined.
3. Per tensor: the rule gives the unrounded new weights; they are rounded with scales of their own;
   the error goes into the momentum (or is dropped, or kept beside: the rival arms).
4. All ranks agree that no new weight was NaN or infinite; a tensor with one was left as it was.

Legend: `R C` matrix of a rank's piece of a tensor.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire import comm
from thinwire.comm import Ledger
from thinwire.eco.panels import step_in_panels_
from thinwire.eco.placement import Piece, find_piece, local_like, plain
from thinwire.eco.rounding import fused_step_, magnitudes
from thinwire.eco.state import StateForm
from thinwire.eco.tensor import QuantizedTensor, local_quantized
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError
from thinwire.kernels.eco import Step, reference
from thinwire.kernels.finite import all_finite
from thinwire.kernels.random import RandomKey, tensor_id

__all__ = ["EcoOptimizer", "optimizer_nbytes"]

# Warm-ups from 1e-5 of the peak multiply a carried error by more than this.
MAX_LR_JUMP = 10.0


@dataclass(frozen=True)
class _Slot:
    """A quantized parameter's facts that no step changes."""

    param: nn.Parameter
    name: str
    piece: Piece
    lead_dims: int
    tensor: int


class EcoOptimizer(Optimizer):
    """Base of the optimizers for quantized weights; use `EcoAdamW` or `EcoSGD`.

    Attributes:
        skipped_steps: steps that were skipped since a gradient wasn't finite.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        forms: Iterable[StateForm],
        eco: bool,
        kahan: bool,
        rounding: str,
        inject_lr: str,
        decay_factor: bool,
        run_key: int,
        nonfinite: str,
        group: dist.ProcessGroup | None,
        ledger: Ledger | None,
        fused_backward: bool,
    ) -> None:
        for name, value, allowed in (
            ("rounding", rounding, ("sr", "rtn")),
            ("inject_lr", inject_lr, ("current", "next")),
            ("nonfinite", nonfinite, ("skip", "raise")),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        # run_key lies in the groups so that state_dict carries it.
        super().__init__(params, defaults | {"run_key": run_key, "next_lr": None, "last_lr": 0.0})
        self.forms = tuple(forms)
        self.eco, self.kahan = eco, kahan
        self.rounding, self.inject_lr = rounding, inject_lr
        self.decay_factor, self.nonfinite = decay_factor, nonfinite
        self.fused_backward = fused_backward
        self.keeps_errors = any(form.key == "error" for form in self.forms)
        self.skipped_steps = 0
        self._group, self._ledger = group, ledger
        self._slots: dict[nn.Parameter, _Slot] = {}
        self._broken: set[str] = set()
        self._warned = False
        for param in (p for g in self.param_groups for p in g["params"]):
            self._create_state(param)
        self._check_slots()
        if fused_backward:
            for g in self.param_groups:
                for param in g["params"]:
                    if param.requires_grad:
                        param.register_post_accumulate_grad_hook(self._hook(g))

    # -- rules: what AdamW and SGD differ in ----------------------------------------------------

    def numbers(self, group: dict[str, Any], step: int) -> Step:
        """Return the constants of a quantized tensor's step."""
        raise NotImplementedError

    def inject(
        self, m_RC: Tensor, error_RC: Tensor, den: Tensor | float, h: Step, slot: "_Slot"
    ) -> Tensor:
        """Return the momentum that carries the rounding error."""
        return reference.inject(m_RC, error_RC, den, h)

    def plain_step(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Step parameters that aren't quantized."""
        raise NotImplementedError

    def plain_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the initial state of a parameter that isn't quantized."""
        raise NotImplementedError

    # -- set-up ---------------------------------------------------------------------------------

    def _create_state(self, param: nn.Parameter) -> None:
        quantized = local_quantized(param)
        if quantized is None:
            self.state[param] = self.plain_state(param)
            return
        stored = quantized.stored
        if quantized.master is not None and (self.eco or self.kahan):
            raise ConfigError(
                f"parameter {stored.name!r} keeps a master copy, so nothing is left to inject: "
                "pass eco=False, or quantize_ without master"
            )
        piece = find_piece(param, stored.lead_dims, stored.format, stored.name)
        self._slots[param] = _Slot(
            param, stored.name, piece, stored.lead_dims, tensor_id(stored.name)
        )
        state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
        for form in self.forms:
            form.create(state, param, piece, stored.lead_dims)
        if self.kahan:
            lost = torch.zeros(tuple(quantized.shape), dtype=torch.bfloat16, device=param.device)
            state["compensation"] = local_like(param, lost)
        self.state[param] = state

    def _check_slots(self) -> None:
        if not self._slots:
            raise ConfigError(
                "none of the parameters is quantized: call thinwire.eco.quantize_ on the model "
                "before building the optimizer"
            )
        seen: dict[int, str] = {}
        for slot in self._slots.values():
            other = seen.setdefault(slot.tensor, slot.name)
            if other != slot.name:
                raise ConfigError(
                    f"parameters {other!r} and {slot.name!r} would draw the same random numbers"
                )

    # -- stepping -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step; with `fused_backward`, end the step that backward did.

        Raises:
            NonFiniteError: on all ranks: a new weight was NaN or infinite, or a gradient was and
                `nonfinite="raise"` or `fused_backward` leaves no way to skip.
            ConfigError: `inject_lr="next"` without `next_lr` in a parameter group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.fused_backward:
            self._check_next_lr()
            work = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
            if not self._gradients_are_finite([p for p, _ in work]):
                return loss
            self._step_all(work)
        self._raise_if_broken()
        for group in self.param_groups:
            self._note_lr(group)
        return loss

    def _step_all(self, work: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        maxima = self._common_maxima(work)
        for param, group in work:
            if param in self._slots:
                self._step_quantized(self._slots[param], group, maxima.get(param))
        for group in self.param_groups:
            rest = [p for p, g in work if g is group and p not in self._slots]
            if rest:
                self.plain_step(rest, group)

    def _hook(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def step_now(param: Tensor) -> None:
            assert isinstance(param, nn.Parameter)
            self._check_next_lr()
            name = self._slots[param].name if param in self._slots else "of full precision"
            if param.grad is not None and not all_finite(plain(param.grad)):
                self._broken.add(f"the gradient of {name}")
            elif param.grad is not None:
                self._step_all([(param, group)])
            param.grad = None

        return step_now

    def _step_quantized(
        self, slot: _Slot, group: dict[str, Any], magnitude_S: Tensor | None
    ) -> None:
        quantized, state = local_quantized(slot.param), self.state[slot.param]
        assert quantized is not None
        state["step"] += 1
        h = self.numbers(group, int(state["step"]))
        key = slot.piece.key(group["run_key"], slot.tensor, int(state["step"]))
        rounding_key = key if self.rounding == "sr" else None
        if self._fusible(quantized, h):
            g = plain(slot.param.grad).contiguous()  # type: ignore[arg-type]
            args = h, slot.piece, rounding_key, magnitude_S
            if self.forms[0].dtype == "8bit" and g.numel():
                names = slot.name, rounding_key.run_key if rounding_key else 0
                left = step_in_panels_(quantized, g, self.forms, state, names, *args)
            else:
                moments = [plain(state[form.key]) for form in self.forms]
                left = fused_step_(quantized, g, moments, *args)
        else:
            left = self._plain_rule(slot, quantized, h, rounding_key, magnitude_S)
        if left:
            self._broken.add(f"the new value of {slot.name}")

    def _fusible(self, quantized: QuantizedTensor, h: Step) -> bool:
        """Return whether the one-pass kernel covers this arm and format."""
        plain_arm = quantized.master is None and not self.kahan and h.lr != 0.0
        return plain_arm and not self.keeps_errors and quantized.stored.format.has_scales

    def _plain_rule(
        self, slot: _Slot, quantized: QuantizedTensor, h: Step, key: RandomKey | None,
        magnitude_S: Tensor | None,
    ) -> int:  # fmt: skip
        """Step a tensor in several passes; return 1 if its new values aren't finite."""
        state, step = self.state[slot.param], int(self.state[slot.param]["step"])
        target_RC, m, v, den = self._update(slot, quantized, h)
        if not all_finite(target_RC):
            return 1
        if h.lr != 0.0:
            stride = slot.piece.full_columns
            quantized.store(target_RC, key, row_stride=stride, magnitude_S=magnitude_S)
            m = self._place_error(slot, quantized, target_RC, m, den, h)
        for form, moment in zip(self.forms, (m, v), strict=False):
            if moment is not None:
                run_key = (key or slot.piece.key(0, 0, 0)).run_key
                form.write(state, moment, slot.piece, slot.name, run_key, step)
        return 0

    def _update(
        self, slot: _Slot, quantized: QuantizedTensor, h: Step
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | float]:
        """Return unrounded new weights, moments and denominator; changes nothing."""
        piece, state = slot.piece, self.state[slot.param]
        if quantized.master is not None:
            w_RC = quantized.master.view(piece.rows, piece.columns)
        else:
            w_RC = quantized.values()
        if self.kahan:
            w_RC = w_RC + plain(state["compensation"]).view(w_RC.shape).float()
        assert slot.param.grad is not None
        g_RC = plain(slot.param.grad).to(torch.float32).reshape(w_RC.shape)
        m = self.forms[0].read(state, piece)
        if not h.adam:
            target_RC, m = reference.sgd_update(w_RC, m, g_RC, h)
            return target_RC, m, None, 1.0
        return reference.adam_update(w_RC, m, self.forms[1].read(state, piece), g_RC, h)

    def _place_error(
        self, slot: _Slot, quantized: QuantizedTensor, target_RC: Tensor, m_RC: Tensor,
        den: Tensor | float, h: Step,
    ) -> Tensor:  # fmt: skip
        """Put the rounding error where the arm wants it; return the momentum to keep."""
        if quantized.master is not None:
            quantized.master.view(target_RC.shape).copy_(target_RC)
        elif self.kahan:
            error_RC = target_RC - quantized.values()
            plain(self.state[slot.param]["compensation"]).view(error_RC.shape).copy_(error_RC)
        elif self.eco:
            return self.inject(m_RC, target_RC - quantized.values(), den, h, slot)
        return m_RC

    def _common_maxima(
        self, work: list[tuple[nn.Parameter, dict[str, Any]]]
    ) -> dict[nn.Parameter, Tensor]:
        """Return block maxima of tensors whose scales ranks share, by one all-reduce per group."""
        found: dict[nn.Parameter, Tensor] = {}
        wanted: dict[str, tuple[dist.ProcessGroup, list[nn.Parameter]]] = {}
        for param, group in work:
            slot = self._slots.get(param)
            quantized = local_quantized(param)
            if slot is None or quantized is None or not slot.piece.scale_groups:
                continue
            h = self.numbers(group, int(self.state[param]["step"]) + 1)
            target_RC = self._update(slot, quantized, h)[0]
            found[param] = magnitudes(target_RC, quantized.stored.format, quantized.blocks)
            for process_group in slot.piece.scale_groups:
                wanted.setdefault(process_group.group_name, (process_group, []))[1].append(param)
        for process_group, params in wanted.values():
            flat = torch.cat([found[p].view(-1) for p in params])
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=process_group)
            self._book_scalars(flat, process_group)
            for p, part in zip(params, flat.split([found[p].numel() for p in params]), strict=True):
                found[p] = part.view(found[p].shape)
        return found

    # -- agreement ------------------------------------------------------------------------------

    def _agreement_group(self) -> dist.ProcessGroup | None:
        if self._group is not None or not dist.is_initialized():
            return self._group
        return dist.group.WORLD

    def _any_rank(self, flag: Tensor) -> bool:
        group = self._agreement_group()
        if group is not None and group.size() > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
            self._book_scalars(flag, group)
        return bool(flag)

    def _book_scalars(self, x: Tensor, group: dist.ProcessGroup) -> None:
        if self._ledger is not None:
            sent = comm.ledger.all_reduce_sent(x.numel() * x.itemsize, group.size())
            self._ledger.book("scalars", dense_bytes=sent, wire_bytes=sent)

    def _gradients_are_finite(self, params: list[nn.Parameter]) -> bool:
        device = params[0].device if params else torch.device("cpu")
        flag = torch.zeros(1, device=device)
        for p in params:
            assert p.grad is not None
            flag += float(not all_finite(plain(p.grad)))
        if not self._any_rank(flag):
            return True
        if self.nonfinite == "raise":
            raise NonFiniteError("a gradient holds NaN or infinity; nothing was changed")
        self.skipped_steps += 1
        return False

    def _raise_if_broken(self) -> None:
        device = next(iter(self._slots)).device
        flag = torch.full((1,), float(bool(self._broken)), device=device)
        if not self._any_rank(flag):
            return
        names = ", ".join(sorted(self._broken)) or "a tensor of another rank"
        self._broken.clear()
        raise NonFiniteError(
            f"{names} is NaN or infinite: it was not stored, and this run cannot go on; lower lr, "
            "clip gradients, or resume from a checkpoint"
        )

    # -- learning rates -------------------------------------------------------------------------

    def injection_lr(self, group: dict[str, Any]) -> float:
        """Return the rate that the injection divides by (never 0 where it is used)."""
        lr = float(group["lr"])
        if self.inject_lr == "current":
            return lr or 1.0
        return float(group["next_lr"] or lr) or 1.0

    def injection(self, group: dict[str, Any], beta: float, correction: float) -> float:
        """Return the (negative) factor of the error in the momentum; 0 where none is injected."""
        if not self.eco or self.kahan:
            return 0.0
        decay = float(group["lr"]) * group["weight_decay"] if self.decay_factor else 0.0
        return (1 - decay) * correction / self.injection_lr(group) * (1 - 1 / beta)

    def _check_next_lr(self) -> None:
        if self.inject_lr == "next" and any(g["next_lr"] is None for g in self.param_groups):
            raise ConfigError(
                'inject_lr="next" needs the next step\'s rate before each step: set '
                'group["next_lr"] in every parameter group'
            )

    def _note_lr(self, group: dict[str, Any]) -> None:
        """Warn once where a jump of the rate amplifies carried errors."""
        lr, last = float(group["lr"]), group["last_lr"]
        if self.eco and self.inject_lr == "current" and last > 0 and lr > MAX_LR_JUMP * last:
            if not self._warned:
                warnings.warn(
                    f"the learning rate rose from {last:g} to {lr:g} in one step, which multiplies "
                    f"the rounding error in the momentum by {lr / last:.0f}: start the warm-up "
                    'higher, or use inject_lr="next"',
                    stacklevel=4,
                )
            self._warned = True
        if lr > 0:
            group["last_lr"] = lr

    # -- checkpoints ----------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, bit for bit; tensors are copied, never cast.

        Raises:
            CheckpointError: other groups, parameters, shapes or dtypes.
        """
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise CheckpointError("the saved optimizer has other parameter groups")
        for group, values in zip(self.param_groups, saved, strict=True):
            for index, param in zip(values["params"], group["params"], strict=True):
                self._load_param(param, state_dict["state"].get(index, {}))
            group.update({k: v for k, v in values.items() if k != "params"})

    def _load_param(self, param: nn.Parameter, saved: dict[str, Any]) -> None:
        state = self.state[param]
        name = self._slots[param].name if param in self._slots else f"of shape {tuple(param.shape)}"
        if saved.keys() != state.keys():
            raise CheckpointError(
                f"saved state of parameter {name} has {sorted(saved)}, this optimizer needs "
                f"{sorted(state)}: build it with the options that were saved"
            )
        for key, mine in state.items():
            theirs = torch.as_tensor(saved[key]) if not torch.is_tensor(saved[key]) else saved[key]
            same = theirs.shape == mine.shape and (key == "step" or theirs.dtype == mine.dtype)
            if not same:
                raise CheckpointError(
                    f"saved {key} of parameter {name} is {theirs.dtype} {tuple(theirs.shape)}, "
                    f"this optimizer holds {mine.dtype} {tuple(mine.shape)}"
                )
            plain(mine).copy_(plain(theirs) if isinstance(mine, DTensor) else theirs)


def optimizer_nbytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state tensors on this rank."""
    tensors = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return sum(math.prod(x.shape) * x.itemsize for x in map(plain, tensors))
