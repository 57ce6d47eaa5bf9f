"""Torch's ParallelStyles with the tensor-parallel traffic on a link.

Each takes its torch namesake's arguments, and `link`; parameters are placed as torch places them,
so plans, checkpoints and optimizers stay as they were.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor import parallel as torch_parallel

from thinwire.comm import call
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent, reduce_scatter_sent
from thinwire.errors import ConfigError
from thinwire.taco.layout import check_move, move, shard_dim
from thinwire.taco.link import LINK, Link, Wire
from thinwire.taco.sharing import SharedInput

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]

# Set on the children of a module whose inputs a PrepareModuleInput brings in: a replicated DTensor
# that reaches them has its region behind it already.
PREPARED = "_thinwire_prepared"
EMBEDDING = "row-split embedding: torch sums it exactly"


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """Split a Linear's or Embedding's output features over the ranks.

    Gradients of a replicated input are all-reduced, a sharded input is gathered (its gradient
    reduce-scattered), an output wanted whole is gathered, all over the link. Where several layers
    share an input (q, k, v), put one `PrepareModuleInput` in front instead: one call, not three
    (`parallelize` finds such layers by itself).

    Args:
        input_layouts: layout of the input; default Replicate().
        output_layouts: layout of the output; default Shard(-1).
        use_local_output: return a plain tensor, not a DTensor.
        link: how messages travel; default Link().

    Attributes:
        shared: where siblings that read the same tensor meet, if they do.

    Reference: Liu et al., "TACO", HPDC '26; torch.distributed.tensor.parallel.ColwiseParallel.
    """

    shared: SharedInput | None = None

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        link: Link | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.link = link or Link()
        check_move(self.input_layouts[0], Replicate(), "ColwiseParallel input_layouts")
        out = self.output_layouts[0]
        # The output is cut along the last dimension, which is 2 or more behind [batch, sequence].
        last = Shard(out.dim if isinstance(out, Shard) and not 0 <= out.dim <= 1 else 2)
        check_move(last, out, "ColwiseParallel output_layouts (write Shard(-1) for the last)")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place = _placer(self, module)
        wire = self.link.bind(device_mesh.get_group())
        src, out = self.input_layouts[0], self.output_layouts[0]
        return distribute_module(
            module,
            device_mesh,
            place,
            partial(_enter, wire, src, Replicate(), self.shared),
            partial(_leave, wire, out, self.use_local_output),
        )


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """Split a Linear's input features, or an Embedding's rows, over the ranks.

    Partial outputs are all-reduced, or reduce-scattered to a Shard layout (gradients gathered),
    over the link. The rows of an Embedding are summed exactly by torch: each comes from one rank.

    Args:
        input_layouts: layout of the input; default Shard(-1), Replicate() for an Embedding.
        output_layouts: layout of the output; default Replicate().
        use_local_output: return a plain tensor, not a DTensor.
        link: how messages travel; default Link().

    Reference: Liu et al., "TACO", HPDC '26; torch.distributed.tensor.parallel.RowwiseParallel.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        link: Link | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.link = link or Link()
        check_move(Partial(), self.output_layouts[0], "RowwiseParallel output_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place = _placer(self, module)
        wire = self.link.bind(device_mesh.get_group())
        wanted = Shard(-1) if isinstance(module, nn.Linear) else Replicate()
        leave = _leave if isinstance(module, nn.Linear) else _leave_masked
        return distribute_module(
            module,
            device_mesh,
            place,
            partial(_enter, wire, self.input_layouts[0], wanted, None),
            partial(leave, wire, self.output_layouts[0], self.use_local_output),
        )


class SequenceParallel(torch_parallel.SequenceParallel):
    """Run a module whose parameters are replicated (a norm, dropout) on a piece of the sequence.

    An input that is not yet sharded along the sequence is brought there over the link.

    Args:
        sequence_dim: dimension of the sequence.
        use_local_output: return a plain tensor, not a DTensor.
        link: how messages travel; default Link().
    """

    def __init__(
        self, *, sequence_dim: int = 1, use_local_output: bool = False, link: Link | None = None
    ) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.link = link or Link()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        wire = self.link.bind(device_mesh.get_group())
        sharded = self.sequence_sharding[0]
        return distribute_module(
            module,
            device_mesh,
            self._replicate_module_fn,
            partial(_enter, wire, sharded, sharded, None),
            partial(self._prepare_output_fn, self.use_local_output),
        )


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """Bring a module's inputs into the layouts its children want, in one call for all of them.

    In front of attention this is the one region that q, k and v share: their partial gradients
    add up on each rank before the one reduction.

    Args:
        input_layouts: layouts of the positional inputs, None for those to leave alone.
        desired_input_layouts: layouts the module wants.
        input_kwarg_layouts: the same for keyword inputs.
        desired_input_kwarg_layouts: the same for keyword inputs.
        use_local_output: hand plain tensors to the module; their gradients then count as equal on
            all ranks, as with torch.
        link: how messages travel; default Link().
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        link: Link | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.link = link or Link()
        kwargs = self.input_kwarg_layouts.items()
        pairs = [
            *zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True),
            *((src, self.desired_input_kwarg_layouts[key]) for key, src in kwargs),
        ]
        for src, dst in pairs:
            if src is not None and dst is not None:
                check_move(src, dst, "PrepareModuleInput")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._wire = self.link.bind(device_mesh.get_group())
        for child in module.modules():
            setattr(child, PREPARED, True)
        return super()._apply(module, device_mesh)

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if input_layout is None or desired_layout is None or not _travels(input):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        wire, local = self._wire, self.use_local_output
        x = move(input, input_layout, desired_layout, mesh, wire, whole_grad=local)
        return x.to_local() if local else x


class PrepareModuleInputOutput(torch_parallel.PrepareModuleInputOutput):
    """`PrepareModuleInput` and `PrepareModuleOutput` for one module.

    Args:
        input_layouts: as for `PrepareModuleInput`.
        desired_input_layouts: as for `PrepareModuleInput`.
        input_kwarg_layouts: as for `PrepareModuleInput`.
        desired_input_kwarg_layouts: as for `PrepareModuleInput`.
        use_local_input: as its `use_local_output`.
        output_layouts: as for `PrepareModuleOutput`.
        desired_output_layouts: as for `PrepareModuleOutput`.
        use_local_output: as for `PrepareModuleOutput`.
        link: how messages travel; default Link().
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
        link: Link | None = None,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
            link=link,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
            link=link,
        )


class PrepareModuleOutput(torch_parallel.PrepareModuleOutput):
    """Bring a module's outputs into the layouts that the next module wants.

    Args:
        output_layouts: layouts of the outputs, None for those to leave alone.
        desired_output_layouts: layouts wanted.
        use_local_output: return plain tensors, not DTensors.
        link: how messages travel; default Link().
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
        link: Link | None = None,
    ) -> None:
        super().__init__(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        self.link = link or Link()
        for src, dst in zip(self.output_layouts, self.desired_output_layouts, strict=True):
            if src is not None:
                check_move(src, dst, "PrepareModuleOutput")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._wire = self.link.bind(device_mesh.get_group())
        return super()._apply(module, device_mesh)

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        several = isinstance(outputs, tuple)
        outs = outputs if several else (outputs,)
        if len(outs) != len(self.output_layouts):
            raise ConfigError(
                f"the module returns {len(outs)} outputs, output_layouts names "
                f"{len(self.output_layouts)}"
            )
        moved = [
            self._move(out, src, dst, device_mesh)
            for out, src, dst in zip(
                outs, self.output_layouts, self.desired_output_layouts, strict=True
            )
        ]
        return tuple(moved) if len(moved) > 1 else moved[0]

    def _move(self, out: Any, src: Placement | None, dst: Placement, mesh: DeviceMesh) -> Any:
        if src is None or not _travels(out):
            return out
        x = move(out, src, dst, mesh, self._wire, whole_grad=True)
        return x.to_local() if self.use_local_output else x


def _placer(style: Any, module: nn.Module) -> Any:
    """Return torch's function that places the parameters of this kind of module."""
    if isinstance(module, nn.Linear):
        return style._partition_linear_fn
    if isinstance(module, nn.Embedding):
        return style._partition_embedding_fn
    raise ConfigError(
        f"{type(style).__name__} splits nn.Linear and nn.Embedding, not {type(module).__name__}: "
        "name their Linear children in the plan instead"
    )


def _travels(x: Any) -> bool:
    """Return whether x is a tensor that regions carry; token ids and masks go torch's way."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _enter(
    wire: Wire,
    src: Placement,
    dst: Placement,
    shared: SharedInput | None,
    mod: nn.Module,
    inputs: Any,
    mesh: DeviceMesh,
) -> Any:
    """Lay a layer's first input out as its split weights need it."""
    x = inputs[0]
    if not _travels(x):
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [src], run_check=False)
        return x.redistribute(placements=[dst])
    whole = isinstance(x, DTensor) and x.placements[0].is_replicate() and dst.is_replicate()
    if whole and hasattr(mod, PREPARED):
        return x
    if shared is not None and (found := shared.find(x)) is not None:
        return found
    size = None
    if isinstance(mod, nn.Linear) and src.is_shard() and shard_dim(src, x) == x.dim() - 1:
        size = mod.in_features
    prepared = move(x, src, dst, mesh, wire, size=size)
    return prepared if shared is None else shared.keep(x, prepared)


def _leave(
    wire: Wire, dst: Placement, use_local: bool, mod: nn.Module, out: Any, mesh: DeviceMesh
) -> Any:
    """Bring a layer's output into the layout wanted."""
    x = move(out, out.placements[0], dst, mesh, wire, whole_grad=True)
    return x.to_local() if use_local else x


def _leave_masked(
    wire: Wire, dst: Placement, use_local: bool, mod: nn.Module, out: Any, mesh: DeviceMesh
) -> Any:
    """Let torch sum a row-split Embedding's output, each row of which one rank holds; book it."""
    books = call.find_ledger(wire.forward.ledger)
    nbytes, num_ranks = out.numel() * out.element_size(), wire.num_ranks
    piece_bytes = -(-nbytes // num_ranks)
    reduces = dst.is_replicate()

    def book(sent_bytes: int) -> None:
        call.book(books, LINK, dense_bytes=sent_bytes, wire_bytes=sent_bytes, exempt=EMBEDDING)

    book(
        (all_reduce_sent if reduces else reduce_scatter_sent)(
            nbytes if reduces else piece_bytes, num_ranks
        )
    )
    x = out.redistribute(placements=[dst])
    if not reduces and x.requires_grad:
        x.register_hook(lambda grad: book(all_gather_sent(piece_bytes, num_ranks)))
    return x.to_local() if use_local else x
