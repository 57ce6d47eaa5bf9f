"""`thinwire plan`: tables, advice, a configuration that trains, and one line for every mistake."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from thinwire import cli
from thinwire.plan import CodecSpeed, Compute, Group, Links, Point, Speed
from thinwire.train.candidates import AS_GIVEN
from thinwire.train.parse import load
from thinwire.train.recipes import recipe
from thinwire.train.workload import workload

CLUSTER = """
nodes = 2
devices_per_node = 1
prefetch = 0
[across]
gbit_per_s = {rate}
latency_s = 1e-5
[device]
tflops = 10.0
memory_gbyte_per_s = 500.0
"""


@pytest.fixture
def slow(tmp_path):
    path = tmp_path / "slow.toml"
    path.write_text(CLUSTER.format(rate=0.2))
    return path


@pytest.fixture
def fast(tmp_path):
    path = tmp_path / "fast.toml"
    path.write_text(CLUSTER.format(rate=3200.0))
    return path


def links(path, recipe_name="aquavit", axis="dp_shard", **changes):
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
    group = Group(ranks=((0, 1),), size=2, collectives=dict.fromkeys(names, Speed.ideal(1e-4, 1e7)))
    speed = CodecSpeed(
        encode_latency_s=1e-5, encode_s_per_value=1e-9, decode_latency_s=0, decode_s_per_value=1e-9
    )
    names = ("aquavit", "static-8bit", "static-6bit", "aquavit-grad4", "zeropp")
    codecs = {repr(c): speed for n in names for c in workload(recipe(n), 2).codecs()}
    mesh = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp"), 1) | {axis: 2}
    values = {
        "world_size": 2,
        "mesh": mesh,
        "groups": {axis: group},
        "codecs": codecs,
        "compute": Compute(recipe=recipe_name, step_s=0.05),
    }
    Links(**values | changes).write(path)
    return path


def test_a_slow_link_gets_arms_and_a_configuration_that_trains(slow, tmp_path, capsys):
    written, numbers = tmp_path / "plan.toml", tmp_path / "plan.json"
    args = ["plan", "dense-fsdp", "--cluster", str(slow), "--write", str(written)]
    assert cli.main([*args, "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "recommendation: use " in out
    found = json.loads(numbers.read_text())
    fastest = found["arms"][0]
    assert found["recommended"] == [fastest["name"]]
    assert fastest["pays"]
    assert fastest["speedup"] > 2
    parts = fastest["compute_s"] + fastest["encode_s"] + fastest["decode_s"]
    waits = sum(fastest["exposed_s"].values()) + fastest["bubble_s"]
    assert parts + waits == pytest.approx(fastest["step_s"])
    config = load(written)
    assert config.systems == recipe(fastest["name"]).systems
    assert config.model == recipe("dense-fsdp").model
    # The very bytes and no more: training it is what the plan predicted.
    assert workload(config, 2).sent() == pytest.approx(fastest["sent_bytes"])


def test_a_fast_link_stays_dense_and_says_why(fast, tmp_path, capsys):
    written = tmp_path / "plan.toml"
    assert cli.main(["plan", "dense-fsdp", "--cluster", str(fast), "--write", str(written)]) == 0
    out = capsys.readouterr().out
    assert "recommendation: stay dense" in out
    assert "aquavit: does not pay" in out
    assert "coding takes" in out or "the link is fast" in out
    assert load(written).systems.weights.codec == "dense"


def test_break_even_lies_between_a_link_that_pays_and_one_that_does_not(tmp_path):
    from thinwire.train.plan_command import make_advice

    def arm(rate):
        path = tmp_path / f"{rate}.toml"
        path.write_text(CLUSTER.format(rate=rate).replace("1e-5", "0.0"))
        advice = make_advice(recipe("dense-fsdp"), None, path, arms=["static-6bit"])
        return advice.arms[0]

    rate = arm(1.0).break_even_bits_per_s / 1e9
    assert arm(rate).speedup == pytest.approx(1.0, abs=1e-6)
    assert arm(rate * 1.5).speedup < 1 < arm(rate / 1.5).speedup


def test_break_even_with_overlap_is_where_both_take_equally_long(tmp_path):
    from thinwire.train.plan_command import make_advice

    def arm(rate):
        path = tmp_path / f"{rate}.toml"
        path.write_text(CLUSTER.format(rate=rate).replace("prefetch = 0", "prefetch = 1"))
        return make_advice(recipe("dense-fsdp"), None, path, arms=["static-6bit"]).arms[0]

    overlapped = arm(1.0)
    rate = overlapped.break_even_bits_per_s / 1e9
    assert arm(rate).speedup == pytest.approx(1.0, abs=0.01)
    # Messages that fly beside the computation cost less, so compression pays on slower links only.
    path = tmp_path / "serial.toml"
    path.write_text(CLUSTER.format(rate=1.0))
    serial = make_advice(recipe("dense-fsdp"), None, path, arms=["static-6bit"]).arms[0]
    assert rate < serial.break_even_bits_per_s / 1e9


def test_measured_links_serve_the_plan(tmp_path, capsys):
    path = links(tmp_path / "links.json")
    assert cli.main(["plan", "aquavit", "--links", str(path)]) == 0
    out = capsys.readouterr().out
    assert "aquavit-grad4" in out
    assert "weights" in out


def test_two_links_are_combined(tmp_path):
    from thinwire.train.plan_command import make_advice

    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(rate=0.2).replace("nodes = 2", "nodes = 4"))
    advice = make_advice(recipe("taco-aquavit"), None, path)
    kinds = {name.split("-")[0] for name in advice.chosen}
    assert len(advice.chosen) == 2
    assert "taco" in kinds
    assert advice.best.step_s < min(arm.prediction.step_s for arm in advice.arms)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --links FILE"),
        (["--links", "none.json"], "does not exist"),
        (["--cluster", "none.toml"], "does not exist"),
        (["--cluster", "SLOW", "--nproc", "3", "--data.batch-seqs", "12"], "3 ranks"),
        (["--cluster", "SLOW", "--arms", "taco"], "compresses link tensor"),
        (["--cluster", "SLOW", "--arms", "tako"], "did you mean 'taco'"),
        (["--cluster", "SLOW", "--model.dmi", "3"], "unknown setting"),
        (["--cluster", "SLOW", "--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--cluster", "SLOW", "--nproc", "-2"], "--nproc must be at least 1, got -2"),
        (["--links", "GOOD", "--step-s", "inf"], "--step-s must be above 0 and finite, got inf"),
        (["--links", "GOOD", "--step-s", "nan"], "--step-s must be above 0 and finite, got nan"),
        (
            ["--cluster", "SLOW", "--model.dim", "8", "stray"],
            "thinwire: Unrecognized options: stray",
        ),
        (["--cluster", "SLOW", "--step-s", "1"], "--step-s goes with --links"),
        (["--links", "PARTIAL"], "probe again"),
        (["--links", "CUT"], "probe again"),
        (["--links", "OTHER"], "probed with mesh.dp_shard 1, the plan has 2"),
        (["--links", "BARE"], "no speed of"),
        (["--links", "GOOD", "--step-s", "0"], "must be above 0"),
        (["--links", "GOOD", "--model.num-experts", "4"], "covers dense models"),
    ],
)
def test_mistakes_are_one_line(words, says, slow, tmp_path, capsys):
    good = links(tmp_path / "good.json")
    values = json.loads(good.read_text())
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps({k: v for k, v in values.items() if k != "groups"}))
    cut = tmp_path / "cut.json"
    cut.write_text(good.read_text()[:200])
    files = {
        "SLOW": slow,
        "GOOD": good,
        "PARTIAL": partial,
        "CUT": cut,
        "OTHER": links(tmp_path / "other.json", axis="tp"),
        "BARE": links(tmp_path / "bare.json", codecs={}),
    }
    args = [str(files.get(word, word)) for word in words]
    assert cli.main(["plan", "dense-fsdp", *args]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert error.startswith("thinwire: ")


SITES = """
nodes = 4
devices_per_node = 1
[device]
tflops = 10.0
memory_gbyte_per_s = 500.0
[sites]
count = 4
up_gbit_per_s = 0.5
down_gbit_per_s = 0.5
latency_s = 0.0
speeds = {speeds}
"""


def sites_advice(tmp_path, speeds, arms):
    from thinwire.train.plan_command import make_advice

    path = tmp_path / "sites.toml"
    path.write_text(SITES.format(speeds=speeds))
    return make_advice(recipe("diloco-int8"), None, path, arms=arms)


def test_a_slow_site_holds_up_the_computation_and_the_coding(tmp_path):
    even = sites_advice(tmp_path, [1, 1, 1, 1], ["diloco-int8"])
    slow = sites_advice(tmp_path, [1, 0.25, 1, 2], ["diloco-int8"])
    assert slow.dense.compute_s == pytest.approx(4 * even.dense.compute_s)
    one, other = (advice.arms[0].prediction for advice in (even, slow))
    assert other.compute_s == pytest.approx(4 * one.compute_s)
    assert other.coding_s == pytest.approx(4 * one.coding_s)
    assert slow.dense.sent_bytes == even.dense.sent_bytes


def test_words_name_the_figures_of_the_table(tmp_path):
    from thinwire.plan.predict import seconds_text

    advice = sites_advice(tmp_path, [1, 1, 1, 1], [])
    for arm in advice.arms:
        found = arm.prediction
        if "coding" in arm.words:
            assert found.coding_s > 0
            assert f"{seconds_text(found.coding_s)} of coding" in arm.words or (
                f"coding takes {seconds_text(found.coding_s)} of a step" in arm.words
            )
        else:
            assert found.coding_s == 0


def test_sparse_exchanges_that_take_as_long_are_not_blamed_on_coding(tmp_path):
    advice = sites_advice(tmp_path, [1, 1, 1, 1], ["scape-99"])
    assert advice.dense.waiting_s > 0.5 * advice.dense.step_s
    assert "link is too fast" not in advice.arms[0].words


def limited(tmp_path, gbyte, name="limited.toml"):
    path = tmp_path / name
    path.write_text(CLUSTER.format(rate=0.2) + f"memory_gbyte = {gbyte:.9f}\n")
    return path


def sizes_of(path):
    from thinwire.train.plan_command import make_advice

    advice = make_advice(recipe("dense-fsdp"), None, path)
    arms = {a.prediction.name: sum(a.prediction.memory_bytes.values()) for a in advice.arms}
    return sum(advice.dense.memory_bytes.values()), arms, advice


def test_an_arm_that_does_not_fit_is_marked_and_never_recommended(slow, tmp_path, capsys):
    dense, arms, free = sizes_of(slow)
    assert free.memory_limit == 0
    # Kept wire is what the fast arm holds beyond the others.
    assert arms["aquavit-keep-wire"] > arms["aquavit"] == dense
    path = limited(tmp_path, (dense + 1) / 1e9)
    _, _, advice = sizes_of(path)
    assert "aquavit-keep-wire" not in advice.chosen
    assert advice.chosen
    args = ["plan", "dense-fsdp", "--cluster", str(path), "--write", str(tmp_path / "plan.toml")]
    assert cli.main([*args, "--json", str(tmp_path / "plan.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("aquavit-keep-wire "))
    assert "MB!" in row
    assert "MB!" not in next(line for line in lines if line.startswith("dense "))
    words = next(line for line in lines if line.startswith("aquavit-keep-wire: "))
    assert words.startswith("aquavit-keep-wire: does not fit, needing about 0.0")
    fits = {a["name"]: a["fits"] for a in json.loads((tmp_path / "plan.json").read_text())["arms"]}
    assert not fits["aquavit-keep-wire"]
    assert fits["aquavit"]


def test_nothing_that_fits_is_said_and_not_written(tmp_path, capsys):
    written = tmp_path / "plan.toml"
    args = ["plan", "dense-fsdp", "--cluster", str(limited(tmp_path, 0.001))]
    assert cli.main([*args, "--write", str(written)]) == 2
    out, error = capsys.readouterr()
    assert "recommendation: nothing fits: even " in out
    assert "of a device's 0.001 GB; add devices" in out
    assert error == f"thinwire: {written} is not written: no run fits [device] memory_gbyte\n"
    assert not written.exists()


def test_columns_stand_apart(fast, capsys):
    assert cli.main(["plan", "dense-fsdp", "--cluster", str(fast)]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    head, dense, *rows = [re.split(r" {2,}", line) for line in table]
    assert len(dense) == len(head) - 2  # no speed-up, no break-even
    assert rows
    assert all(len(row) in (len(head), len(head) - 1) for row in rows)
    assert "e-" not in "".join(table).replace("dense-", "")


def test_no_time_is_negative_or_a_rounding_of_zero():
    from thinwire.plan.predict import seconds_text

    found = [seconds_text(s) for s in (6e-16, -7e-9, 9.03e-6, 42e-6, 4.2e-4, 0.25, 1.5, 12345.0)]
    assert found == [
        "0 ms", "0 ms", "9.03 us", "42 us", "0.42 ms", "0.250 s", "1.500 s", "1.234e+04 s"
    ]  # fmt: skip


def test_the_documented_cluster_and_command_work(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    block = text[text.index("    # cluster.toml") : text.index("With it, two replicas")]
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(textwrap.dedent(block))
    command = next(line for line in text.splitlines() if "--mesh.dp-replicate" in line)
    assert cli.main(command.split()[1:]) == 0
    assert "recommendation: " in capsys.readouterr().out


def test_everything_at_once_is_weighed_as_one_arm(slow, tmp_path, capsys):
    numbers = tmp_path / "plan.json"
    args = ["plan", "everything", "--cluster", str(slow), "--nproc", "4", "--json", str(numbers)]
    slow.write_text(slow.read_text().replace("nodes = 2", "nodes = 4"))
    assert cli.main(args) == 0
    found = json.loads(numbers.read_text())
    as_given = next(arm for arm in found["arms"] if arm["name"] == AS_GIVEN)
    taco = next(arm for arm in found["arms"] if arm["name"] == "taco")
    assert as_given["step_s"] < taco["step_s"] < found["dense"]["step_s"]


def test_a_configuration_that_no_recipe_has_is_an_arm_too(slow, tmp_path, capsys):
    written, numbers = tmp_path / "plan.toml", tmp_path / "plan.json"
    words = ["--systems.weights.bits", "2", "--write", str(written), "--json", str(numbers)]
    assert cli.main(["plan", "zeropp", "--cluster", str(slow), *words]) == 0
    assert "as given: pays" in capsys.readouterr().out
    found = json.loads(numbers.read_text())
    given = next(arm for arm in found["arms"] if arm["name"] == "as given")
    config = load(written)
    assert found["recommended"] == ["as given"]
    assert config.systems.weights.bits == 2
    assert workload(config, 2).sent() == pytest.approx(given["sent_bytes"])


def test_a_recipe_s_own_arm_is_not_listed_twice(slow, capsys):
    assert cli.main(["plan", "static-6bit", "--cluster", str(slow)]) == 0
    assert "as given" not in capsys.readouterr().out


def test_messages_beyond_the_largest_probed_are_told(tmp_path, capsys):
    path = links(tmp_path / "links.json")
    assert cli.main(["plan", "static-8bit", "--links", str(path)]) == 0
    assert "note:" not in capsys.readouterr().out
    short = Speed.fit([Point(nbytes=n, median_s=1e-4 + n / 1e7) for n in (256, 4096)])
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
    group = Group(ranks=((0, 1),), size=2, collectives=dict.fromkeys(names, short))
    links(path, groups={"dp_shard": group})
    assert cli.main(["plan", "static-8bit", "--links", str(path)]) == 0
    out = capsys.readouterr().out
    assert "note: all_gather on dp_shard: messages of up to " in out
    assert "beyond the largest probed (4.1 kB)" in out


MIXED = """
nodes = 3
devices_per_node = 1
[across]
gbit_per_s = 0.01
[device]
tflops = 1.0
memory_gbyte_per_s = 100.0
[sites]
count = 2
up_gbit_per_s = 0.05
down_gbit_per_s = 0.1
latency_s = 0.001
speeds = [1.0, 0.5]
"""


def test_unlike_replicas_are_weighed_with_their_own_speeds(tmp_path, capsys):
    cluster, numbers = tmp_path / "mixed.toml", tmp_path / "plan.json"
    cluster.write_text(MIXED)
    args = ["plan", "hetero", "--cluster", str(cluster), "--nproc", "3", "--json", str(numbers)]
    assert cli.main(args) == 0
    found = json.loads(numbers.read_text())
    (arm,) = found["arms"]
    assert arm["name"] == AS_GIVEN
    assert arm["pays"]
    # Boundaries of the weak replica: 8 times fewer coefficients of half the size, and ids.
    assert found["dense"]["sent_bytes"]["pipeline"] > 10 * arm["sent_bytes"]["pipeline"]
    cluster.write_text(MIXED.replace("[1.0, 0.5]", "[0.5, 1.0]"))
    assert cli.main(args) == 0
    # The pipeline's site is fast now, and what the whole replica takes doesn't hold it up.
    other = json.loads(numbers.read_text())["arms"][0]
    assert other["step_s"] < arm["step_s"]
    capsys.readouterr()
    assert cli.main(["plan", "hetero", "--links", str(cluster)]) == 2
    assert "give --cluster FILE" in capsys.readouterr().err
    for words, said in (
        (["--arms", "subspace-pp"], "of unlike replicas, the configuration as given is weighed"),
        (["--compress", "auto"], "compress auto chooses for equal replicas"),
    ):
        assert cli.main([*args[:4], "--nproc", "3", *words]) == 2
        assert said in capsys.readouterr().err


def test_unlike_replicas_are_simulated_over_the_speed_of_their_line(tmp_path, capsys):
    cluster, numbers = tmp_path / "mixed.toml", tmp_path / "simulate.json"
    cluster.write_text(MIXED)
    args = ["simulate", "hetero", "--cluster", str(cluster), "--ranks", "3", "--json", str(numbers)]
    args += ["--gbit-per-s", "0.001,0.1,10", "--out", str(tmp_path / "page.html")]
    assert cli.main(args) == 0
    for one in json.loads(numbers.read_text())["by_link"]:
        assert one["step_s"][0] > one["step_s"][1] > one["step_s"][2]
    assert cli.main([*args[:5], "4", *args[6:]]) == 2
    assert "names 3 ranks, but 4 run" in capsys.readouterr().err
