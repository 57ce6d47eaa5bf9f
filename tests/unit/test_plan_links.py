"""links.json: written, read, refused in one line, and read between its points."""

import json
import math

import pytest

from thinwire.errors import ConfigError, RunError
from thinwire.plan import CodecSpeed, Compute, Group, Links, Point, Speed


def _links() -> Links:
    speed = Speed.fit(
        [
            Point(nbytes=1000, median_s=0.001, iqr_s=0.0001, rounds=5),
            Point(nbytes=11_000, median_s=0.002, rounds=5),
            Point(nbytes=101_000, median_s=0.011, rounds=3),
        ]
    )
    return Links(
        world_size=4,
        mesh={"pp": 1, "dp_replicate": 2, "dp_shard": 2, "tp": 1},
        groups={
            "dp_replicate": Group(
                ranks=((0, 2), (1, 3)), size=2, collectives={"all_reduce": speed}
            ),
            "dp_shard": Group(ranks=((0, 1), (2, 3)), size=2, collectives={"all_gather": speed}),
        },
        codecs={
            "Cast('bf16')": CodecSpeed(
                encode_latency_s=1e-6,
                encode_s_per_value=1e-9,
                decode_latency_s=2e-6,
                decode_s_per_value=3e-9,
            )
        },
        compute=Compute(recipe="dense-fsdp", step_s=0.25, rounds=3, tokens=1024, params=10),
        about={"machine": {"cpu": "one"}},
    )


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "links.json"
    _links().write(path)
    assert Links.read(path) == _links()
    assert '\n  "world_size": 4' in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["links.json"]


def test_plain_values_round_trip():
    values = _links().to_dict()
    assert values["groups"]["dp_shard"]["ranks"] == [[0, 1], [2, 3]]
    assert Links.from_dict(values) == _links()


def test_files_without_a_wake_are_read():
    values = _links().to_dict()
    del values["groups"]["dp_shard"]["wake_s"]
    assert Links.from_dict(values) == _links()
    values["groups"]["dp_shard"]["wake_s"] = -1.0
    with pytest.raises(ConfigError, match=r"groups.dp_shard: wake_s must be .* at least 0"):
        Links.from_dict(values)


def test_seconds_between_and_beyond_points():
    speed = _links().group("dp_shard").collectives["all_gather"]
    assert speed.latency_s == 0.001
    assert speed.bytes_per_s == pytest.approx(1e7)
    assert speed.seconds(1) == speed.seconds(1000) == 0.001
    assert speed.seconds(6000) == pytest.approx(0.0015)
    assert speed.seconds(11_000) == pytest.approx(0.002)
    assert speed.seconds(201_000) == pytest.approx(0.021)


def test_seconds_are_monotone_over_noisy_points():
    times = [0.004, 0.001, 0.006, 0.005, 0.02]
    speed = Speed.fit([Point(nbytes=10**i, median_s=t) for i, t in enumerate(times, start=1)])
    found = [speed.seconds(n) for n in range(1, 300_000, 997)]
    assert found == sorted(found)
    assert speed.latency_s == speed.seconds(10) == speed.seconds(100) == 0.001
    assert speed.seconds(1000) == speed.seconds(10_000) == 0.005


def test_one_point_and_falling_points_still_give_a_rate():
    assert Speed.fit([Point(nbytes=100, median_s=0.1)]).bytes_per_s == pytest.approx(1000)
    falling = Speed.fit([Point(nbytes=1, median_s=0.2), Point(nbytes=100, median_s=0.1)])
    assert falling.bytes_per_s == pytest.approx(1000)


def test_a_fast_large_message_does_not_set_the_rate():
    """A line through the larger half would be flat: the link would look 50 times as fast."""
    times = {512: 1e-4, 2048: 1e-4, 8192: 2e-4, 65_536: 3.9e-3, 262_144: 3.95e-3, 1_048_576: 4e-3}
    speed = Speed.fit([Point(nbytes=n, median_s=t) for n, t in times.items()])
    chord = (1_048_576 - 512) / (4e-3 - 1e-4)
    assert speed.bytes_per_s == pytest.approx(2 * chord)
    assert speed.disturbed == 1.0
    slow = Speed.fit([Point(nbytes=10, median_s=0.3), Point(nbytes=100, median_s=0.1)])
    assert slow.disturbed == pytest.approx(3.0)


def test_ideal_speed():
    speed = Speed.ideal(0.001, 1e6)
    assert speed.seconds(500_000) == pytest.approx(0.501)
    assert speed.seconds(2**31) == pytest.approx(0.001 + 2**31 / 1e6)
    with pytest.raises(ConfigError, match="bytes_per_s must be a finite number above 0, got 0"):
        Speed.ideal(0.001, 0)


def test_codec_seconds():
    codec = _links().codecs["Cast('bf16')"]
    assert codec.encode_s(1000) == pytest.approx(2e-6)
    assert codec.decode_s(1000) == pytest.approx(5e-6)


def test_missing_and_partial_file(tmp_path):
    path = tmp_path / "links.json"
    with pytest.raises(ConfigError, match="does not exist: `thinwire probe"):
        Links.read(path)
    _links().write(path)
    path.write_text(path.read_text()[:200])
    with pytest.raises(ConfigError, match="is no whole JSON file"):
        Links.read(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is no whole JSON file"):
        Links.read(path)
    path.write_text('{"version": 1, "world_size": 4}')
    with pytest.raises(ConfigError, match="mesh is missing: the file is partial"):
        Links.read(path)
    with pytest.raises(RunError, match="cannot be written"):
        _links().write(path / "below-a-file.json")


def _change(*keys, value):
    values = json.loads(json.dumps(_links().to_dict()))
    node = values
    for key in keys[:-1]:
        node = node[key]
    if value is None:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    return values


_SHARD = ("groups", "dp_shard", "collectives", "all_gather")


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("version",), 2, "version 2 is unknown"),
        (("version",), True, "version True is unknown"),
        (("speeds",), {}, "speeds is unknown: known: world_size, mesh"),
        (("groups", "dp_shard", "speed"), 1, r"groups.dp_shard.speed is unknown: known: ranks"),
        ((*_SHARD, "bytes_per_s"), 10**400, "bytes_per_s is too large a number"),
        (("codecs",), None, "codecs is missing: the file is partial"),
        (("mesh",), 3, "mesh must be a table"),
        (("mesh", "tp"), 3, "doesn't fit world_size 4"),
        (("world_size",), "4", "world_size must be of type int"),
        (("groups", "dp_shard"), None, "groups.dp_shard is missing: mesh.dp_shard has 2 ranks"),
        (("groups", "dp_shard", "ranks"), [[0, 1], [2, 9]], "must name each of the 4 ranks once"),
        (("groups", "dp_shard", "ranks"), [[0, 1, 2]], "lists of 2 ranks each"),
        (("groups", "dp_shard", "ranks"), 5, "must be lists of ranks"),
        (("groups", "dp_shard", "size"), None, "groups.dp_shard.size is missing"),
        (("groups", "dp_shard", "collectives"), {}, "must hold at least one of"),
        (
            ("groups", "dp_shard", "collectives"),
            {"x": {"points": []}},
            "at least one measurement|x",
        ),
        ((*_SHARD, "bytes_per_s"), 0, "bytes_per_s must be a finite number above 0, got 0"),
        ((*_SHARD, "bytes_per_s"), -1.0, "bytes_per_s must be a finite number above 0, got -1"),
        ((*_SHARD, "bytes_per_s"), math.nan, "above 0, got nan"),
        ((*_SHARD, "bytes_per_s"), "fast", "bytes_per_s must be of type float, got 'fast'"),
        ((*_SHARD, "bytes_per_s"), None, "bytes_per_s is missing: the file is partial"),
        ((*_SHARD, "speed"), 1, "speed is unknown"),
        ((*_SHARD, "points"), [], "at least one measurement"),
        ((*_SHARD, "points", 0, "median_s"), 0.0, r"points\[0\]: median_s must be a finite"),
        ((*_SHARD, "points", 0, "nbytes"), 10**6, "points must rise in nbytes"),
        ((*_SHARD, "points", 0, "nbytes"), 0, "nbytes and rounds must be at least 1"),
        (("codecs", "Cast('bf16')", "encode_s_per_value"), -1e-9, "encode_s_per_value must be"),
        (("compute", "step_s"), 0.0, "compute: step_s must be a finite number above 0"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, keys, value, message):
    path = tmp_path / "links.json"
    path.write_text(json.dumps(_change(*keys, value=value)))
    with pytest.raises(ConfigError, match=message) as caught:
        Links.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unmeasured_collective_and_axis():
    links = _links()
    with pytest.raises(ConfigError, match="hold no send_recv: measured were all_gather"):
        links.group("dp_shard").seconds("send_recv", 10)
    with pytest.raises(ConfigError, match="hold no group 'tp'"):
        links.group("tp")
