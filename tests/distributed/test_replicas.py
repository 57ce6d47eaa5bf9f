"""Unlike replicas over rank threads: ownership, anchors, residuals, drift, resume."""

import copy
import zlib

import pytest
import torch
import torch.distributed as dist

from thinwire.comm import Ledger
from thinwire.errors import CheckpointError, ConfigError, ContractError
from thinwire.pipeline import Basis
from thinwire.replicas import Layout, MixedReplicas, Replica, Site, divide
from thinwire.sparseloco import Options, Partition, simulate_round
from thinwire.testing.ranks import run_ranks
from thinwire.train.config import Model
from thinwire.train.model import build

DIM, V = 64, 100
CFG = Model(dim=DIM, num_layers=4, num_heads=4, num_kv_heads=4, hidden_dim=64, vocab_size=V)
MIXED = (Replica(ranks=(0,)), Replica(ranks=(1,)), Replica(ranks=(2, 3), rank_ratio=8))
OPTIONS = Options(k=128)


class Run:
    """One rank of a run whose "training" is noise that depends on replica, name and step."""

    def __init__(self, rank, layout, options=OPTIONS, sync_every=2, kind="random"):
        self.ledger = Ledger()
        self.site = Site(layout, ledger=self.ledger)
        stages = self.site.replica.num_stages
        module = build(CFG, 16, 3, stage=self.site.stage, num_stages=stages)
        self.basis = self.site.basis(DIM, seed=5, kind=kind)
        self.stage = self.site.wrap(module, self.basis)
        self.outer = MixedReplicas(
            self.stage, None, self.site, sync_every=sync_every, options=options, ledger=self.ledger
        )
        self.module, self.deltas = module, {}
        core = self.outer._core
        sync = core.sync

        def recorded(delta, tokens, abstain):
            self.deltas = {name: delta(name).clone() for name in core.theta}
            return sync(delta, tokens, abstain)

        core.sync = recorded

    @torch.no_grad()
    def learn(self, step, tokens=0):
        for name, p in self.module.named_parameters():
            key = zlib.crc32(f"{self.site.index} {name} {step}".encode())
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(key))
            p.add_(noise, alpha=1e-2)
        if tokens:
            self.outer.count(tokens)
        self.outer.step()

    def state(self):
        parts = self.outer._core.parts
        return {
            "theta": {n: x.clone() for n, x in self.outer._core.theta.items()},
            "residual": {n: x.clone() for p in parts for n, x in p.residual.items()},
            "rows": self.outer._core.rows("embed.weight"),
            "weights": {n: p.detach().clone() for n, p in self.module.named_parameters()},
            "deltas": self.deltas,
            "place": (self.site.index, self.site.stage),
        }


def whole(states, replica, what):
    return {k: v for s in states if s["place"][0] == replica for k, v in s[what].items()}


def test_parameters_are_divided_by_their_owners():
    held = [dict.fromkeys("abcd", (1,)), {"a": (1,), "b": (1,)}, {"c": (1,), "d": (1,)},
            {"a": (1,)}, {"b": (1,), "c": (1,)}, {"d": (1,)}]  # fmt: skip
    layout = Layout(
        replicas=(
            Replica(ranks=(0,)),
            Replica(ranks=(1, 2), rank_ratio=4),
            Replica(ranks=(3, 4, 5)),
        )
    )
    shares = divide(layout, held, "a")
    assert [(s.number, s.names, s.owners) for s in shares] == [
        (0, ("a",), (0, 1, 3)),
        (1, ("b",), (0, 1, 4)),
        (2, ("c",), (0, 2, 4)),
        (3, ("d",), (0, 2, 5)),
    ]
    for change, match in [
        ((5, {}), "rank 5 trains no parameter"),
        ((5, {"d": (2,)}), "parameter 'd' has shape"),
        ((4, {"b": (1,)}), "parameter 'c' has shape"),
        ((2, {"b": (1,), "c": (1,), "d": (1,)}), "both hold parameter 'b'"),
    ]:
        other = list(held)
        other[change[0]] = change[1]
        with pytest.raises(ConfigError, match=match):
            divide(layout, other, "a")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Layout(replicas=(Replica(ranks=(1,)), Replica(ranks=(0,)))), "ascending order"),
        (lambda: Layout(replicas=(Replica(ranks=(0, 0)),)), "every rank once"),
        (
            lambda: Layout(
                replicas=(Replica(ranks=(0,), rank_ratio=8), Replica(ranks=(1,), rank_ratio=4))
            ),
            "one rank_ratio",
        ),
        (lambda: Layout(replicas=(Replica(ranks=(0,)),), constrain_full=True), "constrain_full"),
        (lambda: Layout.of([{"ranks": [0], "stages": 2}]), "one rank per stage"),
        (lambda: Layout.of([{"ranks": [0], "ratio": 2}]), "not 'ratio'"),
        (lambda: Layout.of([{"rank_ratio": 2}]), "ranks is missing"),
        (lambda: Layout(replicas=MIXED).place(4), "belongs to no replica"),
    ],
)
def test_layouts_that_cannot_be(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_a_layout_from_a_configuration():
    tables = [{"ranks": [0]}, {"ranks": [1, 2], "stages": 2, "rank_ratio": 16}]
    layout = Layout.of(tables)
    assert [r.role for r in layout.replicas] == ["full", "compressed"]
    assert [layout.place(r) for r in range(3)] == [(0, 0), (1, 0), (1, 1)]
    assert (layout.num_ranks, layout.ratio) == (3, 16)


@pytest.mark.parametrize("anchor", ["projected", "unprojected"])
def test_zero_steps_report_nothing_against_a_projected_anchor(anchor):
    """Spec section 7.4: the decisive test of the anchor, at the start and after rounds."""

    def check(rank):
        run = Run(rank, Layout(replicas=MIXED, anchor=anchor))
        run.outer.end_round()
        first = run.state()["deltas"]
        run.learn(0)
        run.learn(1)
        theta = {n: x.clone() for n, x in run.outer._core.theta.items()}
        run.outer.end_round()
        return first, run.deltas, theta, run.outer.constraint.names if run.outer.constraint else []

    basis = Basis(DIM, 8, seed=5)
    for rank, (first, later, theta, names) in enumerate(run_ranks(4, check)):
        assert bool(names) == (rank == 2)
        for deltas in (first, later):
            for name, delta in deltas.items():
                constrained = name in names and name != "embed.weight"
                if anchor == "projected" or not constrained:
                    assert delta.abs().max() <= (1e-6 if name == "embed.weight" else 0), name
                    continue
                assert delta.norm() > 0
        if anchor == "unprojected":
            for name in names:
                if name != "embed.weight":
                    rest = theta[name] - basis.keep_columns(theta[name])
                    assert later[name].norm().item() == pytest.approx(rest.norm().item(), rel=1e-4)


def test_the_embedding_too_reports_exactly_nothing():
    def check(rank):
        run = Run(rank, Layout(replicas=MIXED))
        run.learn(0)
        run.learn(1)
        run.outer.end_round()
        return run.deltas

    assert not any(d.any() for deltas in run_ranks(4, check) for d in deltas.values())


ROLES = {
    "mixed": MIXED,
    "uniform": tuple(Replica(ranks=r.ranks, rank_ratio=8) for r in MIXED),
    "dense": tuple(Replica(ranks=r.ranks) for r in MIXED),
    "unlike cuts": (
        Replica(ranks=(0, 1), rank_ratio=8),
        Replica(ranks=(2, 3, 4, 5), rank_ratio=8),
        Replica(ranks=(6,)),
    ),
}


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("aggregate", ["senders", "replicas"])
def test_shared_weights_equal_one_process_bit_for_bit(roles, aggregate):
    """Spec section 7.7: equal on all holders, roles mixed; the reference is SparseLoCo's core."""
    layout = Layout(replicas=ROLES[roles])
    options = Options(k=128, aggregate=aggregate)
    tokens = [100, 300, 200]
    records = {}

    def check(rank):
        run = Run(rank, layout, options, sync_every=2)
        for round_ in range(3):
            for step in range(2):
                run.learn(2 * round_ + step, tokens[run.site.index])
            records[rank, round_] = run.state()
        prints = run.outer.fingerprints()
        return run.state(), prints, [(s.number, s.names) for s in run.outer.shares]

    answers = run_ranks(layout.num_ranks, check)
    start = build(CFG, 16, 3).state_dict()
    for number, names in answers[0][2]:
        parts = [
            Partition(
                {n: start[n] for n in names}, options, replica=r, roster=range(3), stage=number
            )
            for r in range(3)
        ]
        for round_ in range(3):
            deltas = [
                whole([records[rank, round_] for rank in range(layout.num_ranks)], r, "deltas")
                for r in range(3)
            ]
            counted = [2 * n for n in tokens]
            outcomes = simulate_round(parts, [d.__getitem__ for d in deltas], counted)
            assert all(o.committed for o in outcomes)
        states = [a[0] for a in answers]
        for part in parts:
            for name in names:
                assert torch.equal(whole(states, part.replica, "theta")[name], part.theta[name])
                assert torch.equal(
                    whole(states, part.replica, "residual")[name], part.residual[name]
                )
    rows = {s["place"]: s["rows"] for s, _, _ in answers if s["rows"] is not None}
    compressed = [i for i, r in enumerate(layout.replicas) if r.role == "compressed"]
    stages = sum(layout.replicas[i].num_stages for i in compressed)
    assert len(rows) == stages + len(layout.replicas) - len(compressed)
    assert all(torch.equal(x, answers[0][0]["rows"]) for x in rows.values())
    prints = answers[0][1]
    assert all(len(set(p)) == 1 for p in prints.values())
    assert len(prints[0]) == len(rows)


def test_residuals_differ_and_theta_is_not_confined():
    """Top-k and full replicas leave the subspace: compressed starts are projected, theta is not."""

    def check(rank):
        run = Run(rank, Layout(replicas=MIXED))
        for step in range(4):
            run.learn(step)
        return run.state(), run.basis

    states, basis = [list(x) for x in zip(*run_ranks(4, check), strict=True)]
    name = "layers.0.attn.wo.weight"
    theta = states[2]["theta"][name]
    assert (theta - basis[0].keep_columns(theta)).norm() > 0.1 * theta.norm()
    local = states[2]["weights"][name]
    assert torch.equal(local, basis[2].keep_columns(theta))
    assert torch.equal(states[0]["weights"][name], theta)
    residuals = [states[r]["residual"][name] for r in (0, 1, 2)]
    assert not torch.equal(residuals[0], residuals[1])
    assert not torch.equal(residuals[1], residuals[2])


def test_constrained_full_replicas_are_projected_in_the_same_matrices():
    def check(rank):
        run = Run(rank, Layout(replicas=MIXED, constrain_full=True))
        for step in range(3):
            run.learn(step)
        return run.outer.constraint and sorted(run.outer.constraint.names), run.state()

    answers = run_ranks(4, check)
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert answers[3][0] is None
    basis = Basis(DIM, 8, seed=5)
    w = answers[0][1]["weights"]["layers.1.mlp.w2.weight"]
    assert (w - basis.keep_columns(w)).norm() < 1e-5 * w.norm()
    free = answers[0][1]["weights"]["layers.3.mlp.w2.weight"]
    assert (free - basis.keep_columns(free)).norm() > 0.1 * free.norm()


def test_a_stage_with_nan_takes_its_whole_replica_out():
    """Field case H8, and the spec's rule: a pipeline withholds its delta for all stages."""

    def check(rank):
        run = Run(rank, Layout(replicas=MIXED))
        run.learn(0)
        run.learn(1)
        before = run.state()
        if rank == 3:
            with torch.no_grad():
                run.module.head.weight[0, 0] = torch.nan
        run.learn(2)
        run.learn(3)
        return before, run.state(), run.outer.last, run.outer.fingerprints()

    answers = run_ranks(4, check)
    for rank, (before, after, outcome, _) in enumerate(answers):
        assert outcome.committed
        assert outcome.accepted == (0, 1)
        assert all(torch.isfinite(x).all() for x in after["theta"].values())
        assert all(torch.isfinite(x).all() for x in after["weights"].values())
        kept = all(torch.equal(before["residual"][n], x) for n, x in after["residual"].items())
        assert kept == (rank in (2, 3))
        assert not torch.equal(before["theta"][first := next(iter(before["theta"]))],
                               after["theta"][first])  # fmt: skip
    assert "stage 1 of this replica abstains" in answers[2][2].own
    assert "'head.weight' is not finite" in answers[3][2].own


def test_every_byte_of_a_round_is_booked():
    def check(rank):
        run = Run(rank, Layout(replicas=MIXED), options=Options(k=128, check_every=0))
        set_up = run.ledger["outer"].wire_bytes, run.ledger["pipeline"].wire_bytes
        run.learn(0)
        run.learn(1)
        sizes = {p.stage: p.table.message_nbytes for p in run.outer._core.parts}
        return set_up, run.ledger["outer"], sizes, run.outer.last

    answers = run_ranks(4, check)
    sizes = answers[0][2]
    assert sizes.keys() == {0, 1, 2}
    note = 4 + 2 + 32
    # Notes and finite ballots of the three other ranks; whole ranks 3 notes, stage 0 two, stage 1
    # one of its own and one as follower.
    notes = {0: 3, 1: 3, 2: 2, 3: 2}
    for rank, (set_up, outer, own, outcome) in enumerate(answers):
        assert set_up == (0, V * DIM * 4 + 16 if rank == 2 else 0)
        peers = sum(notes[r] * note + 1 for r in range(4) if r != rank)
        handed = 3 * sizes[0] if rank == 2 else 0
        assert outer.wire_bytes == 2 * sum(own.values()) + peers + handed
        assert outcome.received_bytes == 2 * sum(own.values()) + peers
    assert answers[0][1].ratio > 8


@pytest.mark.parametrize("roles", ["mixed", "uniform"])
def test_resume_equals_the_uninterrupted_run(roles):
    layout = Layout(replicas=ROLES[roles])

    def check(rank):
        run = Run(rank, layout)
        for step in range(3):  # in the middle of the second round
            run.learn(step, 10)
        saved = copy.deepcopy((run.outer.state_dict(), run.module.state_dict()))
        table = run.stage.tables.tokens.clone() if run.stage.tables is not None else None
        for step in range(3, 6):
            run.learn(step, 10)
        again = Run(rank, layout)
        again.module.load_state_dict(saved[1])
        again.outer.load_state_dict(saved[0])
        split = table is None or torch.equal(again.stage.tables.tokens, table)
        for step in range(3, 6):
            again.learn(step, 10)
        return run.state(), again.state(), split

    for whole_run, resumed, split in run_ranks(4, check):
        assert split
        for what in ("theta", "residual", "weights"):
            for name, x in whole_run[what].items():
                assert torch.equal(x, resumed[what][name]), (what, name)


def test_roles_may_change_where_a_run_is_resumed():
    """Residuals lie in full coordinates: a compressed pipeline goes on uncompressed, and back."""

    def check(rank):
        run = Run(rank, Layout(replicas=ROLES["unlike cuts"][:2]))
        for step in range(2):
            run.learn(step)
        saved = copy.deepcopy(run.outer.state_dict())
        roles = (Replica(ranks=(0, 1)), Replica(ranks=(2, 3, 4, 5), rank_ratio=8))
        again = Run(rank, Layout(replicas=roles))
        again.outer.load_state_dict(saved)
        again.outer.inner.place(again.outer._core.theta)
        again.outer._place_again()
        before = run.state()
        return before, again.state(), again.outer.end_round().committed, again.deltas

    for before, after, committed, deltas in run_ranks(6, check):
        assert committed
        for what in ("theta", "residual"):
            assert all(torch.equal(x, after[what][n]) for n, x in before[what].items())
        assert not any(d.any() for d in deltas.values())


def test_refusals_are_the_same_on_all_ranks():
    def check(rank):
        errors = []
        try:
            Site(Layout(replicas=MIXED[:2]))
        except ConfigError as error:
            errors.append(str(error))
        layout = Layout(replicas=MIXED)
        site = Site(layout)
        seed = 4 if rank == 1 else 3  # another start
        module = build(CFG, 16, seed, stage=site.stage, num_stages=site.replica.num_stages)
        stage = site.wrap(module, site.basis(DIM))
        try:
            MixedReplicas(stage, None, site, options=OPTIONS)
        except ContractError as error:
            errors.append(str(error))
        return errors

    for errors in run_ranks(4, check):
        assert "the layout has 2 ranks, 4 run" in errors[0]
        assert "shared weights of partition 0 differ" in errors[1]


def test_a_state_of_another_cut_is_refused():
    def check(rank):
        run = Run(rank, Layout(replicas=MIXED))
        state = run.outer.state_dict()
        state["core"] = dict(list(state["core"].items())[1:])
        with pytest.raises(CheckpointError, match="holds nothing of replica"):
            run.outer.load_state_dict(state)
        dist.barrier()

    run_ranks(4, check)
