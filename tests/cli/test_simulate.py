"""`thinwire simulate`: scaling, stragglers, sites, the page, and one line for every mistake."""

import json
import time
from pathlib import Path

import pytest

from thinwire import cli
from thinwire.errors import ConfigError
from thinwire.plan import Cluster
from thinwire.plan.simulate import Stragglers
from thinwire.train.parse import from_dict
from thinwire.train.recipes import recipe
from thinwire.train.simulate_command import simulate

CLUSTER = {
    "nodes": 2,
    "devices_per_node": 8,
    "inside": {"gbit_per_s": 2400.0, "latency_s": 3e-6},
    "across": {"gbit_per_s": 100.0, "latency_s": 5e-6},
    "device": {"tflops": 50.0, "memory_gbyte_per_s": 900.0},
}
SITES = {
    "count": 4,
    "up_gbit_per_s": 0.5,
    "down_gbit_per_s": 0.5,
    "latency_s": 0.05,
}
LARGE = {
    "model": {"dim": 1024, "num_layers": 8, "num_heads": 8, "hidden_dim": 2816},
    "data": {"seq_len_tokens": 1024, "batch_seqs": 8},
    "compute": {"dtype": "bfloat16"},
}
SITES_DATA = {"seq_len_tokens": 1024, "batch_seqs": 64}
RANKS = (2, 8, 64, 512, 10_000)


def run(name="aquavit", cluster=None, **changes):
    settings = {"ranks": RANKS, "gbit_per_s": (1.0, 10.0, 100.0)} | changes
    made = Cluster.from_dict(cluster or CLUSTER)
    return simulate(from_dict(LARGE, recipe(name)), made, **settings)


def test_ten_thousand_ranks_take_less_than_ten_seconds():
    start = time.process_time()
    found = run(arms=["zeropp"])
    assert time.process_time() - start < 10
    assert [one["name"] for one in found["by_ranks"]] == ["dense", "aquavit", "zeropp"]
    assert found["by_ranks"][0]["at"][-1] == 10_000


def test_two_simulations_are_equal():
    assert run(arms=["static-4bit"][:0]) == run(arms=[])


def test_slower_links_take_longer_and_compression_gains_there():
    dense, aquavit = run()["by_link"]
    assert list(dense["step_s"]) == sorted(dense["step_s"], reverse=True)
    gains = [d / a for d, a in zip(dense["step_s"], aquavit["step_s"], strict=True)]
    assert gains == sorted(gains, reverse=True)
    # Both passes' bf16 gathers at 2.6 to 7 bits, gradients dense: at most (2 + 2 + 4) / (.7 + 4).
    assert 1.2 < gains[0] < 8 / 4.7


def test_weak_scaling_falls_with_ranks_and_strong_scaling_faster():
    weak = run(ranks=(8, 16, 32), gbit_per_s=())["by_ranks"][0]
    data = LARGE | {"data": {"seq_len_tokens": 1024, "batch_seqs": 64}}
    strong = simulate(
        from_dict(data, recipe("aquavit")), Cluster.from_dict(CLUSTER), ranks=(8, 16, 32),
        gbit_per_s=(), scaling="strong",
    )["by_ranks"][0]  # fmt: skip
    assert weak["efficiency"][0] == strong["efficiency"][0] == 1.0
    assert weak["efficiency"][-1] < 1.0
    assert strong["efficiency"][-1] < 1.0
    # The computation of a rank stays in one and shrinks in the other.
    assert weak["compute_s"][-1] == pytest.approx(weak["compute_s"][0], rel=0.2)
    assert strong["compute_s"][-1] < 0.4 * strong["compute_s"][0]


def test_hours_are_tokens_over_speed():
    found = run(gbit_per_s=(), tokens=3.6e9)
    for one in found["by_ranks"]:
        for hours, speed in zip(one["hours"], one["tokens_per_s"], strict=True):
            assert hours == pytest.approx(1e6 / speed)


def test_the_slowest_of_many_ranks_is_slower():
    jitter = Stragglers(jitter=0.05)
    assert jitter.slowdown(1) == 1.0
    assert jitter.slowdown(100) == pytest.approx(1 + 0.05 * 2.51, abs=0.002)  # mean largest of 100
    assert jitter.slowdown(10_000) == pytest.approx(1 + 0.05 * 3.85, abs=0.005)
    rare = Stragglers(slow_share=0.001, slow_factor=2.0)
    assert rare.slowdown(2) == pytest.approx(1.002, abs=1e-5)
    assert rare.slowdown(10_000) == pytest.approx(2.0, abs=1e-4)
    quick = run(gbit_per_s=())["by_ranks"][0]["step_s"]
    slow = run(gbit_per_s=(), stragglers=jitter)["by_ranks"][0]["step_s"]
    assert all(a < b for a, b in zip(quick, slow, strict=True))


def test_outer_rounds_between_sites_beat_syncing_every_step():
    cluster = CLUSTER | {"sites": SITES}
    mesh = {"mesh": {"dp_replicate": 4, "dp_shard": -1}, "data": SITES_DATA}
    config = from_dict(LARGE | mesh, recipe("sparseloco-fsdp"))
    every_step, rounds = simulate(
        config, Cluster.from_dict(cluster), ranks=(16, 64), gbit_per_s=(0.1, 1.0)
    )["by_ranks"]
    assert rounds["name"] == "sparseloco-fsdp"
    assert rounds["step_s"][0] < 0.1 * every_step["step_s"][0]
    # More ranks in a site don't change what crosses between sites.
    assert rounds["waiting_s"][1] < 2 * rounds["waiting_s"][0]


def test_all_sites_wait_for_the_slowest():
    mesh = {"mesh": {"dp_replicate": 4, "dp_shard": -1}, "data": SITES_DATA}
    config = from_dict(LARGE | mesh, recipe("sparseloco-fsdp"))

    def compute(speeds):
        cluster = CLUSTER | {"sites": SITES | {"speeds": speeds}}
        found = simulate(config, Cluster.from_dict(cluster), ranks=(16,), gbit_per_s=())
        return found["by_ranks"][1]["compute_s"][0]

    assert compute([1.0, 0.5, 1.0, 2.0]) == pytest.approx(2 * compute([1.0, 1.0, 1.0, 1.0]))


def cluster_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        "nodes = 2\ndevices_per_node = 8\n[inside]\ngbit_per_s = 2400\n[across]\ngbit_per_s = 100\n"
        "[device]\ntflops = 50\nmemory_gbyte_per_s = 900\n"
    )
    return str(path)


def test_the_command_writes_page_and_numbers(tmp_path, capsys):
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    args = ["simulate", "aquavit", "--cluster", cluster_file(tmp_path), "--ranks", "2,16,128"]
    args += ["--out", str(page), "--json", str(numbers), "--arms", "zeropp"]
    assert cli.main([*args, "--data.batch-seqs", "2"]) == 0
    out = capsys.readouterr().out
    assert "efficiency" in out
    assert str(page) in out
    found = json.loads(numbers.read_text())
    assert found["format"] == "thinwire.simulate/1"
    text = page.read_text()
    assert "Scaling efficiency" in text
    assert text.count("<figure") == 4
    assert found["tokens"] is None
    assert found["by_ranks"][0]["hours"] == []
    assert "hours" not in out.lower()
    assert "Hours" not in text.split("</style>")[1]
    for one in found["by_link"]:
        assert "efficiency" not in one
        pairs = zip(found["by_link"][0]["step_s"], one["step_s"], strict=True)
        assert one["speedup"] == pytest.approx([dense / step for dense, step in pairs])
    over_links = text.split("Every link speed")[1]
    assert "Speed-up" in over_links
    assert "Efficiency</th>" not in over_links
    assert "1.00x" in over_links
    assert "Gbit/s" in text
    assert "http" not in text.split("</style>")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "8,4"], "--ranks must rise"),
        (["--ranks", "two"], "--ranks must be numbers"),
        (["--ranks", "0,4"], "--ranks must rise and lie between 1"),
        (["--gbit-per-s", "0,1"], "--gbit-per-s must rise and be above 0"),
        (["--gbit-per-s=-1,1"], "--gbit-per-s must rise and be above 0"),
        (["--scaling", "odd"], "--scaling must be weak or strong"),
        (["--gbit-per-s", "1e-320"], "--gbit-per-s must rise and be above 0, from 1e-09 to 1e+12"),
        (["--gbit-per-s", "1,inf"], "--gbit-per-s must rise and be above 0, from 1e-09 to 1e+12"),
        (["--jitter", "-1"], "jitter (--jitter) must lie between 0 and 1e+06, got -1"),
        (["--jitter", "inf"], "jitter (--jitter) must lie between 0 and 1e+06, got inf"),
        (["--slow-factor", "0.5"], "slow_factor (--slow-factor) must lie between 1 and 1e+06"),
        (["--slow-factor", "inf", "--slow-share", "0.1"], "(--slow-factor) must lie between 1"),
        (["--slow-share", "nan"], "slow_share (--slow-share) must lie between 0 and 1, got nan"),
        (["--tokens", "inf"], "tokens must be above 0 and finite, got inf"),
        (["--tokens", "0"], "tokens must be above 0 and finite, got 0"),
        (["--tokens", "1000"], "tokens 1000 are less than one step of "),
        (
            ["--out", "/dev/null/page.html"],
            "/dev/null/page.html cannot be written: /dev/null is no",
        ),
        (["--out", "/dev"], "/dev is a directory: name a file"),
        (["--arms", "taco"], "compresses link tensor: not on this mesh"),
        (["--tokens", "-3"], "tokens must be above 0"),
        (["--ranks", "3,5"], "must be a multiple"),
    ],
)
def test_mistakes_are_one_line(words, says, tmp_path, capsys):
    args = ["simulate", "aquavit", "--cluster", cluster_file(tmp_path), "--out", "none.html"]
    assert cli.main([*args, *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_cluster_is_needed(capsys):
    assert cli.main(["simulate", "aquavit"]) == 2
    assert "--cluster FILE is missing" in capsys.readouterr().err


def test_speeds_of_sites_must_be_one_each():
    with pytest.raises(ConfigError, match=r"sites\.speeds must be 4 numbers above 0"):
        Cluster.from_dict(CLUSTER | {"sites": SITES | {"speeds": [1.0, 0.0]}})


def test_hours_are_readable_and_runs_too_large_are_named_once(tmp_path, capsys):
    path, page, numbers = (tmp_path / name for name in ("limited.toml", "page.html", "found.json"))
    args = ["simulate", "aquavit", "--ranks", "2,512", "--tokens", "1e8", "--gbit-per-s", "1,10"]
    args += ["--out", str(page), "--json", str(numbers), "--cluster"]
    assert cli.main([*args, cluster_file(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["arm", "ranks", "step", "efficiency", "hours"]
    assert all("e-" not in line for line in lines[:5])
    assert page.read_text().count("<figure") == 5
    found = json.loads(numbers.read_text())
    assert found["notes"] == []
    few, many = found["by_ranks"][0]["memory_bytes"]
    assert few > many  # shards
    limit = (few + many) / 2e9
    path.write_text(Path(cluster_file(tmp_path)).read_text() + f"memory_gbyte = {limit}\n")
    assert cli.main([*args, str(path)]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "an estimate" in line]
    most = f"on 2 ranks (up to {few / 1e9:.3g} GB)"
    assert notes == [
        f"more than a device's {limit:.3g} GB, an estimate: dense {most}; aquavit {most}"
    ]
    assert f"GB, an estimate: dense {most}; aquavit {most}" in page.read_text()
