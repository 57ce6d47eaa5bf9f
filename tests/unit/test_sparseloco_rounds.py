"""SparseLoCo's outer round on simulated replicas: means, residuals, life cycle, all or none."""

import pytest
import torch

from thinwire.errors import ConfigError, ContractError
from thinwire.schedules import WarmupCosine
from thinwire.sparseloco import Options, Partition, simulate_round
from thinwire.sparseloco.aggregate import scales, weights
from thinwire.sparseloco.message import pack, read_header
from thinwire.sparseloco.rounds import Round

PLAIN = {"weights": "equal", "median_clip": "off"}
ALL = {"k": 4096, "quant": "none"}
SHAPES = {"w": (70, 130), "v": (64, 64), "bias": (9,)}


def grid(shape, generator, unit=2.0**-8, most=512):
    """Values on a coarse grid: their sums are exact in fp32, so that fp64 can be the judge."""
    return unit * torch.randint(-most, most + 1, shape, generator=generator).float()


def replicas(num, options, shapes=SHAPES, ids=None, seed=0):
    ids = list(range(num)) if ids is None else ids
    generator = torch.Generator().manual_seed(seed)
    start = {name: grid(shape, generator) for name, shape in shapes.items()}
    return [Partition(start, options, replica=r, roster=ids) for r in ids]


def draws(num, seed, shapes=SHAPES, make=grid):
    out = []
    for r in range(num):
        generator = torch.Generator().manual_seed(1000 * seed + r)
        out.append({name: make(shape, generator) for name, shape in shapes.items()})
    return out


def step(parts, deltas, tokens=None, **more):
    calls = [d.__getitem__ for d in deltas]
    return simulate_round(parts, calls, tokens or [1] * len(parts), **more)


def normal(shape, generator):
    return 1e-3 * torch.randn(shape, generator=generator)


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("beta", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_everything_sent_is_the_dense_average_in_fp64(num, beta):
    parts = replicas(num, Options(**ALL, **PLAIN, aggregate="replicas", beta=beta))
    expected = {name: x.double() for name, x in parts[0].theta.items()}
    for t in range(3):
        deltas = draws(num, t)
        assert all(o.committed for o in step(parts, deltas))
        for name in expected:
            expected[name] -= sum(d[name].double() for d in deltas) / num
    for part in parts:
        for name, x in part.theta.items():
            assert torch.equal(x.double(), expected[name])
        assert not any(e.any() for e in part.residual.values())


@pytest.mark.parametrize("quant", ["none", "sym", "paper"])
def test_what_is_not_delivered_stays_in_the_residual(quant):
    """beta = 1: delivered + final residual = sum of the pseudo-gradients, per replica."""
    options = Options(**PLAIN, quant=quant, beta=1.0, aggregate="replicas")
    parts = replicas(1, options)
    start = {name: x.double() for name, x in parts[0].theta.items()}
    total = {name: torch.zeros_like(x) for name, x in start.items()}
    for t in range(6):
        (delta,) = draws(1, t)
        step(parts, [delta])
        for name in total:
            total[name] += delta[name]
    for name, x in parts[0].theta.items():
        delivered = start[name] - x.double()
        got = delivered + parts[0].residual[name].double()
        # Levels have 11 bits and sums fit fp32; paper's means do not.
        torch.testing.assert_close(
            got, total[name], rtol=0, atol=1e-12 if quant != "paper" else 1e-5
        )


def test_half_of_alpha_moves_exactly_half():
    """Field case H4: the outer rate was applied twice."""
    whole, half = (replicas(2, Options(alpha=a)) for a in (1.0, 0.5))
    zero = {name: torch.zeros_like(x) for name, x in whole[0].theta.items()}
    for part in (*whole, *half):
        part.theta = dict(zero)
    deltas = draws(2, 0, make=normal)
    step(whole, deltas)
    step(half, deltas)
    for name in zero:
        assert torch.equal(half[0].theta[name], 0.5 * whole[0].theta[name])
        assert whole[0].theta[name].any()


def test_alpha_may_follow_a_schedule_over_rounds():
    falling = WarmupCosine(peak=1.0, total_steps=3, floor=0.5)
    (part,) = replicas(1, Options(**ALL, alpha=falling))
    for t in range(3):
        before = part.theta["v"]
        (delta,) = draws(1, t)
        step([part], [delta])
        assert torch.equal(part.theta["v"], before - falling(t) * delta["v"])
    assert Options(alpha=falling).config_hash() != Options().config_hash()


def test_one_replica_that_sends_all_ends_where_it_trained():
    """Field case H3: the pseudo-gradient had the wrong sign."""
    (part,) = replicas(1, Options(**ALL))
    local = {
        name: x + normal(x.shape, torch.Generator().manual_seed(1))
        for name, x in part.theta.items()
    }
    step([part], [{name: part.theta[name] - local[name] for name in local}])
    for name, x in part.theta.items():
        torch.testing.assert_close(x, local[name], rtol=0, atol=2.0**-24 * 4)


def reference_round(options, deltas, residuals, tokens):
    """Plain loops over dense tensors: top-k of fp32 values, then both means."""
    sent, kept = [], []
    for delta, e in zip(deltas, residuals, strict=True):
        a = options.beta * e + delta
        order = sorted(range(a.numel()), key=lambda i: (-abs(a.view(-1)[i].item()), i))
        mask = torch.zeros(a.numel(), dtype=torch.bool)
        mask[order[: options.k]] = True
        mask = mask.view_as(a)
        sent.append((mask, torch.where(mask, a, 0.0)))
        kept.append(torch.where(mask, 0.0, a))
    middle = sorted(tokens)[len(tokens) // 2]
    w = [min(2.0, n / middle) for n in tokens]
    total = sum(wi * d for wi, (_, d) in zip(w, sent, strict=True))
    if options.aggregate == "replicas":
        return total / sum(w), kept
    count = sum(wi * m.float() for wi, (m, _) in zip(w, sent, strict=True))
    return torch.where(count > 0, total / count.clamp_min(1e-30), 0.0), kept


@pytest.mark.parametrize("aggregate", ["senders", "replicas"])
def test_means_equal_plain_loops(aggregate):
    options = Options(quant="none", k=40, aggregate=aggregate, median_clip="off", alpha=0.5)
    shapes = {"v": (64, 64)}
    parts = replicas(3, options, shapes)
    residuals = [torch.zeros(64, 64)] * 3
    expected = parts[0].theta["v"]
    for t, tokens in enumerate(([100, 100, 100], [50, 100, 1000], [0, 7, 8])):
        deltas = draws(3, t, shapes, normal)
        step(parts, deltas, tokens)
        mean, residuals = reference_round(options, [d["v"] for d in deltas], residuals, tokens)
        expected = expected - 0.5 * mean
        for part, e in zip(parts, residuals, strict=True):
            torch.testing.assert_close(part.theta["v"], expected, rtol=1e-6, atol=1e-8)
            assert torch.equal(part.residual["v"], e)
            assert torch.equal(part.theta["v"], parts[0].theta["v"])


def test_senders_and_replicas_agree_for_one_worker_or_equal_indices():
    for num, equal in ((1, False), (3, True)):
        results = []
        for aggregate in ("senders", "replicas"):
            parts = replicas(num, Options(aggregate=aggregate))
            deltas = draws(1 if equal else num, 3, make=normal) * (num if equal else 1)
            deltas = [{n: x * 2.0**-i for n, x in d.items()} for i, d in enumerate(deltas)]
            step(parts, deltas, [40] * num)
            results.append(parts[0].theta)
        assert same(*results)


def test_weights_are_relative_to_the_median_and_capped():
    options = Options()
    assert weights({0: 10, 1: 10}, options) == {0: 1.0, 1: 1.0}
    assert weights({0: 5, 1: 10, 2: 100}, options) == {0: 0.5, 1: 1.0, 2: 2.0}
    assert weights({0: 0, 1: 0, 2: 9}, options) == {0: 0.0, 1: 0.0, 2: 1.0}
    assert weights({0: 0, 1: 0}, options) == {0: 1.0, 1: 1.0}
    assert weights({0: 1, 1: 9}, Options(weights="equal")) == {0: 1.0, 1: 1.0}


def test_median_clip_bounds_one_loud_replica():
    assert scales([1.0, 2.0, 8.0], Options()) == [1.0, 1.0, 0.25]
    assert scales([1.0, 8.0], Options()) == [1.0, 1.0]
    assert scales([1.0, 2.0, 8.0], Options(median_clip="off")) == [1.0] * 3
    moved = {}
    for clip in ("auto", "off"):
        parts = replicas(3, Options(median_clip=clip))
        start = parts[0].theta
        deltas = draws(3, 1, make=normal)
        deltas[2] = {name: 1000 * x for name, x in deltas[2].items()}
        step(parts, deltas)
        moved[clip] = sum((start[n] - x).norm() for n, x in parts[0].theta.items())
        assert parts[2].residual["v"].abs().max() > 100 * parts[1].residual["v"].abs().max()
    assert moved["auto"] < 0.01 * moved["off"]


def test_constant_zero_and_odd_tensors():
    """Field case H2: 0-, 1-, 3- and 4-D parameters, and one that is empty."""
    shapes = {
        "a": (),
        "b": (5,),
        "c": (3, 70, 40),
        "d": (40, 3, 7, 7),
        "e": (0, 4),
        "f": (300, 300),
    }
    options = Options(beta=1.0, aggregate="replicas", **PLAIN)
    parts = replicas(2, options, shapes)
    start = {n: x.clone() for n, x in parts[0].theta.items()}
    deltas = draws(2, 0, shapes)
    deltas[0]["f"].zero_()
    deltas[1]["f"].fill_(0.5)
    outcome = step(parts, deltas)[0]
    assert outcome.committed
    for name in shapes:
        mean = (deltas[0][name] + deltas[1][name]) / 2
        owed = (parts[0].residual[name] + parts[1].residual[name]) / 2
        torch.testing.assert_close(start[name] - parts[0].theta[name] + owed, mean)
    assert parts[0].theta["a"] == start["a"] - (deltas[0]["a"] + deltas[1]["a"]) / 2
    assert not parts[0].residual["f"].any()


# -- life cycle --------------------------------------------------------------------------------


def states(parts):
    return [
        ({n: x.clone() for n, x in p.theta.items()}, {n: x.clone() for n, x in p.residual.items()})
        for p in parts
    ]


@pytest.mark.parametrize("quant", ["sym", "paper", "none"])
def test_a_replica_left_out_keeps_what_it_owed(quant):
    """Corrupt one byte anywhere: all refuse the message, commit without it, its sender keeps a."""
    options = Options(quant=quant)
    parts = replicas(3, options, ids=[2, 5, 7])
    step(parts, draws(3, 0, make=normal))
    before = states(parts)
    deltas = draws(3, 1, make=normal)

    def flip(receiver, messages):
        bad = messages[5].clone()
        bad[300] ^= 4
        return messages | {5: bad}

    outcomes = step(parts, deltas, tamper=flip)
    assert [o.accepted for o in outcomes] == [(2, 7)] * 3
    assert [o.own for o in outcomes] == ["sent", "left out", "sent"]
    assert "SHA-256" in outcomes[0].reasons[5]
    for name, e in parts[1].residual.items():
        assert torch.equal(e, options.beta * before[1][1][name] + deltas[1][name])
        assert torch.equal(parts[1].theta[name], parts[0].theta[name])
        assert not torch.equal(parts[1].theta[name], before[1][0][name])


def test_a_nan_replica_is_left_out_on_all_alike():
    """Field case H8: one NaN replica poisons all. Its residual stays as it was."""
    parts = replicas(3, Options())
    step(parts, draws(3, 0, make=normal))
    before = states(parts)
    deltas = draws(3, 1, make=normal)
    deltas[1]["bias"][3] = torch.inf
    outcomes = step(parts, deltas)
    assert [o.accepted for o in outcomes] == [(0, 2)] * 3
    assert outcomes[0].abstained == (1,)
    assert outcomes[1].own.startswith("abstained: the pseudo-gradient of 'bias'")
    assert same(parts[1].residual, before[1][1])
    assert not same(parts[0].residual, before[0][1])
    for part in parts:
        assert same(part.theta, parts[0].theta)
        assert all(torch.isfinite(x).all() for x in part.theta.values())


def test_too_few_messages_abort_and_change_nothing():
    parts = replicas(3, Options(min_quorum=2))
    step(parts, draws(3, 0, make=normal))
    before = states(parts)
    outcomes = step(parts, draws(3, 1, make=normal), abstain={0: "paused", 2: "paused"})
    assert [o.committed for o in outcomes] == [False] * 3
    assert "min_quorum is 2" in outcomes[0].why
    for part, (theta, residual) in zip(parts, before, strict=True):
        assert same(part.theta, theta)
        assert same(part.residual, residual)
        assert (part.round, part.commits) == (2, 1)
    assert all(o.committed for o in step(parts, draws(3, 2, make=normal)))


def test_replicas_that_saw_other_messages_abort():
    parts = replicas(3, Options())
    before = states(parts)

    def lose(receiver, messages):
        return {r: m for r, m in messages.items() if (receiver, r) != (0, 2)}

    outcomes = step(parts, draws(3, 0, make=normal), tamper=lose)
    assert all("disagree" in o.why for o in outcomes)
    assert all(same(p.theta, b[0]) for p, b in zip(parts, before, strict=True))


def test_drift_is_found_by_the_anchors_hash():
    parts = replicas(2, Options(check_every=2))
    step(parts, draws(2, 0))
    parts[1].theta["v"] = parts[1].theta["v"] + 1
    step(parts, draws(2, 1))  # round 1 is not compared
    with pytest.raises(ContractError, match="drifted"):
        step(parts, draws(2, 2))


def test_phases_out_of_order_are_refused():
    (part,) = replicas(1, Options())
    with pytest.raises(ConfigError, match="no round"):
        part.abort()
    part.prepare(draws(1, 0)[0].__getitem__, 1)
    with pytest.raises(ConfigError, match="neither committed"):
        part.prepare(draws(1, 0)[0].__getitem__, 1)
    with pytest.raises(ConfigError, match="between rounds"):
        part.state_dict()


# -- several partitions ------------------------------------------------------------------------


def staged(num, options):
    """Two stages per replica, owned together (a whole replica) or by two ranks."""
    return [
        [
            Partition({"w": torch.zeros(64, 70)}, options, replica=r, roster=range(num), stage=s)
            for s in range(2)
        ]
        for r in range(num)
    ]


def run_stages(owners, deltas, forge=None):
    """Run ranks that own one or two stages; return their outcomes."""
    rounds = [Round(parts, [d] * len(parts), 1) for parts, d in zip(owners, deltas, strict=True)]
    messages = {}
    for current in rounds:
        for part, message in zip(current.parts, current.messages, strict=True):
            messages.setdefault(part.stage, {})[part.replica] = message
    if forge is not None:
        forge(messages)
    for current in rounds:
        for part in current.parts:
            current.judge(part, messages[part.stage])
    notes = [r.note for r in rounds]
    assert {r.tally(notes) for r in rounds} == {2}
    finite = all(r.finite for r in rounds)
    return [r.close(finite) for r in rounds]


def gauss(seed, value=None):
    x = 1e-3 * torch.randn(64, 70, generator=torch.Generator().manual_seed(seed))
    if value is not None:
        x[0, 0] = value
    return lambda name: x


def test_all_stages_commit_or_none_does():
    """Replica 0 holds both stages on one rank; replica 1 is a pipeline of two ranks."""
    whole, piped = staged(2, Options(min_quorum=2))
    owners = [whole, piped[:1], piped[1:]]
    assert all(o.committed for o in run_stages(owners, [gauss(1), gauss(2), gauss(3)]))

    def flip(messages):
        messages[1][1] = messages[1][1].clone()
        messages[1][1][200] ^= 1

    before = [p.theta["w"] for parts in owners for p in parts]
    outcomes = run_stages(owners, [gauss(4), gauss(5), gauss(6)], flip)
    assert [o.committed for o in outcomes] == [False] * 3
    assert all(
        a is p.theta["w"] for a, p in zip(before, (p for o in owners for p in o), strict=True)
    )


def test_a_replica_rejected_in_one_stage_is_left_out_of_all():
    parts = staged(3, Options())
    owners = [parts[0], parts[1], parts[2][:1], parts[2][1:]]
    outcomes = run_stages(owners, [gauss(1), gauss(2), gauss(3), gauss(4, torch.nan)])
    assert [o.accepted for o in outcomes] == [(0, 1)] * 4
    for stage in range(2):
        assert torch.equal(parts[0][stage].theta["w"], parts[2][stage].theta["w"])
    assert torch.equal(parts[2][0].residual["w"], gauss(3)("w"))  # sent, not accepted: all owed
    assert not parts[2][1].residual["w"].any()


def test_a_rank_that_must_abstain_with_one_stage_abstains_with_all():
    (parts,) = staged(1, Options())
    deltas = [gauss(1), gauss(2, torch.nan)]
    current = Round(parts, deltas, 1)
    assert all(read_header(m).abstains for m in current.messages)


def test_the_callers_own_anchor_and_extra_bytes():
    """A pipeline's delta is against a projected anchor; theta stays the unprojected copy."""
    options = Options(**ALL)
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    part = Partition({"w": start}, options, basis_version=3, extra=b"U hash")
    projected = 0.5 * start
    local = projected - 0.25
    step([part], [{"w": projected - local}])
    torch.testing.assert_close(part.theta["w"], start - (projected - local))
    head = part.header()
    assert head.basis_version == 3
    assert head.config_hash == options.config_hash(b"U hash") != options.config_hash()


def test_unsigned_bytes_between_ranks_are_canonical():
    """Packing twice gives the same bytes."""
    parts = replicas(1, Options()), replicas(1, Options())
    a, b = (p[0].prepare(draws(1, 0, make=normal)[0].__getitem__, 3) for p in parts)
    assert torch.equal(a, b)
    pack(read_header(a), a)
    assert torch.equal(a, b)
