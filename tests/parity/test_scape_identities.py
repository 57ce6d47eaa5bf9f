"""The identities that define SCAPE, on the simulator: dense equality, conservation, bound, tables.

Observed sizes of errors stand beside the limits.
"""

import pytest
import torch
from torch import nn

from tests.scape_cases import flat, parameters, residuals, simulate
from thinwire.comm import Ledger
from thinwire.comm.ledger import all_reduce_sent
from thinwire.errors import CheckpointError, NonFiniteError
from thinwire.scape import AdamS, Options, Simulator
from thinwire.scape.messages import message_nbytes
from thinwire.scape.reduce import Books, ValueWire, owners_sent
from thinwire.scape.rules import Adams
from thinwire.scape.saved import redeal
from thinwire.scape.table import build_table
from thinwire.scape.worker import Masking

RULES = ["transfer", "decay"]
BOUND = 1.025978352


@pytest.mark.parametrize("unmasked", RULES)
def test_full_masks_are_dense_adams(unmasked):
    """fp64, 8 workers, 300 steps: weights within 1e-12 of AdamS on the mean gradient (3e-15)."""
    named = parameters((2000,), torch.float64)
    p = nn.Parameter(named[0][1].detach().clone())
    dense = AdamS([p], lr=0.01)
    seen = []

    def watch(sim, grads):
        p.grad = torch.stack([g[0] for g in grads]).mean(0)
        dense.step()
        seen.append(p.detach().clone())

    got, sim = simulate(
        300, 8, sizes=(2000,), dtype=torch.float64, unmasked=unmasked, density=1.0, watch=watch
    )
    assert (got[0][1] - seen[-1]).abs().max() <= 1e-12
    assert flat(sim, "residual").abs().max() == 0


@pytest.mark.parametrize("source", ["owner", "random"])
@pytest.mark.parametrize("unmasked", RULES)
def test_conservation_and_bound(unmasked, source):
    """m' + mean r' = b1*m + (1-b1)*mean g + mean r, whatever the mask; |step| <= 1.026*lr."""
    state, errors, steps = {}, [], []

    def watch(sim, grads):
        now = (flat(sim, "exp_avg") + residuals(sim), torch.cat([w.view(-1) for w in weights(sim)]))
        if state:
            errors.append((now[0] - state["want"]).abs().max())
            steps.append((now[1] - state["weights"]).abs().max() / 0.01)
        mean = torch.stack([torch.cat([x.view(-1) for x in g]) for g in grads]).mean(0)
        state["want"] = 0.9 * flat(sim, "exp_avg") + 0.1 * mean + residuals(sim)
        state["weights"] = now[1].clone()

    def weights(sim):
        return [e.param.detach() for run in sim.workers[0].runs for e in run.entries]

    simulate(
        300,
        4,
        sizes=(2000, 700),
        dtype=torch.float64,
        unmasked=unmasked,
        density=0.1,
        masking=Masking(source=source),
        watch=watch,
        weight_decay=0.0,
    )
    assert max(errors) <= 1e-12
    assert max(steps) <= BOUND
    assert len(errors) == 299


def test_bf16_values_conserve_on_the_mask_to_their_rounding():
    state, worst = {}, []

    def watch(sim, grads):
        run = sim.workers[0].runs[0]
        if state:
            got = flat(sim, "exp_avg") + residuals(sim)
            on = run.index if run.index is not None else torch.arange(2000)
            p = flat(sim, "exp_avg")[on]
            worst.append(((got[on] - state["want"][on]).abs() / p.abs().clamp(min=1e-30)).max())
        mean = torch.stack([g[0].view(-1) for g in grads]).mean(0)
        state["want"] = 0.9 * flat(sim, "exp_avg") + 0.1 * mean + residuals(sim)

    _, sim = simulate(200, 4, sizes=(2000,), density=0.1, values_dtype=torch.bfloat16, watch=watch)
    assert max(worst) <= 2**-8 + 1e-4  # fp32 state around the bf16 rounding
    assert max(worst) > 2**-9
    assert flat(sim, "residual").abs().max() > 0


@pytest.mark.parametrize(("g", "m", "want"), [(1.0, 0.0, 0.4472136), (0.0, 1.0, 0.9233805)])
def test_first_and_idle_steps(g, m, want):
    p = nn.Parameter(torch.zeros(4, 1))
    sim = Simulator([("w", p)], 2, lr=1.0, weight_decay=0.0, options=Options(dense_below=0))
    for worker in sim.workers:
        worker.runs[0].state["exp_avg"].fill_(m)
    for rank in range(2):
        p.grad = torch.full_like(p, g)
        sim.collect(rank)
    sim.step()
    assert torch.allclose(-p.detach(), torch.full_like(p, want), atol=1e-6)


HAND = [  # gradients of both ranks, weights after, next mask byte
    ([[0.4, -0.2, 0.1, 0], [0.2, 0.2, 0.3, 0]], [-0.044721, 0, -0.044721, 0], 0x05),
    ([[0.1, 0.5, -0.2, 0], [-0.1, 0.3, 0, 0]], [-0.137059, 0, -0.071689, 0], 0x03),
    ([[0, 0.1, 0, 0], [0, 0.1, 0, 0]], [-0.229397, -0.044721, -0.071689, 0], 0x03),
    ([[0, 0, 0, 0], [0, 0, 0, 0]], [-0.321735, -0.137059, -0.071689, 0], 0x03),
]
MOMENTS = {
    "transfer": [
        [0.03, 0, 0.02, 0],
        [0.027, 0, 0.008, 0],
        [0.0243, 0.05, 0, 0],
        [0.02187, 0.045, 0, 0],
    ],
    "decay": [
        [0.03, 0, 0.02, 0],
        [0.027, 0, 0.008, 0],
        [0.0243, 0.05, 0.0072, 0],
        [0.02187, 0.045, 0.00648, 0],
    ],
}


@pytest.mark.parametrize("unmasked", RULES)
def test_by_hand(unmasked):
    p = nn.Parameter(torch.zeros(2, 2))
    sim = Simulator(
        [("w", p)],
        2,
        lr=0.1,
        weight_decay=0.0,
        rule=Adams(unmasked),
        options=Options(density=0.5, dense_below=0),
    )
    for step, (grads, weights, byte) in enumerate(HAND):
        for rank, g in enumerate(grads):
            p.grad = torch.tensor(g, dtype=torch.float32).view(2, 2)
            sim.collect(rank)
        sim.step()
        assert torch.allclose(p.detach().view(-1), torch.tensor(weights), atol=1e-6)
        assert torch.allclose(flat(sim, "exp_avg"), torch.tensor(MOMENTS[unmasked][step]))
        assert sim._messages[0][16] == byte
        if step == 1:
            assert torch.allclose(flat(sim, "residual", 0), torch.tensor([0, 0.05, 0, 0]))
            assert torch.allclose(flat(sim, "residual", 1), torch.tensor([0, 0.03, 0, 0]))
        if step == 2:
            left = 0.0072 if unmasked == "transfer" else 0.0
            assert torch.allclose(flat(sim, "residual", 0), torch.tensor([0, 0, left, 0]))


CLIPS = [("local", (0.3, 0.4)), ("rms", (0.424264, 0.565685)), ("reconstructed", (0.6, 0.8))]


@pytest.mark.parametrize(("clip", "want"), CLIPS)
def test_clipping_in_each_sense(clip, want):
    """Field case S3, C = 1, gradients (3, 4) and (0, 0): m' = (1-b1) * clipped mean."""
    p = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    sim = Simulator([("w", p)], 2, lr=0.1, options=Options(dense_below=0, clip=clip, max_norm=1.0))
    for rank, g in enumerate([(3.0, 4.0), (0.0, 0.0)]):
        p.grad = torch.tensor(g, dtype=torch.float64).view(2, 1)
        sim.collect(rank)
    sim.step()
    assert torch.allclose(flat(sim, "exp_avg") / 0.1, torch.tensor(want).double(), atol=2e-6)


def test_reconstructed_clip_with_momentum():
    p = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    sim = Simulator(
        [("w", p)], 2, lr=0.1, options=Options(dense_below=0, clip="reconstructed", max_norm=1.0)
    )
    for worker in sim.workers:
        worker.runs[0].state["exp_avg"].copy_(torch.tensor([0.2, -0.1]))
    for rank, g in enumerate([(3.0, 4.0), (0.0, 0.0)]):
        p.grad = torch.tensor(g, dtype=torch.float64).view(2, 1)
        sim.collect(rank)
    sim.step()
    # mean (1.5, 2): c = 0.4, m' = 0.9*m + 0.1*0.4*mean
    assert torch.allclose(flat(sim, "exp_avg"), torch.tensor([0.24, -0.01]).double(), atol=1e-6)


TOY = [(96, 64), (64, 64), (96, 64)]
TOY += 2 * [(192, 64), (64, 64), (256, 64), (64, 256)] + 5 * [(64,)]
# 12 layers of width 1536, feed-forward 5440, 32,000 tokens
LLAMA = [(32000, 1536), (32000, 1536)] + 25 * [(1536,)]
LLAMA += 12 * (4 * [(1536, 1536)] + 3 * [(5440, 1536)])
FP32, BF16 = torch.float32, torch.bfloat16

TABLE = [  # shapes, density, N, form, values dtype, E, values, masks, ratio
    (TOY, 0.1, 4, "auto", FP32, 11_789, 70_752, 11_568, 8.38),
    (TOY, 0.01, 4, "auto", FP32, 1_468, 8_808, 1_488, 67.02),
    (LLAMA, 0.1, 8, "auto", FP32, 51_274_465, 358_921_304, 56_254_576, 8.64),
    (LLAMA, 0.01, 8, "auto", FP32, 5_161_993, 36_134_000, 6_970_432, 83.21),
    (LLAMA, 0.01, 8, "bits", FP32, 5_161_993, 36_134_000, 56_254_576, 38.82),
    (LLAMA, 0.01, 64, "auto", FP32, 5_161_993, 40_651_128, 7_812_945, 83.26),
    (LLAMA, 0.01, 8, "auto", BF16, 5_161_993, 18_067_000, 6_970_432, 143.26),
]
SIZES_OF = {115_008: 320, 512_398_848: 38_400}


@pytest.mark.parametrize(
    ("shapes", "density", "num_ranks", "form", "dtype", "sent", "values", "masks", "ratio"), TABLE
)
def test_bytes_per_rank_and_step(
    shapes, density, num_ranks, form, dtype, sent, values, masks, ratio
):
    table = build_table([f"p{i}" for i in range(len(shapes))], shapes, num_ranks)
    assert SIZES_OF[table.numel] == table.dense_numel
    ledger = Ledger()
    books = Books(ledger, table, ValueWire(dtype))
    lengths = [message_nbytes(table.owned_by(r), density, form) for r in range(table.num_ranks)]
    books.values([table.kept(density) + 1], density)
    books.owners("masks", lengths, dense=False)
    assert table.kept(density) + 1 == sent
    assert ledger["gradients"].wire_bytes == values
    assert ledger["masks"].wire_bytes == masks
    dense = all_reduce_sent(4 * table.numel, table.num_ranks)
    assert ledger["gradients"].dense_bytes == dense
    assert dense / (values + masks) == pytest.approx(ratio, abs=0.006)


def test_bytes_of_two_workers_in_one_shot():
    table = build_table([f"p{i}" for i in range(len(TOY))], TOY, 2)
    assert ValueWire(torch.float32).sent_bytes(table.kept(0.1) + 1, 2) == 47_156


def test_padded_gather_or_broadcasts():
    assert owners_sent([100, 100, 100, 100]) == (True, 300)
    assert owners_sent([1000, 0, 0, 0]) == (False, 750)


def test_an_embedding_row_without_gradient_stays_as_it_was():
    """Field case S11: rows never seen collected noise where the code could not say zero."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(50, 8))
    start = p.detach().clone()
    for weight_decay in (0.0, 0.1):
        with torch.no_grad():
            p.copy_(start)
        sim = Simulator(
            [("e", p)],
            2,
            lr=0.1,
            weight_decay=weight_decay,
            options=Options(density=0.5, dense_below=0),
        )
        reached, want = False, start[10:].clone()
        for step in range(50):
            for rank in range(2):
                p.grad = torch.zeros_like(p)
                p.grad[:10] = torch.randn(10, 8, generator=torch.Generator().manual_seed(step))
                sim.collect(rank)
            sim.step()
            want *= 1 - 0.1 * weight_decay
            reached = reached or bool((sim.workers[0].picked[sim.table.pieces[0]] >= 80).any())
        assert reached  # ties put untouched rows into the mask
        assert torch.equal(p.detach()[10:], want)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_redeal_conserves_what_the_mean_is_owed(num_ranks):
    generator = torch.Generator().manual_seed(0)
    parts = [
        {
            "rank": r,
            "num_ranks": 4,
            "master": {},
            "residual": {"w": torch.randn(50, generator=generator, dtype=torch.float64)},
        }
        for r in range(4)
    ]
    dealt = redeal(parts, num_ranks)
    old = torch.stack([p["residual"]["w"] for p in parts]).mean(0)
    new = torch.stack([p["residual"]["w"] for p in dealt]).mean(0)
    assert (old - new).abs().max() <= 1e-15
    with pytest.raises(CheckpointError, match="needs the parts of all 4"):
        redeal(parts[:3], num_ranks)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_bad_gradient_outside_the_mask_changes_nothing(nonfinite):
    named, sim = simulate(5, 3, sizes=(500, 300), nonfinite=nonfinite)
    worker = sim.workers[0]
    before = [flat(sim, "exp_avg"), residuals(sim), *[p.detach().clone() for _, p in named]]
    masks = [m.clone() for m in (worker.runs[0].index, *worker.picked.values())]

    def again(bad):
        for rank in range(3):
            for _, p in named:
                p.grad = torch.ones_like(p)
            if bad and rank == 2:
                outside = torch.ones(500, dtype=torch.bool)
                outside[sim.workers[0].picked[sim.table.pieces[0]]] = False
                named[0][1].grad[outside.nonzero()[0, 0]] = float("nan")
            sim.collect(rank)
        sim.step()

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="w0"):
            again(bad=True)
    else:
        again(bad=True)
        assert sim.metrics()["skipped_steps"] == 1
    after = [flat(sim, "exp_avg"), residuals(sim), *[p.detach() for _, p in named]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert sim.num_steps == 5
    again(bad=False)
    assert sim.num_steps == 6
    # The masks built before the bad step were used after it.
    index = sim.workers[0].runs[0].index
    assert torch.equal(index[: masks[1].numel()], masks[1])


@pytest.mark.parametrize("num_workers", [2, 8, 32])
def test_partitioned_masks_do_not_fill_in(num_workers):
    _, sim = simulate(4, num_workers, sizes=(4000, 3000), density=0.1)
    assert sim.metrics()["sent_fraction"] == pytest.approx(0.1, abs=1e-3)


def test_union_masks_fill_in():
    _, sim = simulate(
        4, 8, sizes=(4000, 3000), density=0.1, masking=Masking(source="union"), noise=5.0
    )
    assert sim.metrics()["sent_fraction"] > 0.2


@pytest.mark.parametrize("mask_format", ["bits", "index12", "delta"])
def test_mask_forms_do_not_change_numbers(mask_format):
    want, _ = simulate(30, 3)
    got, _ = simulate(30, 3, masking=Masking(mask_format=mask_format))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(want, got, strict=True))


def test_frozen_mask_repeats_itself():
    """Without the residual in the statistic, no element off the mask can ever enter it."""
    overlaps = []

    def watch(sim, grads):
        if "mask_overlap" in sim.metrics():
            overlaps.append(sim.metrics()["mask_overlap"])

    simulate(12, 2, rule=Adams("transfer", frozen=True), watch=watch)
    assert overlaps[-1] == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"unmasked": "decay"},
        {"max_norm": 0.5},
        {"max_norm": 0.5, "clip": "reconstructed"},
        {"values_dtype": torch.bfloat16},
    ],
)
def test_fused_steps_equal_the_plain_rule(settings, monkeypatch):
    """Weights, moments, residuals: bit for bit."""
    got, fast = simulate(25, 2, **settings)
    monkeypatch.setattr("thinwire.scape.fused.fits", lambda rule, run: False)
    want, plain = simulate(25, 2, **settings)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(got, want, strict=True))
    for name in ("exp_avg", "residual"):
        assert torch.equal(flat(fast, name, 1), flat(plain, name, 1))
