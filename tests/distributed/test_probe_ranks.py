"""The probe on in-process ranks: what it measures, that ranks agree, fail and stop alike."""

import threading
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from thinwire.codecs import Blockwise, Cast
from thinwire.errors import ConfigError, ThinwireError
from thinwire.plan import Links, ProbeError, ProbeInterrupted, Work, probe, probe_links
from thinwire.plan.probe_clock import Clock
from thinwire.testing.ranks import run_ranks

# Threads have no send and receive; gloo ranks do (test_probe_command).
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def _caught(fn):
    def run(rank):
        try:
            return fn(rank)
        except ThinwireError as error:
            return error

    return run


def test_every_axis_and_collective_is_measured_and_equal_on_all_ranks(tmp_path):
    codecs = [Cast("bf16"), Blockwise(bits=4, block_size=64)]

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
        step = lambda: {"forward_s": 0.25}  # noqa: E731
        return probe(
            mesh,
            codecs=codecs,
            work=Work("mine", step, tokens=7, params=9),
            seconds=1.0,
            max_nbytes=2**24,
            collectives=COLLECTIVES,
            about={"machine": "here"},
        )

    first, *others = run_ranks(4, work)
    assert all(links == first for links in others)
    assert first.mesh == {"a": 2, "b": 1, "c": 2}
    assert list(first.groups) == ["a", "c"]
    assert first.group("a").ranks == ((0, 2), (1, 3))
    assert first.group("c").ranks == ((0, 1), (2, 3))
    for group in first.groups.values():
        assert tuple(group.collectives) == COLLECTIVES
        assert 0 <= group.wake_s < 1
        for name, speed in group.collectives.items():
            sizes = [point.nbytes for point in speed.points]
            assert sizes[0] == (512 if name == "all_gather" else 1024)
            assert all(big == 4 * small for small, big in pairwise(sizes))
            assert all(point.rounds >= 3 for point in speed.points)
    assert set(first.codecs) == {repr(codec) for codec in codecs} | {"select", "sparse"}
    assert first.compute.recipe == "mine"
    assert (first.compute.tokens, first.compute.params) == (7, 9)
    assert first.compute.forward_s == pytest.approx(first.compute.step_s)  # its one part
    first.write(tmp_path / "links.json")
    assert Links.read(tmp_path / "links.json") == first


def test_bytes_are_bounded(monkeypatch):
    clocks = []
    measure = probe_links.measure_groups

    def spy(groups, clock, **kwargs):
        clocks.append(clock)
        return measure(groups, clock, **kwargs)

    monkeypatch.setattr("thinwire.plan.probe_mesh.measure_groups", spy)

    def work(rank):
        return probe(seconds=5.0, max_nbytes=300_000, collectives=("all_gather", "all_reduce"))

    links = run_ranks(2, work)[0]
    assert links.mesh == {"world": 2}
    assert 0 < clocks[0].sent_nbytes <= 300_000
    largest = links.group("world").collectives["all_reduce"].points[-1].nbytes
    assert 1024 < largest < 300_000


def test_a_slow_message_gets_few_rounds_and_no_larger_size(monkeypatch):
    """20 ms latency: 3 calls of a cell cost 0.1 s, so half a second carries no ladder of sizes."""
    make = probe_links.MESSAGES["all_reduce"]

    def slow(group, nbytes, device):
        message = make(group, nbytes, device)

        def call():
            time.sleep(0.02 * nbytes / 1024)
            return message.call()

        return probe_links.Message(message.nbytes, message.sent_nbytes, call)

    monkeypatch.setitem(probe_links.MESSAGES, "all_reduce", slow)
    begin = time.perf_counter()
    links = run_ranks(2, lambda rank: probe(seconds=0.5, collectives=("all_reduce",)))[0]
    assert time.perf_counter() - begin < 5.0
    speed = links.group("world").collectives["all_reduce"]
    assert speed.latency_s >= 0.02
    assert len(speed.points) <= 2
    assert speed.points[0].rounds < 15


def test_the_slowest_rank_counts():
    def work(rank):
        def step():
            time.sleep(0.03 if rank == 1 else 0.0)

        return probe(work=Work("uneven", step), seconds=0.3, collectives=("all_gather",))

    assert all(links.compute.step_s >= 0.03 for links in run_ranks(2, work))


def test_one_rank_has_no_links():
    links = run_ranks(1, lambda rank: probe(codecs=[Cast("bf16")], seconds=0.2))[0]
    assert links.groups == {}
    assert links.mesh == {"world": 1}
    assert list(links.codecs) == [repr(Cast("bf16")), "select", "sparse"]


def test_a_step_that_fails_on_one_rank_fails_on_all():
    def work(rank):
        calls = []

        def step():
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                raise ValueError("no data\nleft")

        return probe(work=Work("mod:fn", step), seconds=0.3, collectives=("all_gather",))

    errors = run_ranks(3, _caught(work))
    assert [type(e) for e in errors] == [ProbeError] * 3
    assert {str(e) for e in errors} == {"rank 1: step of mod:fn failed: ValueError: no data left"}


def test_parts_of_a_step_add_up_to_it():
    """Each part has a slowest rank of its own: their largest values would add up to more."""

    def work(rank):
        def step():
            time.sleep(0.01)
            return {"forward_s": 0.006 + 0.01 * rank, "backward_s": 0.016 - 0.01 * rank}

        return probe(work=Work("mod:fn", step), seconds=0.3, collectives=("all_gather",))

    compute = run_ranks(2, work)[0].compute
    assert compute.forward_s + compute.backward_s == pytest.approx(compute.step_s)
    assert compute.forward_s == pytest.approx(compute.backward_s)


def test_without_a_process_group_the_probe_says_so():
    with pytest.raises(ConfigError, match="needs a process group"):
        probe(seconds=0.1)


def test_a_codec_that_fails_names_itself():
    class Broken(Cast):
        def encode(self, x, *, out=None):
            raise RuntimeError("no kernel")

    def work(rank):
        return probe(codecs=[Broken("bf16")], seconds=0.3, collectives=("all_gather",))

    errors = run_ranks(2, _caught(work))
    assert all(
        "rank 0: encode of" in str(e) and "Broken(" in str(e) and "no kernel" in str(e)
        for e in errors
    )


def test_an_interruption_of_one_rank_stops_all():
    def work(rank):
        clock = Clock(1.0, 10, torch.device("cpu"))
        clock.agree([1.0])
        clock.interrupted = rank == 1
        clock.agree([1.0])

    errors = run_ranks(3, _caught(work))
    assert [type(e) for e in errors] == [ProbeInterrupted] * 3
    assert errors[0].status == 130
    assert "nothing was written" in str(errors[0])


def test_agreement_is_the_largest_of_all_ranks():
    def work(rank):
        clock = Clock(1.0, 10, torch.device("cpu"))
        return clock.agree([float(rank), -float(rank)])

    assert run_ranks(3, work) == [[2.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seconds": 0.0}, "the probe's seconds must be above 0 and finite, got 0.0"),
        ({"seconds": float("nan")}, "the probe's seconds must be above 0 and finite, got nan"),
        ({"max_nbytes": -1}, "the probe's max_nbytes must be above 0 and finite, got -1"),
        ({"collectives": ("gather",)}, "unknown collective 'gather'"),
    ],
)
def test_bad_arguments(kwargs, message):
    errors = run_ranks(2, _caught(lambda rank: probe(**kwargs)))
    assert all(isinstance(e, ConfigError) and message in str(e) for e in errors)


def test_a_mesh_needs_names():
    def work(rank):
        return probe(init_device_mesh("cpu", (2,)), seconds=0.1)

    errors = run_ranks(2, _caught(work))
    assert all("needs mesh_dim_names" in str(e) for e in errors)


def test_signals_are_left_alone_off_the_main_thread():
    assert threading.current_thread() is threading.main_thread()
    run_ranks(2, lambda rank: probe(seconds=0.1, collectives=("all_gather",)))


def test_the_wake_is_what_a_message_takes_longer_after_computation(monkeypatch):
    """A collective that takes 30 ms where its rank has just computed, and 10 ms else."""

    class Message:
        sent_nbytes = 1
        computed = False

        def call(self):
            time.sleep(0.03 if self.computed else 0.01)
            self.computed = False
            dist.barrier()

    messages = {}

    def all_gather(group, nbytes, device):
        return messages.setdefault(dist.get_rank(), Message())

    def multiply(x, y):
        messages[dist.get_rank()].computed = True
        time.sleep(0.001)

    monkeypatch.setitem(probe_links.MESSAGES, "all_gather", all_gather)
    monkeypatch.setattr(probe_links.torch, "mm", multiply)

    def work(rank):
        clock = Clock(5.0, 2**20, torch.device("cpu"))
        group = dist.group.WORLD
        return probe_links.measure_wakes({"dp_shard": group}, clock), clock.sent_nbytes

    for found, sent in run_ranks(2, work):
        assert found["dp_shard"] == pytest.approx(0.02, rel=0.75)
        assert 10 <= sent <= 64  # from 3 to 30 turns twice, as time allows
