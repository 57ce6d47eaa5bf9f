"""Turn chosen weights of a model into quantized parameters, once, after initialization."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thinwire.eco.formats import Format
from thinwire.eco.placement import find_piece, local_like, plain
from thinwire.eco.rounding import magnitudes
from thinwire.eco.tensor import QuantizedTensor, Stored, local_quantized
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.kernels import eco as kernel
from thinwire.kernels.random import tensor_id

__all__ = ["Filter", "QuantizeReport", "block_linears", "experts", "quantize_", "round_activations"]

Filter = Callable[[str, nn.Module, Tensor], bool]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_ACTIVATIONS = kernel.Quantizer("fp8_e4m3")
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_` did.

    Attributes:
        quantized: names of quantized parameters.
        kept: names of the others and why they kept their precision.
        weight_bytes: measured bytes of the quantized parameters on this rank.
    """

    quantized: tuple[str, ...]
    kept: dict[str, str] = field(default_factory=dict)
    weight_bytes: int = 0


def block_linears(name: str, module: nn.Module, param: Tensor) -> bool:
    """Choose linear weights and stacked experts, for a model's repeated blocks (the default)."""
    return (isinstance(module, nn.Linear) and param.ndim == 2) or _is_stack(module, param)


def experts(name: str, module: nn.Module, param: Tensor) -> bool:
    """Choose the experts of a sparse model alone: stacks, or linear layers under "experts"."""
    listed = isinstance(module, nn.Linear) and param.ndim == 2 and ".experts." in f".{name}"
    return listed or _is_stack(module, param)


def _is_stack(module: nn.Module, param: Tensor) -> bool:
    return param.ndim == 3 and not isinstance(module, _CONVOLUTIONS)


def quantize_(
    model: nn.Module,
    fmt: str = "fp8_e4m3",
    *,
    granularity: str | None = None,
    filter: Filter | None = None,
    pow2_scale: bool = False,
    master: bool = False,
    act_quant: str | None = None,
) -> QuantizeReport:
    """Replace weights by quantized parameters; call it before `fully_shard`, on every rank.

    A quantized parameter holds codes and scales and no other copy. The model uses it like any
    parameter; train it with `EcoAdamW` or `EcoSGD`. Initial values are rounded to nearest, once.

    Args:
        model: initialized on its device; tensor parallelism, if any, is laid out already.
        fmt: "fp8_e4m3", "int8", "int4" or "bf16".
        granularity: weights that share a scale: "row" (output channel), "tensor", "group:N"; by
            default row, and tensor for int4.
        filter: `(name, module, param) -> bool`; default `block_linears` inside containers of
            blocks (ModuleList, ModuleDict, Sequential), so that embedding, output layer and norms
            stay as they are. A filter of one's own sees every parameter.
        pow2_scale: scales are powers of two, so that values are exact in bf16.
        master: keep an fp32 master copy beside the codes (a rival arm).
        act_quant: "fp8_e4m3" also rounds the inputs of the chosen linear layers, row by row,
            in forward alone.

    Returns:
        Names and measured bytes.

    Raises:
        ConfigError: nothing qualifies, the model is sharded by FSDP2 already, names collide, or a
            chosen parameter cannot be stored so.
        NonFiniteError: a weight holds NaN or infinity.

    Example:
        >>> tw.eco.quantize_(model, fmt="fp8_e4m3")
        >>> optimizer = tw.eco.EcoAdamW(model.parameters(), lr=3e-4)

    Reference: Nikdan et al., "ECO: Quantized Training without Full-Precision Master Weights",
    arXiv 2601.22101.
    """
    form = Format.parse(fmt, granularity, pow2_scale)
    if act_quant not in (None, "fp8_e4m3"):
        raise ConfigError(f"act_quant must be 'fp8_e4m3' or None, got {act_quant!r}")
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ConfigError(
            "the model is sharded by FSDP2 already: call quantize_ before fully_shard"
        )
    chosen, kept = _choose(model, filter)
    if not chosen:
        few = "; ".join(f"{n}: {r}" for n, r in list(kept.items())[:5])
        raise ConfigError(
            f"no parameter of the model qualifies for quantized storage ({few}): pass filter="
        )
    _check_names([name for name, *_ in chosen])
    nbytes = 0
    for name, owners, param in chosen:
        quantized = _quantized(name, owners[0][0], param, form, master)
        for module, attribute in owners:
            setattr(module, attribute, quantized)
        local = local_quantized(quantized)
        assert local is not None
        nbytes += local.storage_nbytes
        if act_quant is not None:
            _round_inputs(name, [module for module, _ in owners])
    return QuantizeReport(tuple(name for name, *_ in chosen), kept, nbytes)


_Owners = list[tuple[nn.Module, str]]


def _choose(
    model: nn.Module, accepts: Filter | None
) -> tuple[list[tuple[str, _Owners, nn.Parameter]], dict[str, str]]:
    """Return chosen parameters with all modules that hold them, and why others are kept."""
    found: dict[int, tuple[str, _Owners, nn.Parameter, list[bool]]] = {}
    for name, module, attribute, in_blocks in _walk(model):
        param = getattr(module, attribute)
        verdict = (
            accepts(name, module, param)
            if accepts is not None
            else in_blocks and block_linears(name, module, param)
        )
        entry = found.setdefault(id(param), (name, [], param, []))
        entry[1].append((module, attribute))
        entry[3].append(verdict)
    chosen, kept = [], {}
    for name, owners, param, verdicts in found.values():
        if not any(verdicts):
            kept[name] = "not chosen by the filter"
        elif not all(verdicts):
            kept[name] = "tied to a parameter that stays in full precision"
        elif param.ndim < 2:
            kept[name] = "fewer than 2 dimensions"
        elif isinstance(param, QuantizedTensor) or local_quantized(param) is not None:
            raise ConfigError(f"parameter {name!r} is quantized already")
        else:
            chosen.append((name, owners, param))
    return chosen, kept


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Yield (full name, module, attribute, inside a container of blocks) of every parameter."""
    containers = [n for n, m in model.named_modules() if isinstance(m, _CONTAINERS)]
    for prefix, module in model.named_modules(remove_duplicate=False):
        inside = any(c == "" or f"{prefix}.".startswith(f"{c}.") for c in containers)
        for attribute, param in module._parameters.items():
            if param is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                for part in _WRAPPERS:
                    name = name.replace(part, "")
                yield name, module, attribute, inside


def _check_names(names: list[str]) -> None:
    seen: dict[int, str] = {}
    for name in names:
        other = seen.setdefault(tensor_id(name), name)
        if other != name:
            raise ConfigError(
                f"parameters {other!r} and {name!r} would draw the same random numbers (their "
                "names hash alike): rename one"
            )


@torch.no_grad()
def _quantized(
    name: str, module: nn.Module, param: nn.Parameter, form: Format, master: bool
) -> nn.Parameter:
    lead_dims = 1 if isinstance(module, _CONVOLUTIONS) else param.ndim - 1
    piece = find_piece(param, lead_dims, form, name)
    local = plain(param)
    if not torch.is_floating_point(local):
        raise ConfigError(f"parameter {name!r} has dtype {local.dtype}: only floats are quantized")
    values_RC = local.to(torch.float32).reshape(piece.rows, piece.columns)
    finite = torch.isfinite(values_RC).all().to(torch.float32)
    for group in piece.scale_groups:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    if not bool(finite):
        raise NonFiniteError(f"parameter {name!r} holds NaN or infinity: quantize finite weights")
    stored = Stored(name, form, lead_dims, tuple(local.shape))
    quantized = _empty(local, stored, master)
    absmax = None
    if piece.scale_groups:
        absmax = magnitudes(values_RC, form, quantized.blocks)
        for group in piece.scale_groups:
            dist.all_reduce(absmax, op=dist.ReduceOp.MAX, group=group)
    quantized.store(values_RC, magnitude_S=absmax)
    if quantized.master is not None:
        quantized.master.copy_(values_RC.view(local.shape))
    whole = local_like(param, quantized) if isinstance(param, DTensor) else quantized
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _empty(local: Tensor, stored: Stored, master: bool) -> QuantizedTensor:
    form, blocks = stored.format, stored.blocks(local.shape)
    dtype = torch.bfloat16 if form.fmt == "bf16" else torch.uint8
    width = form.code_columns(blocks.columns)
    codes = torch.empty(*blocks.lead, width, dtype=dtype, device=local.device)
    scales = torch.empty(blocks.scale_shape, device=local.device)
    copy = torch.empty(local.shape, device=local.device) if master else None
    return QuantizedTensor(codes, scales, copy, stored, tuple(local.shape), local.dtype)


def round_activations(x: Tensor) -> Tensor:
    """Return x rounded to E4M3 with a scale per row of its last dimension, gradient untouched."""
    with torch.no_grad():
        rows = x.detach().float().reshape(-1, x.shape[-1])
        codes, scales = kernel.quantize(rows, _ACTIVATIONS)
        rounded = kernel.dequantize(codes, scales, x.shape[-1], _ACTIVATIONS)
        step = rounded.view(x.shape).to(x.dtype) - x
    return x + step


def _round_inputs(name: str, modules: list[nn.Module]) -> None:
    for module in modules:
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"act_quant rounds inputs of nn.Linear layers; parameter {name!r} belongs to a "
                f"{type(module).__name__}: leave it out by filter=, or act_quant=None"
            )
        module.register_forward_pre_hook(_rounded_first)


def _rounded_first(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (round_activations(args[0]), *args[1:])
