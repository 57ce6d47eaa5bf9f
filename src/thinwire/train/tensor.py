"""The tensor-parallel split of the model, and how its messages travel (link "tensor")."""

from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from thinwire import comm, taco
from thinwire.codecs import Codec, Hadamard, Tensorwise
from thinwire.comm import Ledger
from thinwire.train.config import Config, Tensor
from thinwire.train.model import Transformer

__all__ = ["TensorTraffic", "split_blocks", "tensor_codec", "tensor_link", "tp_plan"]


def tp_plan(layers: list[str], *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Return torch's own styles for the a stage's blocks; embedding, last norm and head stay whole.

    One input region serves q/k/v, and one w1/w3. With sequence parallel, activations between the
    matrices are pieces of the sequence: cut before the first block, gathered after the last.
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {}
    for inner, columns, row in (("attn", ("wq", "wk", "wv"), "wo"), ("mlp", ("w1", "w3"), "w2")):
        if sequence_parallel:
            styles[f"layers.*.{inner}_norm"] = SequenceParallel()
        styles[f"layers.*.{inner}"] = PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        )
        styles |= {f"layers.*.{inner}.{name}": ColwiseParallel() for name in columns}
        styles[f"layers.*.{inner}.{row}"] = RowwiseParallel(output_layouts=between)
    if sequence_parallel:
        styles |= _sequence_ends(layers)
    return styles


def _sequence_ends(layers: list[str]) -> dict[str, ParallelStyle]:
    """Return styles that cut the sequence before the first block and join it after the last."""
    first, last = f"layers.{layers[0]}", f"layers.{layers[-1]}"
    given, wanted = (Replicate(), None), (Shard(1), None)
    if first == last:
        both = PrepareModuleInputOutput(
            input_layouts=given,
            desired_input_layouts=wanted,
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        )
        return {first: both}
    return {
        first: PrepareModuleInput(
            input_layouts=given, desired_input_layouts=wanted, use_local_output=True
        ),
        last: PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    }


def split_blocks(config: Config, mesh: DeviceMesh, model: Transformer, ledger: Ledger) -> None:
    """Split the blocks' matrices over the tp ranks, if there are several."""
    cfg, num_ranks = config.systems.tensor, mesh["tp"].size()
    if num_ranks == 1:
        if cfg.codec != "dense":
            ledger.expect("tensor", num_ranks=1)
        if cfg.virtual_ranks:
            _simulate(config, model)
        return
    plan = tp_plan(list(model.layers), sequence_parallel=config.compute.sequence_parallel)
    group = mesh.get_group("tp")
    tiers = comm.hierarchy(group, cfg.node_size) if cfg.node_size else None
    link = replace(tensor_link(config, num_ranks), ledger=ledger, tiers=tiers)
    taco.parallelize(model, mesh["tp"], plan, link=link)


def _simulate(config: Config, model: Transformer) -> None:
    num_ranks = config.systems.tensor.virtual_ranks
    plan = tp_plan(list(model.layers), sequence_parallel=config.compute.sequence_parallel)
    taco.simulate(model, plan, tensor_link(config, num_ranks), num_ranks=num_ranks)


def tensor_link(config: Config, num_ranks: int) -> taco.Link:
    """Return how messages travel between the tp ranks."""
    cfg = config.systems.tensor
    forward = tensor_codec(cfg, cfg.fmt)
    backward = None if cfg.backward_fmt == "same" else tensor_codec(cfg, cfg.backward_fmt)
    return taco.Link(
        codec=forward,
        backward_codec=backward if forward is not None else None,
        algorithm=cfg.algorithm,
        nonfinite=cfg.nonfinite,
        min_bytes=cfg.min_bytes,
        slices=cfg.slices,
        uneven=config.data.seq_len_tokens % num_ranks > 0,
    )


@dataclass(frozen=True)
class TensorTraffic:
    """What the loop shows of the tensor-parallel link.

    Attributes:
        ledger: counts blocks with NaN or infinity that policies "zero" and "propagate" let pass.
    """

    ledger: Ledger

    def metrics(self) -> dict[str, float]:
        """Return the non-finite blocks so far: silent zeroing would hide a divergence."""
        return {"nonfinite_blocks": self.ledger["tensor"].nonfinite_blocks}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the codecs hold no state, the ledger is saved by the loop."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def tensor_codec(cfg: Tensor, fmt: str) -> Codec | None:
    """Return how activations of a number format travel; None: as they are."""
    if cfg.codec == "dense":
        return None
    if cfg.codec == "tensorwise":
        return Tensorwise(fmt=fmt)
    return Hadamard(
        fmt=fmt,
        group=cfg.group,
        hadamard=cfg.hadamard,
        alpha=None if cfg.alpha else False,
        merge_scales=cfg.merge_scales,
        middle=cfg.middle,
    )
