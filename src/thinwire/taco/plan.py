"""Turn a stock tensor-parallel plan into one whose traffic runs on a link, and apply it.

Steps: 1. Resolve every key of the plan to modules. 2. Convert each torch style to its thinwire
namesake; leave alone what no region carries, with the reason. 3. Let siblings that read one input
share a region. 4. Hand the new plan to torch. 5. Declare in the ledger what stays uncompressed.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from thinwire.codecs import Codec
from thinwire.comm.ledger import Ledger
from thinwire.errors import ConfigError
from thinwire.taco import styles
from thinwire.taco.link import DEFAULT_CODEC, LINK, Link
from thinwire.taco.sharing import SharedInput

__all__ = ["EXACT", "Report", "parallelize", "resolve"]

EXACT = ("head", "lm_head", "output")
HEAD = "output head: left exact"
NORM = "replicated parameter: its gradient is summed exactly (see sum_partial_gradients)"

_TWINS = {
    torch_parallel.ColwiseParallel: styles.ColwiseParallel,
    torch_parallel.RowwiseParallel: styles.RowwiseParallel,
    torch_parallel.SequenceParallel: styles.SequenceParallel,
    torch_parallel.PrepareModuleInput: styles.PrepareModuleInput,
    torch_parallel.PrepareModuleInputOutput: styles.PrepareModuleInputOutput,
    torch_parallel.PrepareModuleOutput: styles.PrepareModuleOutput,
}


@dataclass(frozen=True)
class Report:
    """What `parallelize` did.

    Attributes:
        converted: module name -> the style that now carries its traffic.
        exact: module name -> why its traffic is carried and counted, but not compressed.
        left_alone: module name -> why torch's own style serves it (its bytes are not booked).
        notes: advice, such as layers that would save calls by sharing a region.
    """

    converted: dict[str, str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return one line per module."""
        lines = [f"{name}: {what}" for name, what in self.converted.items()]
        lines += [f"{name}: uncompressed, {why}" for name, why in self.exact.items()]
        lines += [f"{name}: torch's own, {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines + self.notes)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle] | ParallelStyle,
    codec: Codec | None = DEFAULT_CODEC,
    *,
    link: Link | None = None,
    ledger: Ledger | None = None,
    exact: Sequence[str] = EXACT,
    leave: Sequence[str] = (),
    src_data_rank: int | None = 0,
) -> Report:
    """Split a model over tensor-parallel ranks by a stock plan, its traffic on the link "tensor".

    Args:
        model: split in place, by torch's own `parallelize_module`.
        mesh: 1-D device mesh, such as mesh["tp"].
        plan: torch's styles per module name ("layers.*.attn.wq": ColwiseParallel(), ...).
        codec: how activations and their gradients travel; None: torch's own collectives, bit for
            bit, with the bytes booked.
        link: all settings at once, in place of codec and ledger.
        ledger: books every call.
        exact: patterns for the last part of module names whose traffic stays uncompressed
            (booked as exempt): by default the output head, whose input and logits feed the loss.
        leave: patterns for full module names that keep torch's own style: their bytes are not
            booked. A style that no region serves must be named here.
        src_data_rank: as for torch.

    Returns:
        What was converted, what not, and why.

    Raises:
        ConfigError: a key names no module, a style has no compressed form, or nothing in the plan
            is compressed.
    """
    if link is None:
        link = Link(codec=codec, ledger=ledger)
    elif codec is not DEFAULT_CODEC or ledger is not None:
        raise ConfigError("pass codec and ledger inside link, or without link, not both ways")
    if mesh.ndim != 1:
        raise ConfigError(f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}: pass one, mesh['tp']")
    report = Report()
    converted = _convert_all(resolve(model, plan), link, exact, leave, report)
    if link.codec is not None and not report.converted:
        raise ConfigError(f"nothing in the plan can be compressed:\n{report}")
    if link.codec is not None:
        _share(model, converted, report)
    for name, style in converted.items():
        module = model.get_submodule(name)
        parallelize_module(module, mesh, style, src_data_rank=src_data_rank)
    _declare(model, converted, link, mesh, report)
    return report


def resolve(
    model: nn.Module, plan: Mapping[str, ParallelStyle] | ParallelStyle
) -> list[tuple[str, ParallelStyle]]:
    """Return (module name, style) in the plan's order; "*" matches one part of a name."""
    found: list[tuple[str, ParallelStyle]] = []
    names = [name for name, _ in model.named_modules()]
    keyed = {"": plan} if isinstance(plan, ParallelStyle) else plan
    for key, style in keyed.items():
        parts = key.split(".") if key else []
        matches = [n for n in names if _matches(n.split(".") if n else [], parts)]
        if not matches:
            raise ConfigError(f"the plan's key {key!r} matches no module of the model")
        found += [(name, style) for name in matches]
    return found


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def _convert_all(
    resolved: list[tuple[str, ParallelStyle]],
    link: Link,
    exact: Sequence[str],
    leave: Sequence[str],
    report: Report,
) -> dict[str, ParallelStyle]:
    """Return the style that serves each module; raise one error for all that have none."""
    converted, refused = {}, []
    for name, style in resolved:
        if any(fnmatchcase(name, pattern) for pattern in leave):
            report.left_alone[name] = "left alone as asked"
            converted[name] = style
            continue
        try:
            converted[name] = _convert(name, style, link, exact, report)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise ConfigError(
            "these modules' traffic cannot go over the link; name them in leave=[...] to keep "
            "torch's own styles for them, uncounted:\n" + "\n".join(refused)
        )
    return converted


def _convert(
    name: str, style: ParallelStyle, link: Link, exact: Sequence[str], report: Report
) -> ParallelStyle:
    """Return the style that serves a module, and note it in the report."""
    if isinstance(style, tuple(_TWINS.values())):
        report.converted[name] = f"{type(style).__name__} with its own link"
        return style
    if type(style) not in _TWINS:
        raise ConfigError(f"{type(style).__name__} has no compressed form")
    is_head = any(fnmatchcase(name.rsplit(".", 1)[-1], pattern) for pattern in exact)
    own = replace(link, codec=None, backward_codec=None, exempt=HEAD) if is_head else link
    twin = _TWINS[type(style)](**_arguments(style), link=own)
    if is_head:
        report.exact[name] = HEAD
    else:
        report.converted[name] = _summary(twin)
    return twin


def _arguments(style: ParallelStyle) -> dict[str, object]:
    """Return the constructor arguments that a torch style was made with."""
    if isinstance(style, torch_parallel.PrepareModuleInput):
        kwargs = style.input_kwarg_layouts if style.with_kwargs else None
        return {
            "input_layouts": style.input_layouts,
            "desired_input_layouts": style.desired_input_layouts,
            "input_kwarg_layouts": kwargs,
            "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts or None,
            "use_local_output": style.use_local_output,
        }
    if isinstance(style, torch_parallel.PrepareModuleOutput):
        return {
            "output_layouts": style.output_layouts,
            "desired_output_layouts": style.desired_output_layouts,
            "use_local_output": style.use_local_output,
        }
    if isinstance(style, torch_parallel.PrepareModuleInputOutput):
        inputs = _arguments(style.prepare_module_input)
        inputs["use_local_input"] = inputs.pop("use_local_output")
        return inputs | _arguments(style.prepare_module_output)
    if isinstance(style, torch_parallel.SequenceParallel):
        return {
            "sequence_dim": style.sequence_sharding[0].dim,
            "use_local_output": style.use_local_output,
        }
    assert isinstance(style, torch_parallel.ColwiseParallel | torch_parallel.RowwiseParallel)
    return {
        "input_layouts": style.input_layouts[0],
        "output_layouts": style.output_layouts[0],
        "use_local_output": style.use_local_output,
    }


def _summary(style: ParallelStyle) -> str:
    names = ("input_layouts", "desired_input_layouts", "output_layouts", "desired_output_layouts")
    layouts = [getattr(style, name, None) for name in names]
    path = " -> ".join("/".join(map(str, layout)) for layout in layouts if layout)
    return f"{type(style).__name__} {path}".strip()


def _share(model: nn.Module, plan: dict[str, ParallelStyle], report: Report) -> None:
    """Give column-parallel siblings without a PrepareModuleInput in front one `SharedInput`."""
    families: dict[tuple[str, str], list[str]] = {}
    for name, style in plan.items():
        parent = name.rpartition(".")[0]
        prepared = isinstance(plan.get(parent), torch_parallel.PrepareModuleInput)
        if name in report.converted and isinstance(style, styles.ColwiseParallel) and not prepared:
            families.setdefault((parent, str(style.input_layouts)), []).append(name)
    for (parent, _), names in families.items():
        if len(names) < 2:
            continue
        shared = SharedInput(model.get_submodule(parent))
        for name in names:
            # A style may serve many modules; each family needs its own.
            plan[name] = copy(plan[name])
            plan[name].shared = shared  # type: ignore[attr-defined]
        children = ", ".join(name.rpartition(".")[2] for name in names)
        report.notes.append(f"{parent or 'the model'}: {children} share one region per input")


def _declare(
    model: nn.Module,
    plan: dict[str, ParallelStyle],
    link: Link,
    mesh: DeviceMesh,
    report: Report,
) -> None:
    ledger = link.ledger
    if ledger is None or link.codec is None:
        return
    ledger.expect(LINK, num_ranks=mesh.size())
    for name, why in (report.exact | report.left_alone).items():
        ledger.declare_exempt(LINK, name, why, 0)
    for name, style in plan.items():
        if isinstance(style, torch_parallel.SequenceParallel):
            for key, p in model.get_submodule(name).named_parameters(prefix=name):
                ledger.declare_exempt(LINK, key, NORM, p.numel() * p.itemsize)
