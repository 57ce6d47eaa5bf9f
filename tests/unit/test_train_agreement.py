"""Ranks that were started apart: the same settings, the same text; rounds that are cut short."""

from dataclasses import replace

import pytest

from thinwire.errors import ConfigError, DataError
from thinwire.testing.ranks import run_ranks
from thinwire.train.agreement import load_alike
from thinwire.train.parse import from_dict
from thinwire.train.saved import lost_steps

BASE = from_dict({"data": {"source": "synthetic"}, "systems": {"outer": {"method": "sparseloco"}}})


def refused(config_of, ranks=3):
    """Return each rank's complaint."""

    def work(rank):
        with pytest.raises((ConfigError, DataError)) as caught:
            load_alike(config_of(rank))
        return str(caught.value)

    return run_ranks(ranks, work)


def test_another_sync_every_is_refused_on_all_ranks():
    def config(rank):
        outer = replace(BASE.systems.outer, sync_every=15 if rank == 2 else 30)
        return replace(BASE, systems=replace(BASE.systems, outer=outer))

    assert (
        refused(config)
        == [
            "systems.outer.sync_every is 30 on rank 0 and 15 on rank 2: start all ranks with the "
            "same settings"
        ]
        * 3
    )


def test_another_or_no_text_is_refused_on_all_ranks(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name * 100)

    def config(names):
        return lambda rank: replace(
            BASE, data=replace(BASE.data, source=str(tmp_path / names[rank]))
        )

    assert (
        refused(config("aba"))
        == [
            "data.source holds another text on rank 1 than on rank 0: give all ranks the same files"
        ]
        * 3
    )
    missing = f"data source {str(tmp_path / 'c')!r} is no file or folder here"
    messages = refused(config("aac"))
    assert all(missing in message for message in messages)
    assert messages[0].startswith("rank 2: ")


def test_where_a_machine_keeps_things_may_differ(tmp_path):
    (tmp_path / "a").write_text("a" * 100)
    (tmp_path / "b").write_text("a" * 100)

    def work(rank):
        data = replace(BASE.data, source=str(tmp_path / "ab"[rank]))
        return load_alike(replace(BASE, out=f"runs/{rank}", data=data)).train.size

    assert run_ranks(2, work) == [90, 90]


@pytest.mark.parametrize(("step", "now", "says"), [(40, 2, True), (60, 2, False), (40, 4, False)])
def test_fewer_replicas_in_the_middle_of_a_round_are_told(step, now, says):
    line = lost_steps({"mesh": {"dp_replicate": 4}, "step": step}, BASE, now)
    assert bool(line) == says
    if says:
        assert line.startswith(
            "resumed on 2 of 4 replicas, 10 steps into a round: what replicas 2, 3 learned in "
            "these steps is lost"
        )
