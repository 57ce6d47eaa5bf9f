"""The quantized weight: a tensor that stores codes and scales and computes with their values.

Under FSDP2 the sharded parameter is this tensor; a gather carries, from each rank, one message:
codes then scales of the padded shard, rounded up to 4 bytes. Nothing is rounded a second time.

Legend: `R` rows, `C` columns of the stored matrix, `N` ranks, `W` message bytes, `P` rows of a
padded shard.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from thinwire import _compat
from thinwire.codecs import Codec
from thinwire.eco.formats import Blocks, Format
from thinwire.eco.placement import plain
from thinwire.eco.rounding import decode, encode
from thinwire.errors import ConfigError
from thinwire.kernels.random import RandomKey

__all__ = ["QuantizedTensor", "Stored", "local_quantized"]

aten = torch.ops.aten


@dataclass(eq=False)
class Stored:
    """What all pieces of one quantized parameter share.

    Attributes:
        name: full parameter name; seeds the parameter's random numbers.
        format: how it is stored.
        lead_dims: leading dimensions that make up the rows.
        shape: the tensor as FSDP2 shards it (split over tensor-parallel ranks already).
        recode: asked at each gather: the codec that carries the values instead of the stored
            codes, or None; set where weight gathers are compressed further.
        recoded: the last such message and what it was made of.
    """

    name: str
    format: Format
    lead_dims: int
    shape: tuple[int, ...]
    recode: Callable[[], Codec | None] | None = None
    recoded: tuple[Any, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `recode`, which belongs to a live model."""
        return self.__dict__ | {"recode": None, "recoded": None}

    def blocks(self, shape: Sequence[int]) -> Blocks:
        """Return how a piece of this shape is cut."""
        return self.format.blocks(tuple(shape), self.lead_dims)

    def padded_shape(self, num_ranks: int) -> tuple[int, ...]:
        """Return the shape of a padded shard."""
        return (-(-self.shape[0] // num_ranks), *self.shape[1:])

    def message_nbytes(self, num_ranks: int) -> int:
        """Return the bytes that one rank sends in a gather."""
        nbytes = self.format.nbytes(self.padded_shape(num_ranks), self.lead_dims)
        return -(-nbytes // 4) * 4


class QuantizedTensor(torch.Tensor):
    """Codes, scales and, for comparisons, an fp32 master copy, seen as a float tensor.

    Operations that read it get its values in its dtype, the matrix products of `F.linear` without
    keeping them for backward. Operations that would write it are refused: only optimizers of
    `thinwire.eco`, loading and FSDP2 change codes.

    Attributes:
        codes: uint8 (or bf16), leading dimensions as the weight's, last one packed.
        scales: fp32, see `Format.blocks`.
        master: fp32 values of the same shape, or None.
        stored: what the pieces of the parameter share.
        turned: seen transposed. Autograd keeps the transpose of a weight for backward where the
            linear layer's own product isn't used (DTensors of tensor parallelism): codes, so.
    """

    codes: Tensor
    scales: Tensor
    master: Tensor | None
    stored: Stored
    inner_shape: tuple[int, ...]
    turned: bool

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, master: Tensor | None, stored: Stored,
        shape: Sequence[int], dtype: torch.dtype, outer: Sequence[int] | None = None,
        turned: bool = False,
    ) -> "QuantizedTensor":  # fmt: skip
        """Wrap the parts; `outer` is the shape shown to torch where that isn't `shape`."""
        self: QuantizedTensor = _compat.wrapper_tensor(
            cls, shape if outer is None else outer, dtype, codes.device
        )
        self.codes, self.scales, self.master, self.stored = codes, scales, master, stored
        self.inner_shape, self.turned = tuple(shape), turned
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return name, shape and format."""
        return (
            f"QuantizedTensor({self.stored.name!r}, shape={tuple(self.shape)}, "
            f"format={str(self.stored.format)!r}, dtype={self.dtype})"
        )

    # -- parts ----------------------------------------------------------------------------------

    @property
    def blocks(self) -> Blocks:
        """Return how this piece is cut."""
        return self.stored.blocks(self.inner_shape)

    @property
    def storage_nbytes(self) -> int:
        """Return the bytes of this piece's codes, scales and master copy."""
        parts = [p for p in (self.codes, self.scales, self.master) if p is not None]
        return sum(p.numel() * p.itemsize for p in parts)

    def matrix(self) -> tuple[Tensor, Tensor]:
        """Return views of the codes [R, packed C] and the scales [S]."""
        return self.codes.view(self.blocks.rows, self.codes.shape[-1]), self.scales.view(-1)

    def values(self) -> Tensor:
        """Return the fp32 values as a matrix [R, C]."""
        codes, scales = self.matrix()
        return decode(codes, scales, self.stored.format, self.blocks)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a plain tensor of the values."""
        values = self.values().to(dtype or self.dtype)
        return values.view(self.inner_shape).t() if self.turned else values.view(self.shape)

    @torch.no_grad()
    def store(
        self, values_RC: Tensor, key: RandomKey | None = None, *, row_stride: int | None = None,
        magnitude_S: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Replace codes and scales by the rounded values, in place; see `rounding.encode`."""
        codes, scales = encode(
            values_RC, self.stored.format, self.blocks, key,
            row_stride=row_stride, magnitude_S=magnitude_S,
        )  # fmt: skip
        self.codes.copy_(codes.view(self.codes.shape))
        self.scales.copy_(scales.view(self.scales.shape))

    def like(self, codes: Tensor, scales: Tensor, master: Tensor | None, **changes: Any) -> Tensor:
        """Return a tensor of the same parameter with other parts."""
        facts: dict[str, Any] = {"shape": self.inner_shape, "dtype": self.dtype}
        if self.turned:
            facts |= {"outer": tuple(self.shape), "turned": True}
        return QuantizedTensor(codes, scales, master, self.stored, **(facts | changes))

    def mapped(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> Tensor:
        """Return a tensor whose parts went through `fn`."""
        master = None if self.master is None else fn(self.master)
        return self.like(fn(self.codes), fn(self.scales), master, **changes)

    # -- torch ----------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the parts and the rest."""
        names = ["codes", "scales"] + ([] if self.master is None else ["master"])
        return names, (self.stored, self.inner_shape, self.dtype, tuple(self.shape), self.turned)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], rest: Any, size: Any, stride: Any) -> Tensor:
        """Rebuild from `__tensor_flatten__`."""
        stored, shape, dtype, outer, turned = rest
        master = parts.get("master")
        return QuantizedTensor(
            parts["codes"], parts["scales"], master, stored, shape, dtype, outer, turned
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Send linear layers through a product that keeps codes, not values, for backward."""
        kwargs = kwargs or {}
        if func is F.linear:
            found = _linear_arguments(*args, **kwargs)
            if found is not None:
                return _Linear.apply(*found)
        with _compat.no_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operations in `_OPS` on the parts, others on the values."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedTensor):
            own = _OPS.get(func) if func in _TURNED or not first.turned else None
            if own is not None:
                return own(func, *args, **kwargs)
        return _on_values(func, args, kwargs)

    # -- FSDP2 ----------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Return what changes when codes do."""
        return self.codes._version, self.scales._version

    def message(self, num_ranks: int) -> Tensor:
        """Return this shard's message, uint8 [W]: codes, then scales, then padding."""
        out = torch.zeros(
            self.stored.message_nbytes(num_ranks), dtype=torch.uint8, device=self.codes.device
        )
        padded = self.stored.padded_shape(num_ranks)
        codec = self.stored.recode() if self.stored.recode is not None else None
        if codec is not None:
            recoded = self._recoded(codec, math.prod(padded))
            out[: recoded.numel()] = recoded
            return out
        codes, scales = (_bytes(part) for part in (self.codes, self.scales))
        out[: codes.numel()] = codes
        start = self._scales_start(padded)
        out[start : start + scales.numel()] = scales
        return out

    def _recoded(self, codec: Codec, numel: int) -> Tensor:
        """Return the values of the padded shard by another codec, encoded once per state."""
        key = (codec, self.versions())
        if self.stored.recoded is None or self.stored.recoded[0] != key:
            flat = torch.zeros(numel, device=self.codes.device)
            flat[: self.numel()] = self.values().view(-1)
            self.stored.recoded = (key, codec.encode(flat))
        return self.stored.recoded[1]

    def _scales_start(self, padded: tuple[int, ...]) -> int:
        blocks = self.stored.blocks(padded)
        width = self.stored.format.code_columns(blocks.columns) * self.codes.itemsize
        return blocks.rows * width

    # One parameter only: the five-parameter form refuses messages that aren't of the weight's
    # shape on ranks with padding.
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], Any]:
        """Return what this rank sends, and what is needed to read all ranks' messages."""
        codec = self.stored.recode() if self.stored.recode is not None else None
        return (self.message(mesh.size()),), (mesh.size(), codec)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype,
        *, out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:  # fmt: skip
        """Return the whole weight in `param_dtype`, or write it into `out`."""
        num_ranks, codec = metadata
        wires_NW = outputs[0].view(num_ranks, -1)
        if out is None:
            whole = torch.empty(self.stored.shape, dtype=param_dtype, device=wires_NW.device)
            self._decode_into(whole, wires_NW, codec)
            return whole, (whole,)
        target = plain(out)
        with _compat.keep_version(target):
            self._decode_into(target, wires_NW, codec)
        return None

    def _decode_into(self, whole: Tensor, wires_NW: Tensor, codec: Codec | None) -> None:
        rows = self.stored.padded_shape(len(wires_NW))[0]
        for wire, part in zip(wires_NW, whole.split(rows), strict=False):
            if codec is None:
                part.copy_(self._read(wire, len(wires_NW), part.shape[0]))
            else:
                numel = rows * math.prod(self.stored.shape[1:])
                used = wire[: codec.wire_nbytes(numel, torch.float32)].clone()
                values = codec.decode(used, numel, torch.float32)
                part.copy_(values[: part.numel()].view(part.shape))

    def _read(self, wire: Tensor, num_ranks: int, rows: int) -> Tensor:
        """Return the values of the first `rows` of one rank's message."""
        padded = self.stored.padded_shape(num_ranks)
        fmt, b = self.stored.format, self.stored.blocks(padded)
        start = self._scales_start(padded)
        # Copies: kernels see them as numpy arrays, after which torch lets nobody resize their
        # storage, as FSDP2 does to free it.
        codes = wire[:start].clone().view(self.codes.dtype).view(b.rows, -1)
        scales = wire[start : start + 4 * math.prod(b.scale_shape)].clone().view(torch.float32)
        return decode(codes, scales, fmt, b).view(padded)[:rows]


def local_quantized(param: Tensor) -> QuantizedTensor | None:
    """Return the quantized tensor that a parameter holds on this rank, None if it holds another."""
    local = plain(param) if isinstance(param, DTensor) else param
    return local if isinstance(local, QuantizedTensor) else None


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


class _Linear(torch.autograd.Function):
    """`F.linear` that decodes the weight again in backward instead of keeping its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias = weight, bias is not None
        return F.linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grad @ weight.dequantize(grad.dtype)
        if ctx.needs_input_grad[1]:
            dw = grad.flatten(0, -2).T @ x.flatten(0, -2)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = grad.flatten(0, -2).sum(0)
        return dx, dw, db


def _linear_arguments(x: Any, weight: Any, bias: Any = None) -> Any:
    """Return plain inputs for `_Linear` under the autocast dtype, None if weight isn't ours."""
    if not isinstance(weight, QuantizedTensor) or type(x) not in (Tensor, torch.nn.Parameter):
        return None
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return x.to(dtype), weight, None if bias is None else bias.to(dtype)


# -- operations on the parts --------------------------------------------------------------------
# detach, alias: nn.Parameter, state_dict, DTensor. clone, _to_copy: deepcopy, to(device).
# split, slice, new_zeros, copy_, view: FSDP2's sharding. select: one expert of a stack. t: linear
# layers of DTensors.


def _detach(func: Any, a: QuantizedTensor) -> Tensor:
    return a.mapped(lambda part: part)


def _clone(func: Any, a: QuantizedTensor, **kwargs: Any) -> Tensor:
    return a.mapped(torch.clone)


def _to_copy(func: Any, a: QuantizedTensor, **kwargs: Any) -> Tensor:
    # A dtype is the one that others see; codes stay as they are.
    device = kwargs.get("device") or a.device
    move = kwargs.get("non_blocking", False)
    return a.mapped(
        lambda part: part.to(device, non_blocking=move, copy=True),
        dtype=kwargs.get("dtype") or a.dtype,
    )


def _rows(a: QuantizedTensor, start: int, stop: int) -> Tensor:
    shape = (stop - start, *a.inner_shape[1:])
    one_scale = a.stored.format.shared_scale(a.stored.lead_dims) or a.scales.numel() == 0
    scales = a.scales if one_scale else a.scales[start:stop]
    master = None if a.master is None else a.master[start:stop]
    return a.like(a.codes[start:stop], scales, master, shape=shape)


def _split(func: Any, a: QuantizedTensor, size: Any, dim: int = 0) -> list[Tensor]:
    _only_rows(func, dim)
    starts = range(0, max(1, a.shape[0]), size)
    return [_rows(a, s, min(s + size, a.shape[0])) for s in starts]


def _slice(
    func: Any, a: QuantizedTensor, dim: int = 0, start: int | None = None,
    end: int | None = None, step: int = 1,
) -> Tensor:  # fmt: skip
    first, last, stride = slice(start, end, step).indices(a.shape[dim])
    if dim != 0 or stride != 1:
        return _on_values(func, (a, dim, start, end, step), {})
    return _rows(a, first, max(first, last))


def _select(func: Any, a: QuantizedTensor, dim: int, index: int) -> Tensor:
    if dim != 0 or a.stored.lead_dims < 2:
        return _on_values(func, (a, dim, index), {})
    stored = Stored(a.stored.name, a.stored.format, a.stored.lead_dims - 1, a.inner_shape[1:])
    shape = a.inner_shape[1:]
    scales = a.scales
    if a.stored.format.has_scales:
        scales = scales[index].view(stored.blocks(shape).scale_shape)
    return QuantizedTensor(a.codes[index], scales, None, stored, shape, a.dtype)


def _new_zeros(func: Any, a: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    if len(size) != len(a.inner_shape) or tuple(size[1:]) != a.inner_shape[1:]:
        return torch.zeros(size, dtype=kwargs.get("dtype") or a.dtype, device=a.device)
    zero = 0x88 if a.stored.format.fmt == "int4" else 0
    blocks = a.stored.blocks(size)
    if a.stored.format.shared_scale(a.stored.lead_dims):
        scales = a.scales.clone()
    else:
        scales = a.scales.new_ones(blocks.scale_shape)
    master = None if a.master is None else a.master.new_zeros(size)
    return a.like(
        a.codes.new_full((size[0], *a.codes.shape[1:]), zero), scales, master, shape=tuple(size)
    )


def _new_empty(func: Any, a: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    return torch.empty(size, dtype=kwargs.get("dtype") or a.dtype, device=a.device)


def _empty_like(func: Any, a: QuantizedTensor, **kwargs: Any) -> Tensor:
    return torch.empty(a.shape, dtype=kwargs.get("dtype") or a.dtype, device=a.device)


def _copy(func: Any, a: QuantizedTensor, source: Any, non_blocking: bool = False) -> Tensor:
    if not isinstance(source, QuantizedTensor):
        raise ConfigError(
            f"parameter {a.stored.name!r} is stored as {a.stored.format}: plain values would be "
            "rounded on the way in. Load a dense checkpoint before quantize_, or a quantized one "
            "through thinwire.eco.load_plain_state_dict"
        )
    if source.stored.format != a.stored.format or source.inner_shape != a.inner_shape:
        raise ConfigError(f"cannot copy {source!r} into {a!r}: formats or shapes differ")
    for mine, theirs in ((a.codes, source.codes), (a.scales, source.scales)):
        mine.copy_(theirs)
    if a.master is not None:
        a.master.copy_(source.values().view(a.shape) if source.master is None else source.master)
    return a


def _view(func: Any, a: QuantizedTensor, size: Sequence[int]) -> Tensor:
    flat = () if a.turned else ((-1,), (a.numel(),))
    if tuple(size) not in (*flat, tuple(a.shape)):
        return _on_values(func, (a, size), {})
    outer = tuple(a.shape) if len(size) > 1 else (a.numel(),)
    return a.mapped(lambda part: part, outer=outer)


def _t(func: Any, a: QuantizedTensor) -> Tensor:
    if a.dim() != 2 or tuple(a.shape) != (a.inner_shape[::-1] if a.turned else a.inner_shape):
        return _on_values(func, (a,), {})
    return a.mapped(lambda part: part, outer=tuple(a.shape)[::-1], turned=not a.turned)


def _only_rows(func: Any, dim: int) -> None:
    if dim != 0:
        raise ConfigError(
            f"quantized weights are cut along dimension 0 only, {func} asked for {dim}"
        )


_OPS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_empty,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy,
    aten.view.default: _view,
    aten.t.default: _t,
}
_TURNED = {aten.detach.default, aten.alias.default, aten.t.default, aten.view.default}


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on plain values; refuse one that writes a quantized tensor."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(value, QuantizedTensor):
            raise ConfigError(
                f"{func} writes parameter {value.stored.name!r}, which is stored as "
                f"{value.stored.format}: use EcoAdamW or EcoSGD, initialize before quantize_"
            )
    args, kwargs = _compat.map_tensors(QuantizedTensor, lambda t: t.dequantize(), (args, kwargs))
    return func(*args, **kwargs)


torch.serialization.add_safe_globals([QuantizedTensor, Stored, Format])
