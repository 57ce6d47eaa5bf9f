"""Rounds over a store, sites as threads: absent, late, slow and joining replicas."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore

from tests.distributed.test_sparseloco_ranks import adam, net, train, weights
from thinwire import Ledger
from thinwire.errors import ConfigError, ContractError, PeerError
from thinwire.sparseloco import (
    Deadline,
    Options,
    Partition,
    SparseLoCo,
    StoreTransport,
    run_round,
)

FAST = {"poll_s": 0.002}


class Sites:
    """Run functions as sites of one store, one thread each."""

    def __init__(self, store=None):
        self.store = store or HashStore()
        self.store.set_timeout(timedelta(seconds=20))

    def run(self, *works, timeout_s=60.0):
        results, errors = [None] * len(works), []

        def call(i, work):
            try:
                results[i] = work()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=a, daemon=True) for a in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        assert not any(thread.is_alive() for thread in threads), "a site hangs"
        if errors:
            raise errors[0]
        return results

    def part(self, replica, roster, options=None, **more):
        torch.manual_seed(0)
        return Partition(
            {"w": torch.ones(64, 70), "b": torch.ones(5)},
            options or Options(),
            replica=replica,
            roster=roster,
            **more,
        )

    def transport(self, replica, roster, **more):
        return StoreTransport(self.store, replica, roster, **FAST | {"timeout_s": 20.0} | more)


def delta(seed):
    generator = torch.Generator().manual_seed(seed)
    values = {"w": torch.randn(64, 70, generator=generator), "b": torch.ones(5)}
    return lambda name: 1e-3 * values[name]


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_rounds_equal_on_all_sites(kind, tmp_path):
    store = HashStore() if kind == "hash" else FileStore(str(tmp_path / "store"), -1)
    sites, roster = Sites(store), (0, 2, 3)

    def site(replica):
        part, ledger = sites.part(replica, roster), Ledger()
        link = sites.transport(replica, roster)
        link.start(part)
        outcomes = [
            run_round([part], [delta(10 * replica + t)], 7, link, ledger=ledger) for t in range(4)
        ]
        return part, outcomes, ledger

    results = sites.run(*(lambda r=r: site(r) for r in roster))
    for part, outcomes, ledger in results:
        assert [o.accepted for o in outcomes] == [roster] * 4
        assert torch.equal(part.theta["w"], results[0][0].theta["w"])
        assert outcomes[0].received_bytes == 2 * outcomes[0].sent_bytes
        assert ledger["outer"].wire_bytes == 4 * outcomes[0].received_bytes
    keys = [f"thinwire/run/r{t}/s0/m0/pieces" for t in range(4)]
    assert [sites.store.check([k]) for k in keys] == [False, False, True, True]


def test_sites_that_start_apart_are_an_error_on_all():
    sites = Sites()

    def site(replica):
        part = sites.part(replica, (0, 1))
        part.theta["w"] = part.theta["w"] + replica
        with pytest.raises(ContractError, match="other weights"):
            sites.transport(replica, (0, 1)).start(part)

    sites.run(lambda: site(0), lambda: site(1))
    with pytest.raises(PeerError, match=r"replicas \[1\] did not start"):
        Sites().transport(0, (0, 1), timeout_s=0.1).start(sites.part(0, (0, 1)))


def test_an_absent_site_is_waited_for_once():
    sites, roster = Sites(), (0, 1, 2)

    def site(replica):
        part = sites.part(replica, roster)
        link = sites.transport(replica, roster, timeout_s=2.0)
        outcomes, seconds = [], []
        for t in range(3):
            start = time.monotonic()
            outcomes.append(run_round([part], [delta(10 * replica + t)], 1, link))
            seconds.append(time.monotonic() - start)
        return part, outcomes, seconds, link.awaited

    results = sites.run(lambda: site(0), lambda: site(1))
    for part, outcomes, seconds, awaited in results:
        assert [o.accepted for o in outcomes] == [(0, 1)] * 3
        assert outcomes[0].reasons == {2: "no message"}
        assert seconds[0] > 1.9
        assert max(seconds[1:]) < 1.5
        assert awaited == {0, 1}
        assert torch.equal(part.theta["w"], results[0][0].theta["w"])


def test_too_few_sites_abort():
    sites = Sites()
    part = sites.part(0, (0, 1), Options(min_quorum=2))
    outcome = run_round([part], [delta(1)], 1, sites.transport(0, (0, 1), timeout_s=0.1))
    assert not outcome.committed
    assert "min_quorum" in outcome.why
    assert not part.residual["w"].any()


def test_a_late_site_follows_and_is_awaited_again():
    sites, roster = Sites(), (0, 1)
    done, followed = threading.Event(), threading.Event()

    def prompt():
        part, link = sites.part(0, roster), sites.transport(0, roster, timeout_s=0.2)
        first = run_round([part], [delta(1)], 1, link)
        done.set()
        followed.wait(20)  # its own inner steps, while the late site catches up
        link.timeout_s = 20.0
        return part, [first, run_round([part], [delta(2)], 1, link)]

    def late():
        part, link = sites.part(1, roster), sites.transport(1, roster)
        done.wait()
        first = run_round([part], [delta(3)], 1, link)
        owed = {n: e.clone() for n, e in part.residual.items()}
        followed.set()
        time.sleep(0.5)  # slower than the prompt site, which waits this time
        return part, [first, run_round([part], [delta(4)], 1, link)], owed

    (a, (a1, a2)), (b, (b1, b2), owed) = sites.run(prompt, late)
    assert (a1.accepted, a1.own) == ((0,), "sent")
    assert (b1.accepted, b1.own) == ((0,), "left out")
    assert torch.equal(owed["w"], delta(3)("w"))
    assert a2.accepted == b2.accepted == (0, 1)
    assert torch.equal(a.theta["w"], b.theta["w"])


def test_a_site_too_far_behind_must_join_anew():
    sites, roster = Sites(), (0, 1)
    part, link = sites.part(0, roster), sites.transport(0, roster, timeout_s=0.1)
    for t in range(4):
        run_round([part], [delta(t)], 1, link)
    stale, own = sites.part(1, roster), sites.transport(1, roster)
    before = stale.theta["w"]
    with pytest.raises(PeerError, match="join anew"):
        run_round([stale], [delta(9)], 1, own)
    assert stale.theta["w"] is before
    assert stale.round == 0


def test_a_site_that_reads_damage_makes_all_abort():
    sites, roster = Sites(), (0, 1)

    def site(replica):
        part, link = sites.part(replica, roster), sites.transport(replica, roster)
        real = link._download

        def damaged(key, device):
            data = real(key, device)
            if replica == 1 and "r0" in key:
                data[200] ^= 1
            return data

        link._download = damaged
        return part, [run_round([part], [delta(replica + t)], 1, link) for t in range(2)]

    results = sites.run(lambda: site(0), lambda: site(1))
    for part, (first, second) in results:
        assert "disagree" in first.why
        assert second.committed
        assert torch.equal(part.theta["w"], results[0][0].theta["w"])


def test_a_rank_that_missed_the_vote_and_read_otherwise_cannot_follow():
    sites, roster = Sites(), (0, 1)
    part, link = sites.part(0, roster), sites.transport(0, roster, timeout_s=0.1)
    run_round([part], [delta(1)], 1, link)
    other, own = sites.part(1, roster), sites.transport(1, roster)
    real = own._download

    def damaged(key, device):
        data = real(key, device)
        data[200] ^= 1
        return data

    own._download = damaged
    with pytest.raises(PeerError, match="join them anew"):
        run_round([other], [delta(2)], 1, own)
    assert (other.round, other.abstains) == (0, "")


def test_a_site_that_dies_before_the_vote_is_still_in_the_mean():
    """Its message was whole and all others read the same one: they commit with it."""
    sites, roster = Sites(), (0, 1, 2)

    def survivor(replica):
        part, link = sites.part(replica, roster), sites.transport(replica, roster, timeout_s=1.0)
        outcomes = [run_round([part], [delta(10 * replica + t)], 1, link) for t in range(2)]
        return part, outcomes

    def victim():
        part, link = sites.part(1, roster), sites.transport(1, roster)
        link.exchange(part, part.prepare(delta(10), 1))

    (a, first), _, (b, second) = sites.run(lambda: survivor(0), victim, lambda: survivor(2))
    assert [o.accepted for o in first] == [o.accepted for o in second] == [(0, 1, 2), (0, 2)]
    assert torch.equal(a.theta["w"], b.theta["w"])


def test_stages_on_several_ranks_vote_together():
    """Replica 0 holds two stages on one rank, replica 1 on two ranks."""
    sites, roster = Sites(), (0, 1)

    def rank(replica, stages, member):
        parts = [sites.part(replica, roster, Options(min_quorum=2), stage=s) for s in stages]
        link = sites.transport(replica, roster, member=member, members={0: 1, 1: 2})
        seeds = [100 * replica + s for s in stages]
        first = run_round(parts, [delta(s) for s in seeds], 1, link)

        def broken(name):
            return delta(1)(name) * (torch.nan if (replica, stages) == (1, [1]) else 1.0)

        second = run_round(parts, [broken] * len(parts), 1, link)
        return parts, first, second

    works = ((0, [0, 1], 0), (1, [0], 0), (1, [1], 1))
    results = sites.run(*(lambda w=w: rank(*w) for w in works), timeout_s=90)
    for _, first, second in results:
        assert first.committed
        assert first.accepted == (0, 1)
        assert not second.committed  # stage 1 lacks replica 1: both stages abort
    (whole, _, _), (front, _, _), (back, _, _) = results
    assert torch.equal(whole[0].theta["w"], front[0].theta["w"])
    assert torch.equal(whole[1].theta["w"], back[0].theta["w"])


class _Gone:
    """A store whose connection broke after some calls."""

    def __init__(self, store, calls):
        self._store, self._left = store, calls

    def __getattr__(self, name):
        self._left -= 1
        if self._left < 0:
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("calls", [0, 2, 7, 10])
def test_a_lost_store_is_a_peer_error_and_changes_nothing(calls):
    sites = Sites()
    part, link = sites.part(0, (0,)), sites.transport(0, (0,))
    run_round([part], [delta(0)], 1, link)
    theta, residual = part.theta["w"], part.residual["w"]
    link.store = _Gone(link.store, calls)
    with pytest.raises(PeerError, match="the store failed during"):
        run_round([part], [delta(1)], 1, link)
    assert part.theta["w"] is theta
    assert part.residual["w"] is residual
    assert part.round == 1


# -- joining -----------------------------------------------------------------------------------


def test_a_site_joins_a_run_under_way():
    """Weights, round and settings from two replicas; residual 0; no share in the first round."""
    sites, roster, going = Sites(), (0, 1, 2), threading.Event()

    def member(replica):
        part, link = sites.part(replica, roster), sites.transport(replica, roster, timeout_s=5)
        link.awaited = {0, 1}
        outcomes = []
        for t in range(400):
            outcomes.append(run_round([part], [delta(10 * replica + t)], 1, link))
            going.set()
            time.sleep(0.02)
            if t > 3 and [o.accepted for o in outcomes[-2:]] == [(0, 1, 2)] * 2:
                break
        return part, outcomes

    def newcomer():
        part, link = sites.part(2, roster), sites.transport(2, roster, timeout_s=5)
        part.theta["w"] += 5  # whatever it started from
        part.residual["w"] += 1
        going.wait()
        link.join([part])
        assert part.round > 0
        assert part.commits > 0
        assert not part.residual["w"].any()
        outcomes = [run_round([part], [delta(1)], 1, link, abstain="just joined")]
        outcomes += [run_round([part], [delta(50 + t)], 1, link) for t in range(2)]
        return part, outcomes

    (a, first), (b, _), (c, last) = sites.run(lambda: member(0), lambda: member(1), newcomer)
    assert torch.equal(a.theta["w"], b.theta["w"])
    assert torch.equal(a.theta["w"], c.theta["w"])
    assert last[0].accepted == (0, 1)
    assert last[0].own == "abstained: just joined"
    assert all(o.accepted == (0, 1, 2) for o in (first[-1], last[-1]))


def test_joining_the_wrong_run_or_none_is_an_error():
    sites, roster = Sites(), (0, 1)
    with pytest.raises(PeerError, match="no replica"):
        sites.transport(1, roster, timeout_s=0.1).join([sites.part(1, roster)])

    tried = threading.Event()

    def member():
        part, link = sites.part(0, roster), sites.transport(0, roster, timeout_s=0.05)
        while not tried.is_set():
            run_round([part], [delta(1)], 1, link)

    def newcomer():
        try:
            part = sites.part(1, roster, Options(alpha=0.5))
            with pytest.raises(ConfigError, match="other options"):
                sites.transport(1, roster).join([part])
            damaged = sites.transport(1, roster)
            damaged.store = _Damaged(damaged.store)
            with pytest.raises(PeerError, match="hash"):
                damaged.join([sites.part(1, roster)])
        finally:
            tried.set()

    sites.run(member, newcomer)


class _Damaged:
    """A store that returns zeros for the first piece of joiners' weights."""

    def __init__(self, store):
        self._store = store

    def get(self, key):
        data = self._store.get(key)
        return bytes(len(data)) if key.endswith("theta0/0") else data

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_join_needs_a_store():
    from thinwire.testing.ranks import run_ranks

    def work(rank):
        model = net()
        with pytest.raises(ConfigError, match="StoreTransport"):
            SparseLoCo(model, adam(model), join=True)

    run_ranks(1, work)
    with pytest.raises(ConfigError, match="is not among"):
        StoreTransport(HashStore(), 3, (0, 1))


# -- deadlines ---------------------------------------------------------------------------------


def test_deadline_is_median_plus_spread():
    deadline = Deadline(c=4.0, window=2)
    assert deadline.seconds is None
    deadline.observe([10.0, 11.0, 12.0])
    assert deadline.seconds == 15.0
    deadline.observe([10.0, 10.0, 10.0])
    assert deadline.seconds == pytest.approx(10.0 + 4 * 0.5)  # the spread's floor: 5 %
    deadline.observe([])
    deadline.observe([1.0])
    deadline.observe([1.0])
    assert deadline.seconds == pytest.approx(1.2)
    assert Deadline(floor_s=9.0, c=1.0).seconds is None
    with pytest.raises(ConfigError, match="c must be"):
        Deadline(c=0)


def test_a_straggler_closes_its_round_with_the_steps_it_has():
    sites, roster, steps = Sites(), (0, 1, 2), 6

    def site(replica):
        with LOCK:
            model = net()
        optimizer = adam(model)
        link = sites.transport(replica, roster, deadline=Deadline(c=2.0, floor_s=1.5), grace_s=10.0)
        outer = SparseLoCo(model, optimizer, sync_every=steps, transport=link)
        counts = []
        for t in range(3):
            committed = outer.rounds["committed"]
            done = 0
            while outer.rounds["committed"] == committed:
                if replica == 2 and t > 0:
                    time.sleep(0.6)
                train(model, optimizer, replica, 1, start=10 * t + done)
                done += 1
            counts.append(done)
        return counts, weights(model), outer.last

    results = sites.run(*(lambda r=r: site(r) for r in roster))
    assert results[0][0] == results[1][0] == [steps] * 3
    slow = results[2][0]
    assert slow[0] == steps
    assert 1 <= slow[1] < steps
    for _, held, outcome in results:
        assert outcome.accepted == roster
        assert all(torch.equal(x, results[0][1][n]) for n, x in held.items())


LOCK = threading.Lock()
