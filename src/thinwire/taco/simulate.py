"""Compute on one rank what R tensor-parallel ranks would: the errors of the link without the link.

For quality studies. The ranks lie side by side in the batch dimension: a PrepareModuleInput copies
its input R times, column-parallel layers multiply copy r by piece r of their weight, row-parallel
layers multiply by theirs and add the R results up as the collective would, through the same codec
calls. Messages, values and gradients are those of real ranks but for the order of sums inside a
matrix product; nothing travels and nothing is booked.

Legend: `R` virtual ranks, `B` batch, `N` elements of a message, `W` wire bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ParallelStyle

from thinwire.codecs import Codec
from thinwire.comm import call
from thinwire.comm.all_reduce import chunk_numel, message_nbytes, pick_algorithm
from thinwire.comm.shots import encode_chunks, encode_sum, pad_to
from thinwire.errors import ConfigError
from thinwire.taco.link import LINK, Link
from thinwire.taco.plan import resolve

__all__ = ["simulate"]


def simulate(
    model: nn.Module, plan: Mapping[str, ParallelStyle], link: Link, *, num_ranks: int
) -> None:
    """Let a whole model compute as if split by `plan` over `num_ranks` ranks.

    Args:
        model: changed in place; parameters keep their names and shapes.
        plan: as for `parallelize`; column-parallel layers need a PrepareModuleInput in front.
        link: how messages would travel; tiers are not simulated.
        num_ranks: ranks to simulate.

    Raises:
        ConfigError: a style, size or setting that cannot be simulated.
    """
    if link.tiers is not None:
        raise ConfigError("tiers are not simulated: leave tiers out")
    sides = [_Side(_with_policy(link, codec), num_ranks, link) for codec in _codecs(link)]
    ranks = _Ranks(*sides)
    for name, style in resolve(model, plan):
        module = model.get_submodule(name)
        _BY_STYLE.get(type(style), _refuse)(name, module, style, ranks)


@dataclass(frozen=True)
class _Side:
    """One direction: what R messages become."""

    codec: Codec | None
    num_ranks: int
    link: Link

    def raw(self, numel: int, dtype: torch.dtype, encoded_bytes: int) -> bool:
        """Return whether the gate lets a message pass uncompressed."""
        gate = -1 if self.link.min_bytes is None else self.link.min_bytes
        return self.codec is None or bool(call.gate(self.codec, numel, dtype, encoded_bytes, gate))

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return R messages [R, W]."""
        assert self.codec is not None
        rows = torch.stack([call.prepare(x, self.link.nonfinite, self.codec) for x in x_RN])
        wires = encode_chunks(rows, self.codec, "propagate")
        count = call.count_flagged(
            self.codec, wires, x_RN.shape[1], x_RN.dtype, self.link.nonfinite
        )
        call.raise_flagged(count, LINK)
        return wires

    def all_reduce(self, x_RN: Tensor) -> Tensor:
        """Return the sum [N] of R contributions, as `comm.all_reduce` gives it."""
        num_ranks, numel, dtype = *x_RN.shape, x_RN.dtype
        codec, algorithm = self.codec, self.link.algorithm
        if codec is None:
            return _sum(x_RN)
        if algorithm == "auto":
            algorithm = pick_algorithm(numel, dtype, num_ranks, codec)
        if self.raw(numel, dtype, message_nbytes(numel, dtype, num_ranks, codec, algorithm)):
            return _sum(x_RN)
        if algorithm == "one_shot":
            return codec.decode_sum(self.encode(x_RN), numel, dtype).to(dtype)
        chunk = chunk_numel(numel, num_ranks, codec)
        x_RRC = torch.stack([pad_to(x, chunk * num_ranks) for x in x_RN]).unflatten(1, (-1, chunk))
        sums = [encode_sum(self.encode(x_RC), chunk, dtype, codec) for x_RC in x_RRC.unbind(1)]
        return codec.decode(torch.stack(sums), chunk, dtype).view(-1)[:numel]

    def reduce_scatter(self, x_RRN: Tensor) -> Tensor:
        """Return all ranks' pieces [R, N] of the sum of [R, R, N], dimension 1 numbering pieces."""
        num_ranks, _, numel = x_RRN.shape
        codec, dtype = self.codec, x_RRN.dtype
        total = num_ranks * numel
        if codec is None or self.raw(total, dtype, num_ranks * codec.wire_nbytes(numel, dtype)):
            return _sum(x_RRN)
        pieces = [
            codec.decode_sum(self.encode(x_RN), numel, dtype).to(dtype) for x_RN in x_RRN.unbind(1)
        ]
        return torch.stack(pieces)

    def all_gather(self, x_RN: Tensor) -> Tensor:
        """Return what all ranks hold of R pieces [R, N] once gathered."""
        numel, dtype, codec = x_RN.shape[1], x_RN.dtype, self.codec
        if codec is None or self.raw(numel, dtype, codec.wire_nbytes(numel, dtype)):
            return x_RN
        return codec.decode(self.encode(x_RN), numel, dtype)


@dataclass(frozen=True)
class _Ranks:
    forward: _Side
    backward: _Side

    @property
    def num_ranks(self) -> int:
        return self.forward.num_ranks


def _codecs(link: Link) -> tuple[Codec | None, Codec | None]:
    return link.codec, link.backward_codec or link.codec


def _with_policy(link: Link, codec: Codec | None) -> Codec | None:
    return call.find_codec(call.codec_name(codec, link.nonfinite))


def _sum(x_R: Tensor) -> Tensor:
    """Add up in rank order, in fp32."""
    total = x_R[0].float()
    for x in x_R[1:]:
        total = total + x
    return total.to(x_R.dtype)


def _cut(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    """Return the pieces of x along `dim`, padded to the largest, as rows [R, N]."""
    chunk = -(-x.shape[dim] // num_ranks)
    missing = chunk * num_ranks - x.shape[dim]
    padding = x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])
    pieces = torch.cat([x, padding], dim).unflatten(dim, (num_ranks, chunk)).movedim(dim, 0)
    return pieces.reshape(num_ranks, -1)


def _join(rows_RN: Tensor, like: Tensor, dim: int) -> Tensor:
    """Invert `_cut` for a tensor of the shape of `like`."""
    num_ranks = rows_RN.shape[0]
    chunk = -(-like.shape[dim] // num_ranks)
    shape = (num_ranks, *like.shape[:dim], chunk, *like.shape[dim + 1 :])
    whole = rows_RN.view(shape).movedim(0, dim).flatten(dim, dim + 1)
    return whole.narrow(dim, 0, like.shape[dim])


def _gathered(side: _Side, x: Tensor, dim: int) -> Tensor:
    """Return x after a gather of its pieces."""
    return _join(side.all_gather(_cut(x, side.num_ranks, dim)), x, dim)


def _reduced(side: _Side, x_RB: Tensor, dim: int | None) -> Tensor:
    """Return the sum of [R, ...], all-reduced, or reduce-scattered along `dim` of a summand."""
    if dim is None:
        return side.all_reduce(x_RB.flatten(1)).view(x_RB.shape[1:])
    rows = torch.stack([_cut(x, side.num_ranks, dim) for x in x_RB])
    return _join(side.reduce_scatter(rows), x_RB[0], dim)


def _copies(x: Tensor, num_ranks: int) -> Tensor:
    return x.expand(num_ranks, *x.shape)


class _Enter(torch.autograd.Function):
    """`copy_in` (dim None) or `gather` for all ranks: [B, ...] -> [R, B, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: _Ranks, dim: int | None) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        seen = x if dim is None else _gathered(ranks.forward, x, dim)
        return _copies(seen, ranks.num_ranks).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(ctx.ranks.backward, grad, ctx.dim), None, None


class _Leave(torch.autograd.Function):
    """`reduce_out` (dim None) or `scatter_reduce` for all ranks: [R, B, ...] -> [B, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: _Ranks, dim: int | None) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _reduced(ranks.forward, x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.dim is not None:
            grad = _gathered(ctx.ranks.backward, grad.contiguous(), ctx.dim)
        return _copies(grad, ctx.ranks.num_ranks), None, None


class _Ends(torch.autograd.Function):
    """`split_in` (a gather in backward) or `gather_out` (a gather in forward)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: _Ranks, dim: int, gathers: bool) -> Tensor:
        ctx.ranks, ctx.dim, ctx.gathers = ranks, dim, gathers
        return _gathered(ranks.forward, x, dim) if gathers else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if not ctx.gathers:
            grad = _gathered(ctx.ranks.backward, grad.contiguous(), ctx.dim)
        return grad, None, None, None


class _Columns(nn.Linear):
    """Multiply copy r of the input by piece r of the output features: [R*B, D] -> [R*B, F/R]."""

    ranks: _Ranks

    def forward(self, x: Tensor) -> Tensor:
        num_ranks = self.ranks.num_ranks
        rows = x.reshape(num_ranks, -1, x.shape[-1])
        y = rows @ self.weight.unflatten(0, (num_ranks, -1)).transpose(1, 2)
        if self.bias is not None:
            y = y + self.bias.view(num_ranks, 1, -1)
        return y.view(*x.shape[:-1], -1)


class _Rows(nn.Linear):
    """Multiply copy r by piece r of the input features, and add up: [R*B, F/R] -> [B, D]."""

    ranks: _Ranks
    dim: int | None

    def forward(self, x: Tensor) -> Tensor:
        num_ranks = self.ranks.num_ranks
        rows = x.reshape(num_ranks, -1, x.shape[-1])
        y = rows @ self.weight.unflatten(1, (num_ranks, -1)).permute(1, 2, 0)
        if self.bias is not None:
            y = y + self.bias / num_ranks  # torch spreads it over the partial results, too
        shape = (num_ranks, x.shape[0] // num_ranks, *x.shape[1:-1], self.out_features)
        return _Leave.apply(y.view(shape), self.ranks, self.dim)


def _shard_dim(placement: Placement) -> int | None:
    return placement.dim if placement.is_shard() else None  # type: ignore[attr-defined]


def _columns(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    _split(name, module, "out_features", ranks)
    if not getattr(module, _FOLDED, False):
        raise ConfigError(
            f"{name}: to simulate it, put a PrepareModuleInput in front of its parent"
        )
    module.__class__, module.ranks = _Columns, ranks  # type: ignore[assignment]


def _rows(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    _split(name, module, "in_features", ranks)
    module.__class__, module.ranks = _Rows, ranks  # type: ignore[assignment]
    module.dim = _shard_dim(style.output_layouts[0])  # type: ignore[assignment]


def _split(name: str, module: nn.Module, feature: str, ranks: _Ranks) -> None:
    if type(module) is not nn.Linear or getattr(module, feature) % ranks.num_ranks:
        raise ConfigError(
            f"{name}: simulation splits nn.Linear with {feature} divisible by {ranks.num_ranks}"
        )


def _inputs(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    src, dst = style.input_layouts[0], style.desired_input_layouts[0]
    if src.is_replicate() and dst.is_shard():
        module.register_forward_pre_hook(
            lambda mod, args: (_Ends.apply(args[0], ranks, dst.dim, False), *args[1:])
        )
        return
    dim = _shard_dim(src)
    for child in module.modules():
        setattr(child, _FOLDED, True)
    module.register_forward_pre_hook(
        lambda mod, args: (_Enter.apply(args[0], ranks, dim).flatten(0, 1), *args[1:])
    )


def _outputs(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    dim = _shard_dim(style.output_layouts[0])
    module.register_forward_hook(lambda mod, args, out: _Ends.apply(out, ranks, dim, True))


def _nothing(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    """Leave a norm as it is: on pieces of the sequence it computes the same."""


def _both(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    _inputs(name, module, style.prepare_module_input, ranks)
    _outputs(name, module, style.prepare_module_output, ranks)


def _refuse(name: str, module: nn.Module, style: Any, ranks: _Ranks) -> None:
    raise ConfigError(f"{name}: {type(style).__name__} cannot be simulated")


_FOLDED = "_thinwire_folded"
_BY_STYLE = {
    torch_parallel.ColwiseParallel: _columns,
    torch_parallel.RowwiseParallel: _rows,
    torch_parallel.SequenceParallel: _nothing,
    torch_parallel.PrepareModuleInput: _inputs,
    torch_parallel.PrepareModuleOutput: _outputs,
    torch_parallel.PrepareModuleInputOutput: _both,
}
