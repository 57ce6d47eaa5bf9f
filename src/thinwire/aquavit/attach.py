"""Put compressed weight gathers (and, if wanted, gradient reductions) on an FSDP2 model."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire import _compat
from thinwire.aquavit.difference import DifferenceGather
from thinwire.aquavit.gather import WeightGather
from thinwire.aquavit.handle import KEEP_WIRE, Handle, LevelFor
from thinwire.aquavit.reduce import GradientReduce
from thinwire.aquavit.schedule import Difference, Schedule, Static
from thinwire.aquavit.segments import Rules, Segment, clean_name, find_segments, recodes
from thinwire.codecs import Codec
from thinwire.comm.ledger import Ledger
from thinwire.errors import ConfigError

__all__ = ["attach"]


def attach(
    model: nn.Module,
    schedule: Schedule | Static | Difference | None,
    *,
    ledger: Ledger | None = None,
    keep_wire: str = "none",
    gradients: Codec | None = None,
    error_feedback: bool = False,
    exclude: Sequence[str] = (),
    min_shard_numel: int = 4096,
    quantize_frozen: bool = False,
    source: str = "master",
    layout: str = "split",
    meta: str = "fp16",
    rounding: str = "nearest",
    seed: int = 0,
    nonfinite: str = "raise",
    level_for: LevelFor | None = None,
) -> Handle:
    """Compress the weight gathers of an FSDP2 model; call it on every rank after `fully_shard`.

    What is not quantized (1-D parameters, small shards, frozen ones, `exclude`) travels raw and is
    declared to the ledger. Weights in `state_dict()` and checkpoints stay full precision. Weights
    that `thinwire.eco` stores quantized travel as their stored codes, or by the schedule's codec
    where that is smaller.

    Args:
        model: a model on which `fully_shard` was called; its FSDP modules get comm objects.
        schedule: `Schedule` (ascending precision), `Static` (one codec), `Difference` (one codec
            for the change of the weights; a rival arm), or None to gather dense through the same
            objects, bit-equal to plain FSDP2 (to book a dense run).
        ledger: books links "weights" and "gradients"; `ledger.check()` then proves compression.
        keep_wire: "none"; "forward" keeps the gathered wire bytes from forward to backward;
            "accumulate" keeps them until the next optimizer step.
        gradients: codec of the gradient reduce-scatter, None leaves it dense.
        error_feedback: add what gradient encoding lost to the next step (fp32 residual of the
            unsharded gradient's size on every rank).
        exclude: shell patterns of parameter names to send raw, such as "*.embed.weight".
        min_shard_numel: shards with fewer (padded) elements are sent raw.
        quantize_frozen: quantize parameters that take no gradient.
        source: "master" encodes the fp32 shard, "cast" what FSDP2 hands over (after its cast).
        layout: wire layout of `Blockwise`: "split" or "interleaved".
        meta: type of scale and minimum: "fp16" or "bf16".
        rounding: "nearest" (ties to even) or "stochastic" (zero-mean error, twice its square).
        seed: key of stochastic rounding; the same on every rank.
        nonfinite: NaN or infinity in weights or gradients: "raise" on all ranks or "propagate".
        level_for: optional `(step, module_name) -> (bits, block_size) | None` that overrides the
            schedule for one FSDP module; must be the same function of its arguments on all ranks.

    Returns:
        The handle: metrics, state for the checkpoint, `set_step`, `full_precision`.

    Raises:
        ConfigError: the model has no FSDP module, nothing in it qualifies, ranks disagree on the
            settings, or an option is unknown.

    Example:
        >>> fully_shard(model)
        >>> handle = tw.aquavit.attach(model, tw.aquavit.Schedule(10_000), ledger=ledger)

    Reference: Huang et al., "Aquavit", KDD '26, doi 10.1145/3770855.3818083.
    """
    _check_options(keep_wire=keep_wire, source=source, nonfinite=nonfinite)
    rules = Rules(
        exclude=tuple(exclude), min_shard_numel=min_shard_numel, quantize_frozen=quantize_frozen
    )
    modules = [(clean_name(n), m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ConfigError("the model holds no FSDP2 module: call fully_shard before attach")
    handle = Handle(
        schedule=schedule,
        ledger=ledger,
        keep_wire=keep_wire,
        gradients=gradients,
        error_feedback=error_feedback,
        source=source,
        layout=layout,
        meta=meta,
        nonfinite=nonfinite,
        level_for=level_for,
        rounding=rounding,
        seed=seed,
    )
    options = (keep_wire, gradients, error_feedback, source, layout, meta, rounding, seed)
    _put_on(handle, model, modules, rules, repr((schedule, rules, options)))
    return handle


def _put_on(
    handle: Handle,
    model: nn.Module,
    modules: list[tuple[str, FSDPModule]],
    rules: Rules,
    settings: str,
) -> None:
    """Check model and ranks, then give every FSDP module its comm objects."""
    segments = {name: find_segments(model, module, rules) for name, module in modules}
    handle.stores = any(s.stored_nbytes for group in segments.values() for s in group)
    _check_qualifies(segments, handle.schedule, handle.gradients)
    _check_stored(segments, handle.schedule)
    groups = [g for _, m in modules if (g := _compat.shard_group(m)) is not None]
    _check_agreement(settings, segments, groups)
    for name, module in modules:
        if segments[name]:
            _install(handle, name, module, segments[name])
    handle.bind_group(groups[0] if groups else None)
    _declare(handle, segments, max((g.size() for g in groups), default=1))
    _follow(handle, model, segments)


def _check_options(*, keep_wire: str, source: str, nonfinite: str) -> None:
    for name, value, allowed in (
        ("keep_wire", keep_wire, KEEP_WIRE),
        ("source", source, ("master", "cast")),
        ("nonfinite", nonfinite, ("raise", "propagate")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_qualifies(
    segments: dict[str, list[Segment]], schedule: object, gradients: object
) -> None:
    every = [s for group in segments.values() for s in group]
    if (schedule is None and gradients is None) or any(s.reason is None for s in every):
        return
    if gradients is None and any(s.stored_nbytes for s in every):
        return  # the stored codes are what is compressed
    reasons = "; ".join(f"{s.name}: {s.reason}" for s in every[:5])
    raise ConfigError(
        f"no parameter of the model qualifies for compression ({reasons}"
        f"{'; ...' if len(every) > 5 else ''}): lower min_shard_numel or loosen exclude"
    )


def _check_stored(segments: dict[str, list[Segment]], schedule: object) -> None:
    stored = [s.name for group in segments.values() for s in group if s.stored_nbytes]
    if stored and isinstance(schedule, Difference):
        raise ConfigError(
            f"weight differences keep a full-precision copy; {stored[0]!r} is stored quantized: "
            "use another schedule"
        )


def _check_agreement(
    settings: str, segments: dict[str, list[Segment]], groups: list[dist.ProcessGroup]
) -> None:
    """Compare a hash of everything that fixes message sizes over each shard group."""
    facts = [
        (n, s.name, s.numel, s.reason, s.stored_nbytes)
        for n, group in segments.items()
        for s in group
    ]
    digest = hashlib.sha256(repr((settings, facts)).encode()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    for group in {id(g): g for g in groups}.values():
        device = _group_device(segments)
        hashes = own.new_empty(group.size(), 8, device=device)
        _compat.all_gather_single(hashes.view(-1), own.to(device), group=group)
        if not bool((hashes == hashes[0]).all()):
            raise ConfigError(
                "ranks attach with different settings or models: every rank must pass the same "
                "schedule, options and parameter shapes"
            )


def _group_device(segments: dict[str, list[Segment]]) -> torch.device:
    devices = [s.param.device for group in segments.values() for s in group]
    return devices[0] if devices else torch.device("cpu")


def _install(handle: Handle, name: str, module: FSDPModule, segments: list[Segment]) -> None:
    for segment in segments:
        if segment.stored_nbytes:
            segment.shard.stored.recode = _recode(handle, name, segment)
    if isinstance(handle.schedule, Difference):
        handle.gathers[name] = DifferenceGather(handle, name, segments, handle.schedule.codec)
    else:
        handle.gathers[name] = WeightGather(handle, name, segments, module)
    module.set_custom_all_gather(handle.gathers[name])
    if handle.keep_wire != "none":
        module.register_forward_pre_hook(  # type: ignore[attr-defined]
            _note_grad_mode(handle), prepend=True
        )
    if handle.gradients is None and handle.ledger is None:
        return
    handle.reduces[name] = GradientReduce(handle, name, segments)
    module.set_custom_reduce_scatter(handle.reduces[name])
    if handle.gradients is not None:
        # The sum of decoded messages is ours; FSDP2 then divides by the data-parallel size.
        module.set_force_sum_reduction_for_comms(True)
        group = _compat.shard_group(module)
        if handle.error_feedback and group is not None:
            handle.reduces[name].keep_residual(group.size(), segments[0].param.device)


def _recode(handle: Handle, name: str, segment: Segment) -> Callable[[], Codec | None]:
    """Return what a stored shard asks at each gather (see `recodes`)."""

    def recode() -> Codec | None:
        codec = handle.codec_for(name)
        return codec if recodes(segment, codec) else None

    return recode


def _note_grad_mode(handle: Handle) -> Callable[..., None]:
    # FSDP2 gathers under no_grad, so its calls cannot tell training from evaluation; ours, which
    # runs before FSDP2's own hook, can.
    @torch.compiler.disable
    def note(module: nn.Module, args: Any) -> None:
        handle.trains = torch.is_grad_enabled()

    return note


def _declare(handle: Handle, segments: dict[str, list[Segment]], num_ranks: int) -> None:
    ledger = handle.ledger
    if ledger is None:
        return
    wanted = {
        "weights": handle.schedule is not None or handle.stores,
        "gradients": handle.gradients is not None,
    }
    links = [link for link, asked in wanted.items() if asked]
    for link in links:
        ledger.expect(link, num_ranks=num_ranks)
        for segment in (s for group in segments.values() for s in group):
            reason = _why_exempt(handle, link, segment)
            if reason is not None:
                nbytes = segment.numel * segment.param.sharded_param.itemsize
                ledger.declare_exempt(link, segment.name, reason, nbytes)


def _why_exempt(handle: Handle, link: str, segment: Segment) -> str | None:
    if link == "gradients":
        return segment.reason if segment.param.sharded_param.requires_grad else None
    if segment.stored_nbytes:
        return None
    return segment.reason or ("not stored quantized" if handle.schedule is None else None)


def _follow(handle: Handle, model: nn.Module, segments: dict[str, list[Segment]]) -> None:
    every = [s.param.sharded_param for group in segments.values() for s in group]
    trained = [p for p in every if p.requires_grad]
    if trained:
        handle.follow(trained[0])
    model.register_load_state_dict_post_hook(lambda module, keys: handle.refresh())
