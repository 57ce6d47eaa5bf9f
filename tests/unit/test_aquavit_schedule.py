"""The schedule's numbers, computed from the published formula and the nearest-level rule."""

import pytest

from thinwire.aquavit import Level, Schedule
from thinwire.aquavit.schedule import LEVEL_PRESETS
from thinwire.errors import ConfigError

FULL18_SWITCHES = {
    22: (2, 512), 24: (2, 256), 27: (2, 128), 34: (2, 64), 49: (2, 32),
    88: (4, 1024), 124: (4, 512), 128: (4, 256), 135: (4, 128), 152: (4, 64), 190: (4, 32),
    304: (6, 1024), 435: (6, 512), 450: (6, 256), 483: (6, 128), 559: (6, 64), 780: (6, 32),
}  # fmt: skip
COARSE9_SWITCHES = {
    22: (2, 512), 40: (2, 32), 88: (4, 1024), 124: (4, 512), 166: (4, 32),
    304: (6, 1024), 435: (6, 512), 638: (6, 32),
}  # fmt: skip


def walk(schedule: Schedule, steps: range) -> list[Level]:
    index, out = -1, []
    for step in steps:
        index = schedule.index(step, index)
        out.append(schedule.grid[index])
    return out


def mean_bpw(levels: list[Level]) -> float:
    return sum(level.bpw for level in levels) / len(levels)


@pytest.mark.parametrize(
    ("preset", "switches"), [("full18", FULL18_SWITCHES), ("coarse9", COARSE9_SWITCHES)]
)
def test_switch_points_are_exact(preset, switches):
    levels = walk(Schedule(1000, levels=preset), range(1000))
    assert levels[0] == Level(2, 1024)
    found = {
        s: (levels[s].bits, levels[s].block_size)
        for s in range(1, 1000)
        if levels[s] != levels[s - 1]
    }
    assert found == switches


def test_mean_bits_of_the_default_run():
    levels = walk(Schedule(1000), range(1000))
    assert mean_bpw(levels) == pytest.approx(5.76359375, abs=1e-12)
    assert mean_bpw(levels[:500]) == pytest.approx(4.8366875, abs=1e-12)
    assert mean_bpw(levels[500:]) == pytest.approx(6.6905, abs=1e-12)
    assert mean_bpw(walk(Schedule(1000), range(1, 1001))) == pytest.approx(5.7685625, abs=1e-12)
    widths = [level.bits for level in levels]
    assert [widths.count(b) for b in (2, 4, 6)] == [88, 216, 696]


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (Schedule(100), 5.748125),
        (Schedule(238), 5.75657),
        (Schedule(1000, levels="coarse9"), 5.78634375),
        (Schedule(1000, pick="floor"), 5.44303),
        (Schedule(1000, pick="ceil"), 5.99697),
        (Schedule(1000, curve="linear"), 4.513),
    ],
    ids=["T=100", "T=238", "coarse9", "floor", "ceil", "linear"],
)
def test_mean_bits_of_other_rules(schedule, want):
    assert mean_bpw(walk(schedule, range(schedule.total_steps))) == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize(
    ("a", "c", "mean", "end"),
    [
        (0.9, 2, 4.5055, 5.931),
        (0.9, 10, 6.5044, 7.450),
        (1, 5, 5.8474, 7.0),
        (1.5, 5, 6.2389, None),
    ],
)
def test_raw_targets_clamped_to_the_24_levels(a, c, mean, end):
    schedule = Schedule(1000, a=a, c=c)
    targets = [min(max(schedule.target(s), 2.03125), 9.0) for s in range(1000)]
    assert sum(targets) / 1000 == pytest.approx(mean, abs=2e-3)
    if end is not None:
        assert schedule.target(1000) == pytest.approx(end, abs=1e-3)


def test_adding_8_bit_levels_changes_nothing():
    wide = [*LEVEL_PRESETS["full18"], *((8, g) for g in (1024, 512, 256, 128, 64, 32))]
    assert walk(Schedule(1000, levels=wide), range(1000)) == walk(Schedule(1000), range(1000))


def test_widths_alone_round_up():
    widths = [(b, 512) for b in (2, 4, 6, 8)]
    levels = walk(Schedule(1000, levels=widths, pick="ceil", measure="payload"), range(1000))
    assert sum(level.bits for level in levels) / 1000 == pytest.approx(6.874, abs=1e-9)
    assert [next(i for i, v in enumerate(levels) if v.bits == b) for b in (4, 6, 8)] == [
        21,
        121,
        421,
    ]


def test_bits_per_weight_table():
    table = {(2, 1024): 2.03125, (4, 128): 4.25, (6, 32): 7.0, (8, 64): 8.5, (8, 2048): 8.015625}
    for (bits, block), bpw in table.items():
        assert Level(bits, block).bpw == bpw


def test_precision_never_descends_and_stays_past_the_end():
    schedule = Schedule(100)
    index = schedule.index(90, -1)
    assert schedule.index(10, index) == index
    assert schedule.grid[schedule.index(10_000)] == Level(6, 32)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"total_steps": 0}, "total_steps"),
        ({"total_steps": 10, "levels": "full19"}, "full18"),
        ({"total_steps": 10, "levels": ()}, "at least one"),
        ({"total_steps": 10, "curve": "cubic"}, "hyperbolic"),
        ({"total_steps": 10, "a": 0.0}, "a > 0"),
    ],
)
def test_bad_schedules_are_refused(kwargs, match):
    with pytest.raises(ConfigError, match=match):
        Schedule(**kwargs)
