"""What is saved and how it comes back: the part all workers share, and each worker's own.

A worker's own part holds residuals, the masks of the next step and master weights. A change of the
number of workers from N to M deals residuals anew: r'_j = (M/N) * sum of r_i with i mod M = j,
which conserves sum(r_i)/N, what the mean is still owed.

Legend: `N` workers that saved, `M` workers that load.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.codecs.bitmask import Bitmask
from thinwire.errors import CheckpointError
from thinwire.scape.layout import local
from thinwire.scape.table import Piece

if TYPE_CHECKING:
    from thinwire.scape.engine import SparseOptimizer

__all__ = [
    "load_local_state",
    "load_shared",
    "local_state",
    "memory",
    "missing_part_error",
    "redeal",
]

Part = dict[str, Any]


def local_state(opt: "SparseOptimizer") -> Part:
    """Return this rank's own part: tensors by parameter or piece name, and what they belong to."""
    worker = opt.worker
    masks = worker.masks() or {}
    residual = {
        entry.name: run.state["residual"][span].view(local(entry.param.detach()).shape)
        for run in worker.runs
        for entry, span in run.spans()
    }
    masters = {
        piece.name: tensor
        for run in worker.runs
        for piece, tensor in (run.masters or {}).items()
    }  # fmt: skip
    return {
        "step": worker.step,
        "rank": opt.exchange.rank,
        "num_ranks": opt.table.num_ranks,
        "density": repr(opt.options.schedule),
        "run_key": worker.masking.run_key,
        "mode": opt.options.mode,
        "residual": residual,
        "mask": {p.name: _bits(m.numel()).encode_index(m, p.numel) for p, m in masks.items()},
        "master": masters,
    }  # fmt: skip


def redeal(parts: Sequence[Part], num_ranks: int) -> list[Part]:
    """Return the parts of `num_ranks` workers from those of all N workers, in rank order.

    Raises:
        CheckpointError: not all N parts are there.
    """
    parts = sorted(parts, key=lambda part: part["rank"])
    old = parts[0]["num_ranks"]
    if [p["rank"] for p in parts] != list(range(old)):
        raise CheckpointError(
            f"the state was saved by {old} workers and {num_ranks} load it: their residuals are "
            f"dealt anew, which needs the parts of all {old} (got {[p['rank'] for p in parts]})"
        )
    masters = {k: v for part in parts for k, v in part["master"].items()}
    dealt = []
    for rank in range(num_ranks):
        mine = [p["residual"] for p in parts[rank::num_ranks]]
        residual = {}
        for name, like in parts[0]["residual"].items():
            total = torch.zeros_like(like)
            for r in mine:
                total += r[name]
            residual[name] = total * (num_ranks / old)
        dealt.append(
            parts[0]
            | {"rank": rank, "num_ranks": num_ranks, "residual": residual, "master": masters}
        )
    return dealt


def load_local_state(opt: "SparseOptimizer", parts: Sequence[Part]) -> None:
    """Take this rank's part, or deal residuals anew if the number of workers changed."""
    num_ranks, rank = opt.table.num_ranks, opt.exchange.rank
    if not parts:
        raise CheckpointError("no part of the state was given")
    if parts[0]["num_ranks"] != num_ranks:
        part = redeal(parts, num_ranks)[rank]
    else:
        found = [p for p in parts if p["rank"] == rank]
        if not found:
            raise CheckpointError(f"the state holds no part of worker {rank}")
        part = found[0]
    _same_settings(opt, part)
    for run in opt.worker.runs:
        for entry, span in run.spans():
            target = run.state["residual"][span].view(local(entry.param.detach()).shape)
            _copy(target, part["residual"].get(entry.name), f"residual of {entry.name!r}")
    _load_masks(opt, part["mask"])
    _load_masters(opt, part["master"])
    opt.worker.step = part["step"]
    opt._step_tensor.fill_(part["step"])


def load_shared(opt: "SparseOptimizer", state_dict: Mapping[str, Any]) -> None:
    """Take moments, step and the groups' settings from torch's part of a state."""
    groups = state_dict["param_groups"]
    sizes = [len(g["params"]) for g in groups]
    if sizes != [len(g["params"]) for g in opt.param_groups]:
        raise CheckpointError(
            f"the state is of parameter groups of {sizes} parameters, this optimizer has "
            f"{[len(g['params']) for g in opt.param_groups]}"
        )
    order = [key for g in groups for key in g["params"]]
    for key, entry in zip(order, opt.entries, strict=True):
        saved = state_dict["state"].get(key)
        if saved is None:
            raise CheckpointError(f"the state holds nothing for parameter {entry.name!r}")
        for name in opt.worker.rule.shared:
            target = local(opt.state[entry.param][name])
            value = saved.get(name)
            _copy(target, None if value is None else local(value), f"{name} of {entry.name!r}")
        opt.worker.step = int(saved["step"])
    opt._step_tensor.fill_(opt.worker.step)
    for own, group in zip(opt.param_groups, groups, strict=True):
        own.update({k: v for k, v in group.items() if k not in ("params", "param_names")})


def memory(opt: "SparseOptimizer") -> dict[str, int]:
    """Return this rank's bytes of optimizer state by kind and place."""
    out = {"state_bytes": 0, "residual_bytes": 0, "mask_bytes": 0, "master_bytes": 0}
    host = 0
    for run in opt.worker.runs:
        for name, x in run.state.items():
            out["residual_bytes" if name == "residual" else "state_bytes"] += x.nbytes
            host += x.nbytes if name in opt.worker.store.names else 0
        out["mask_bytes"] += 0 if run.index is None else run.index.nbytes
        out["master_bytes"] += sum(w.nbytes for w in (run.masters or {}).values())
    return out | {"host_bytes": host, "device_bytes": sum(out.values()) - host}


def missing_part_error() -> CheckpointError:
    """Return the error of stepping after only the shared state was loaded."""
    return CheckpointError(
        "the loaded state has no residuals and masks (a tool dropped each worker's own part): call "
        "load_local_state with what local_state() returned when it was saved"
    )


def _same_settings(opt: "SparseOptimizer", part: Part) -> None:
    own = {
        "density": repr(opt.options.schedule),
        "run_key": opt.worker.masking.run_key,
        "mode": opt.options.mode,
    }
    for key, value in own.items():
        if part[key] != value:
            raise CheckpointError(
                f"the state was saved with {key} {part[key]}, this optimizer has {value}: a "
                "resumed run would not continue it"
            )


def _load_masks(opt: "SparseOptimizer", packed: Mapping[str, Tensor]) -> None:
    if not packed:
        opt.worker.all_dense()
        return
    masks: dict[Piece, Tensor] = {}
    for run in opt.worker.runs:
        device = run.entries[0].param.device
        for piece in run.pieces:
            if piece.dense:
                continue
            bits = packed.get(piece.name)
            if bits is None or bits.numel() != _bits(0).wire_nbytes(piece.numel):
                raise CheckpointError(
                    f"the mask of {piece.name!r} is missing or of another size: the state was "
                    "saved with another partition or another sharding of the parameters"
                )
            # Another density than the schedule's is possible after resharding: count the bits.
            flags = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            masks[piece] = flags.view(-1)[: piece.numel].nonzero().view(-1).to(device)
    opt.worker.take_masks(masks)


def _load_masters(opt: "SparseOptimizer", masters: Mapping[str, Tensor]) -> None:
    for run in opt.worker.runs:
        for piece, target in (run.masters or {}).items():
            saved = masters.get(piece.name)
            _copy(target, saved, f"master weights of {piece.name!r}")


def _bits(k: int) -> Bitmask:
    return Bitmask(k=k, form="bits")


def _copy(target: Tensor, value: Tensor | None, what: str) -> None:
    if value is None:
        raise CheckpointError(f"the state lacks the {what}")
    if value.shape != target.shape or value.dtype != target.dtype:
        raise CheckpointError(
            f"the {what} was saved as {value.dtype} {tuple(value.shape)}, this optimizer holds "
            f"{target.dtype} {tuple(target.shape)}: load it into the same parameters and dtypes"
        )
    target.copy_(value)
