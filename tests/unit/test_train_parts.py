"""Schedules, watchdog, model and gradient averaging, each beside a plain reference."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

from thinwire.comm import Ledger
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.schedules import Constant, WarmupCosine
from thinwire.testing.ranks import run_ranks
from thinwire.train import gradients
from thinwire.train.axes import resolve_axes
from thinwire.train.config import Mesh, Model
from thinwire.train.config import Watchdog as Limits
from thinwire.train.model import Attention, build
from thinwire.train.tables import byte_table
from thinwire.train.watchdog import StuckError, Watchdog

TINY = Model(dim=16, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=24)


def test_cosine_hits_its_corners():
    lr = WarmupCosine(peak=2.0, total_steps=101, warmup_steps=10, floor=0.1)
    assert [lr(0), lr(9), lr(10)] == pytest.approx([0.2, 2.0, 2.0])
    assert lr(55) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert [lr(100), lr(1000)] == pytest.approx([0.2, 0.2])
    assert all(lr(s) >= lr(s + 1) for s in range(10, 120))


def test_constant_and_bad_schedules():
    assert [Constant(peak=3.0, warmup_steps=4)(s) for s in (0, 3, 99)] == [0.75, 3.0, 3.0]
    assert Constant(peak=3.0)(0) == 3.0
    for make in (
        lambda: Constant(peak=1.0, warmup_steps=-1),
        lambda: WarmupCosine(peak=1.0, total_steps=0),
        lambda: WarmupCosine(peak=1.0, total_steps=1, floor=2.0),
    ):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize(
    ("steps", "stops_at"),
    [
        ([(5.5, 0.0)] * 3, 2),
        ([(5.5, 0.0), (5.5, 0.0), (5.5, 1e-3), (5.5, 0.0), (5.5, 0.0)], None),
        ([(5.5, 0.0), (5.4, 0.0), (5.3, 0.0), (5.2, 0.0)], None),
        ([(5.5, 0.0), (5.4, 0.0), (5.4, 0.0), (5.4, 0.0)], 3),
    ],
)
def test_watchdog_counts_unchanged_losses_without_gradient(steps, stops_at):
    dog = Watchdog(Limits(stuck_steps=3))
    for i, (loss, norm) in enumerate(steps):
        if i == stops_at:
            with pytest.raises(StuckError, match="gradient norm 0 for 3 steps"):
                dog.check(i, loss, norm)
        else:
            dog.check(i, loss, norm)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_watchdog_raises_on_non_finite(loss, norm):
    with pytest.raises(NonFiniteError, match="step 7"):
        Watchdog(Limits()).check(7, loss, norm)


def test_stages_hold_the_whole_models_names_and_values():
    whole = build(TINY, 8, seed=5).state_dict()
    for num_stages in (2, 3, 4):
        parts = [build(TINY, 8, seed=5, stage=i, num_stages=num_stages) for i in range(num_stages)]
        cut = {}
        for part in parts:
            assert not cut.keys() & part.state_dict().keys()
            cut |= part.state_dict()
        assert cut.keys() == whole.keys()
        assert all(torch.equal(cut[name], whole[name]) for name in whole)
    assert not torch.equal(build(TINY, 8, seed=6).embed.weight, whole["embed.weight"])


def test_attention_equals_plain_loops():
    """Rotary halves as Hugging Face's Llama has them, grouped heads, causal softmax."""
    attention = Attention(TINY)
    steps, width = 5, TINY.dim // TINY.num_heads
    x_TD = torch.randn(steps, TINY.dim, generator=torch.Generator().manual_seed(0))
    rope = build(TINY, 8, seed=0).rope[:, :steps]
    frequency = [TINY.rope_theta ** (-2 * i / width) for i in range(width // 2)]

    def turned(vector, position):
        out = vector.clone()
        for i, f in enumerate(frequency):
            a, b = vector[i], vector[i + width // 2]
            c, s = math.cos(position * f), math.sin(position * f)
            out[i], out[i + width // 2] = a * c - b * s, b * c + a * s
        return out

    heads = []
    with torch.no_grad():
        for head in range(TINY.num_heads):
            group = head // (TINY.num_heads // TINY.num_kv_heads)
            rows, kv_rows = (slice(h * width, (h + 1) * width) for h in (head, group))
            q, k, v = (
                x_TD @ attention.wq.weight[rows].T,
                *(x_TD @ w.weight[kv_rows].T for w in (attention.wk, attention.wv)),
            )
            q, k = (torch.stack([turned(t[p], p) for p in range(steps)]) for t in (q, k))
            scores = (q @ k.T / math.sqrt(width)).masked_fill(
                torch.ones(steps, steps).triu(1).bool(), -math.inf
            )
            heads.append(scores.softmax(-1) @ v)
        want = torch.cat(heads, dim=-1) @ attention.wo.weight.T
        got = attention(x_TD[None], rope=rope)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_experts_equal_plain_loops():
    cfg = Model(dim=8, num_heads=2, num_kv_heads=2, hidden_dim=12, num_layers=1, num_experts=3)
    experts = build(cfg, 8, seed=0).layers["0"].mlp
    x_BTD = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = torch.zeros_like(x_BTD)
        for b in range(2):
            for t in range(3):
                x = x_BTD[b, t]
                probability = experts.router(x).softmax(-1)
                best = probability.topk(2).indices
                for e in best:
                    h = nn.functional.silu(experts.w1[e] @ x) * (experts.w3[e] @ x)
                    want[b, t] += experts.w2[e] @ h * probability[e] / probability[best].sum()
        torch.testing.assert_close(experts(x_BTD), want)


@pytest.mark.parametrize(
    ("mesh", "ranks", "want"),
    [
        (Mesh(), 3, (1, 1, 3, 1)),
        (Mesh(pp=2, tp=2), 8, (2, 1, 2, 2)),
        (Mesh(dp_replicate=-1, dp_shard=2), 4, (1, 2, 2, 1)),
        (Mesh(tp=2), 3, "needs a multiple of 2 ranks, but 3 run"),
        (Mesh(dp_shard=2), 4, "needs 2 ranks, but 4 run"),
        (Mesh(pp=-1), 4, "only one axis may be -1"),
        (Mesh(pp=0), 4, "an axis must be at least 1"),
    ],
)
def test_axes(mesh, ranks, want):
    if isinstance(want, str):
        with pytest.raises(ConfigError, match=want):
            resolve_axes(mesh, ranks)
    else:
        assert tuple(resolve_axes(mesh, ranks).values()) == want


class OneAxis:
    """Stands in for a layout of replicas only."""

    def __init__(self, num_replicas):
        self.sizes = {"dp_replicate": num_replicas}

    def group(self, axis):
        return torch.distributed.group.WORLD


def test_replicas_average_and_overlap(monkeypatch):
    """Buckets leave during backward, the last before the first parameter's gradient is there."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 4 * 16)

    # Ranks are threads and share torch's default generator: all start from copies of one model.
    start = two_layers()

    def rank_main(rank):
        model = deepcopy(start)
        model.unused = nn.Parameter(torch.ones(3))
        ledger = Ledger()
        sync = gradients.ReplicaSync(list(model.parameters()), OneAxis(2), ledger)
        x = torch.full((1, 4), float(rank + 1))
        launched = []
        for armed in (False, True):
            sync.armed = armed
            model(x).sum().backward()
            launched.append(len(sync._work))
        sync.finish()
        return [p.grad for p in model.parameters()], launched, ledger["gradients"].wire_bytes

    one = rank_reference()
    for grads, launched, wire_bytes in run_ranks(2, rank_main):
        for got, want in zip(grads, one, strict=True):
            torch.testing.assert_close(got, want)
        assert launched == [0, 2]
        assert wire_bytes == (16 + 16 + 3) * 4


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def rank_reference():
    model = two_layers()
    for x in (1.0, 2.0):
        # Two micro-batches of each rank, averaged over two ranks.
        (model(torch.full((1, 4), x)).sum() * 2 / 2).backward()
    return [torch.zeros(3), *(p.grad for p in model.parameters())]


def test_byte_table_shows_links_that_rank_0_does_not_use():
    """A whole replica on rank 0 once hid the compressed pipeline beside it."""
    one = {"calls": 2, "dense_bytes": 2048, "wire_bytes": 1024, "exempt_bytes": 0, "ratio": 2.0}
    table = byte_table({"outer": one}, 2, [{"outer": one}, {"outer": one, "pipeline": one}])
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["outer", "pipeline"]
    assert lines[2].endswith("2.00x  (rank 1)")
    assert lines[3] == "sent per step by rank 0: 512 B"
