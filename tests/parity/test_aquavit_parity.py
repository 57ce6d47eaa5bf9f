"""With dense gathers or the identity codec, an attached model equals plain FSDP2 bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from tests.fsdp_models import Block, build, train
from thinwire import aquavit
from thinwire.codecs import Cast
from thinwire.comm import Ledger
from thinwire.testing.processes import run_processes
from thinwire.testing.ranks import run_ranks

STEPS = 20
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "mixed precision": {"mp_policy": BF16},
    "recompute": {"recompute": True},
    "keep unsharded": {"reshard_after_forward": False},
    "reshard to 2": {"reshard_after_forward": 2},
    "prefetch": {"prefetch": True},
}
SCHEDULES = {"dense": None, "identity": aquavit.Static(Cast())}


def run(
    rank,
    num_ranks,
    *,
    schedule="absent",
    accumulate=1,
    recompute=False,
    prefetch=False,
    asynchronous=False,
    **kw,
):
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = build(mesh, **kw)
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    if prefetch:
        blocks = list(model.blocks)
        for here, there in itertools.pairwise(blocks):
            here.set_modules_to_forward_prefetch([there])
            there.set_modules_to_backward_prefetch([here])
    for module in model.modules() if asynchronous else ():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)
    if schedule != "absent":
        ledger = Ledger()
        aquavit.attach(model, SCHEDULES[schedule], min_shard_numel=0, ledger=ledger)
    losses = train(model, rank, STEPS, accumulate=accumulate)
    return losses, [p.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_to_plain_fsdp2(case, schedule):
    num_ranks = 4 if case == "reshard to 2" else 2
    plain = run_ranks(num_ranks, lambda rank: run(rank, num_ranks, **CASES[case]))
    ours = run_ranks(num_ranks, lambda rank: run(rank, num_ranks, schedule=schedule, **CASES[case]))
    for (loss_a, params_a), (loss_b, params_b) in zip(plain, ours, strict=True):
        assert all(map(torch.equal, loss_a, loss_b))
        assert all(map(torch.equal, params_a, params_b))


def real_process_cases(rank: int, num_ranks: int) -> dict[str, bool]:
    """Return which cases that need real processes are equal: compiled blocks, async unshard."""
    verdicts = {}
    cases = {
        "compile": {"wrap": lambda block: block.compile(backend="aot_eager")},
        "async": {"prefetch": True, "asynchronous": True},
        "accumulate in bf16": {"accumulate": 2, "mp_policy": BF16},
    }
    for name, options in cases.items():
        plain = run(rank, num_ranks, **options)
        for schedule in SCHEDULES:
            ours = run(rank, num_ranks, schedule=schedule, **options)
            same = all(map(torch.equal, plain[0], ours[0]))
            verdicts[f"{name}/{schedule}"] = same and all(map(torch.equal, plain[1], ours[1]))
    return verdicts


@pytest.mark.processes
def test_equal_to_plain_fsdp2_over_gloo():
    for verdicts in run_processes(2, real_process_cases, 2):
        assert verdicts
        assert all(verdicts.values()), verdicts
