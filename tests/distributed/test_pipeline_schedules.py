"""Compressed boundaries under torch's five schedules, two real processes, many cases per launch."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from thinwire.comm import Ledger
from thinwire.pipeline import Basis, Link
from thinwire.testing.processes import run_processes
from thinwire.train.config import Model
from thinwire.train.model import build
from thinwire.train.passes import token_loss

DIM, RANK, B, T, M, VOCAB = 64, 16, 4, 32, 4, 70_000
CFG = Model(dim=DIM, num_layers=4, num_heads=4, num_kv_heads=4, hidden_dim=64, vocab_size=VOCAB)
SMALL = Model(dim=DIM, num_layers=4, num_heads=4, num_kv_heads=4, hidden_dim=64, vocab_size=300)
SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, [0, 1]),
    "1F1B": (pipelining.Schedule1F1B, [0, 1]),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, [0, 1, 0, 1]),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, [0, 1, 0, 1]),
    "ZBVZeroBubble": (schedules.ScheduleZBVZeroBubble, [0, 1, 1, 0]),
}
CASES = {
    "none": {"mode": "none"},
    "fp32 without ids": {"wire": "fp32", "ids": "none"},
    "bf16": {"wire": "bf16"},
    "local": {"wire": "bf16", "ids": "local"},
    "lossy": {"wire": "bf16", "mode": "lossy"},
    "int8": {"wire": "int8"},
    "coord": {"wire": "fp32", "kind": "coord"},
}


class Counting(PipelineStage):
    """Counts what torch is asked to send."""

    sent, messages = 0, 0

    def get_fwd_send_ops(self, chunk):
        return self.count(super().get_fwd_send_ops(chunk))

    def get_bwd_send_ops(self, chunk):
        return self.count(super().get_bwd_send_ops(chunk))

    def count(self, ops):
        for op in ops:
            self.sent += op.tensor.numel() * op.tensor.element_size()
            self.messages += 1
        return ops


def batch(vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (B * M, T), generator=generator) for _ in range(2)]


def run_case(rank, schedule, cfg=SMALL, kind="random", steps=1, **settings):
    """Return this rank's gradients, losses, and counted and booked bytes."""
    make, owners = SCHEDULES[schedule]
    ledger = Ledger()
    n = len(owners)
    modules = {i: build(cfg, T, 1, stage=i, num_stages=n) for i in range(n) if owners[i] == rank}
    link = Link(
        Basis(DIM, RANK, seed=rank, kind=kind),
        num_stages=n,
        owners=owners,
        group=dist.group.WORLD,
        ledger=ledger,
        **settings,
    )
    link.share(modules[0].embed.weight if rank == 0 else None)
    set_up = ledger["pipeline"].wire_bytes
    wrapped = {i: link.wrap(module, i) for i, module in modules.items()}
    stages = [
        Counting(s, i, n, torch.device("cpu"), **s.static_args(B, T, cfg.vocab_size))
        for i, s in wrapped.items()
    ]
    run = make(stages if n > 2 else stages[0], M, loss_fn=token_loss)
    x, y = batch(cfg.vocab_size)
    losses = []
    for _ in range(steps):
        for p in (p for module in modules.values() for p in module.parameters()):
            p.grad = None
        inputs = [x] if owners[0] == rank else []
        extra = {"target": y, "losses": losses} if owners[-1] == rank else {}
        if settings.get("ids") == "local":
            extra["tokens"] = x
        run.step(*inputs, **extra)
    return {
        "grads": {
            name: p.grad for s in wrapped.values() for name, p in s.module.named_parameters()
        },
        "constrained": [n for s in wrapped.values() if s.constraint for n in s.constraint.names],
        "weights": {k: v for s in wrapped.values() for k, v in s.module.state_dict().items()},
        "loss": sum(loss.item() for loss in losses) / max(1, len(losses)),
        "sent": sum(s.sent for s in stages) / steps,
        "messages": sum(s.messages for s in stages) / steps,
        "booked": (ledger["pipeline"].wire_bytes - set_up) / steps,
        "dense": (ledger["pipeline"].dense_bytes - set_up) / steps,
        "health": link.check_health(),
    }


def all_cases(rank):
    warnings.simplefilter("ignore")
    answers = {}
    for schedule in SCHEDULES:
        for name, settings in CASES.items():
            answers[schedule, name] = run_case(rank, schedule, **settings)
    answers["GPipe", "large vocabulary"] = run_case(rank, "GPipe", CFG, wire="bf16")
    answers["1F1B", "two steps"] = run_case(rank, "1F1B", steps=2, wire="bf16")
    return answers


@pytest.fixture(scope="module")
def answers():
    return run_processes(2, all_cases)


def joined(answers, key, what):
    first, second = (a[key][what] for a in answers)
    return {**first, **second}


def reference(answers, key, cfg=SMALL):
    """Return loss and gradients of the uncut model with the same weights."""
    model = build(cfg, T, 1)
    model.load_state_dict(joined(answers, key, "weights"))
    x, y = batch(cfg.vocab_size)
    loss = token_loss(model(x), y)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


KEYS = [(s, name) for s in SCHEDULES for name in CASES if name != "lossy"]
KEYS += [("GPipe", "large vocabulary"), ("1F1B", "two steps")]


@pytest.mark.processes
@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_loss_and_gradients_equal_the_uncut_model(answers, key):
    cfg = CFG if "large" in key[1] else SMALL
    loss, grads = reference(answers, key, cfg)
    noise = {"int8": 2e-2, "none": 1e-5, "fp32 without ids": 1e-5, "coord": 1e-5}.get(key[1], 6e-3)
    got = sum(a[key]["loss"] for a in answers)
    assert got == pytest.approx(loss, rel=noise / 10)
    kind = "coord" if key[1] == "coord" else "random"
    basis = Basis(DIM, RANK, kind=kind)
    constrained = {n for a in answers for n in a[key]["constrained"]}
    assert bool(constrained) == (key[1] != "none")
    for name, g in joined(answers, key, "grads").items():
        want = grads[name]
        if name in constrained:
            keep = basis.keep_rows if name.startswith("embed") else basis.keep_columns
            g, want = keep(g), keep(want)
        assert (g - want).norm() <= noise * want.norm(), name


@pytest.mark.processes
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_the_ledger_books_what_torch_is_asked_to_send(answers, schedule, name):
    for answer in answers:
        case = answer[schedule, name]
        assert case["booked"] == case["sent"]
    crossings = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2}.get(schedule, 3)
    local = 1 if schedule.startswith("ZBV") else 0
    dense = 2 * crossings * M * B * T * DIM * 4
    assert sum(a[schedule, name]["dense"] for a in answers) == dense
    tokens = M * B * T
    one_way = {
        "none": tokens * DIM * 4,
        "fp32 without ids": tokens * RANK * 4,
        "coord": tokens * RANK * 4,
        "int8": tokens * RANK * 68 // 64,
    }.get(name, tokens * RANK * 2)
    ids = 0 if name in ("none", "fp32 without ids", "local") else M * 16 + tokens * 2
    assert sum(a[schedule, name]["sent"] for a in answers) == crossings * (2 * one_way + ids)
    assert local == 0 or len(SCHEDULES[schedule][1]) == 4


@pytest.mark.processes
def test_the_specs_byte_counts(answers):
    """Spec section 7.3, 2 stages, GPipe, 4 micro-batches of [4, 32], d 64."""
    want = {"none": (262_144, 8), "fp32 without ids": (65_536, 8), "bf16": (33_856, 12)}
    for name, (nbytes, messages) in want.items():
        cases = [a["GPipe", name] for a in answers]
        assert sum(c["sent"] for c in cases) == nbytes
        assert sum(c["messages"] for c in cases) == messages


@pytest.mark.processes
def test_boundaries_are_healthy(answers):
    for key in KEYS:
        assert answers[0][key]["health"] < 1e-3
    for schedule in SCHEDULES:
        assert answers[0][schedule, "lossy"]["health"] > 0.1
