"""Costs of described clusters and of measured links, and what users get wrong in them."""

import json

import pytest
from plan_cases import MESH, Flat, job

from thinwire.codecs import Blockwise
from thinwire.errors import ConfigError
from thinwire.plan import (
    Cluster,
    ClusterCosts,
    CodecSpeed,
    Compute,
    Group,
    Links,
    MeasuredCosts,
    Speed,
    WeightsPhase,
    predict,
    workload_of,
)
from thinwire.plan.workload import Message

TOML = """
nodes = 4
devices_per_node = 8
[inside]
gbit_per_s = 2400
latency_s = 0
[across]
gbit_per_s = 80
latency_s = 0
[device]
tflops = 10
memory_gbyte_per_s = 1000
"""


def costs(text=TOML, **mesh):
    import tomllib

    return ClusterCosts(Cluster.from_dict(tomllib.loads(text)), MESH | mesh)


def message(collective, nbytes, num_ranks, axis="dp_shard", link="weights"):
    return Message(link, axis, collective, nbytes, num_ranks, 0)


def test_a_node_takes_in_the_other_nodes_shards_once():
    at = costs(dp_shard=32)
    # 24 foreign shards of 10 MB over 10 GB/s.
    assert at.seconds(message("all_gather", 10**7, 32)) == pytest.approx(24e7 / 1e10)
    # A reduction moves the same chunks; an all-reduce does both.
    assert at.seconds(message("reduce_scatter", 32 * 10**7, 32)) == pytest.approx(24e7 / 1e10)
    assert at.seconds(message("all_reduce", 32 * 10**7, 32)) == pytest.approx(48e7 / 1e10)
    # Every device of a node sends its own chunk for each foreign rank.
    assert at.seconds(message("all_to_all", 32 * 10**7, 32)) == pytest.approx(8 * 24e7 / 1e10)


def test_groups_of_one_node_use_its_inner_links():
    at = costs(tp=8, dp_shard=4)
    assert at.wire("tp") == "inside"
    assert at.seconds(message("all_gather", 10**7, 8, "tp")) == pytest.approx(7e7 / 3e11)
    # One rank per node, eight groups: an eighth of the node's link.
    assert at.wire("dp_shard") == "across"
    assert at.seconds(message("all_gather", 10**7, 4)) == pytest.approx(3e7 / (1e10 / 8))


def test_latency_counts_hops():
    slow = TOML.replace("latency_s = 0\n[across]", "latency_s = 1\n[across]").replace(
        "latency_s = 0\n[device]", "latency_s = 100\n[device]"
    )
    assert costs(slow, dp_shard=32).seconds(message("all_gather", 1, 32)) == pytest.approx(
        4 * 7 * 1 + 3 * 100, rel=1e-6
    )
    log = 'algorithm = "log"\n' + slow
    assert costs(log, dp_shard=32).seconds(message("all_gather", 1, 32)) == pytest.approx(
        3 * 1 + 2 * 100, rel=1e-6
    )


SITES = TOML + "[sites]\ncount = 4\nup_gbit_per_s = 0.08\ndown_gbit_per_s = 0.8\nlatency_s = 0\n"


def test_a_store_takes_a_sites_message_once():
    outer = message("all_gather", 10**8, 4, "dp_replicate", "outer")
    direct = costs(SITES, dp_replicate=4, dp_shard=8).seconds(outer)
    assert direct == pytest.approx(3 * 10)  # 3 x 100 MB up at 10 MB/s
    relayed = costs(SITES + "relay = true\n", dp_replicate=4, dp_shard=8).seconds(outer)
    assert relayed == pytest.approx(10 + 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TOML.replace("gbit_per_s = 80", "gbit_per_s = 0"), "across.gbit_per_s must be above 0"),
        (TOML.replace("gbit_per_s = 80", "gbit_per_s = -3"), "across.gbit_per_s must be above 0"),
        (TOML.replace("tflops = 10", "tflops = 0"), "device.tflops must be above 0"),
        (TOML.replace("gbit_per_s = 80", "gbit = 3"), "unknown key across.gbit: known"),
        (TOML.replace("nodes = 4", "nodes = 0"), "nodes must be at least 1"),
        (TOML.replace("nodes = 4", 'nodes = "4"'), "nodes must be of type int"),
        (TOML.replace("nodes = 4\n", ""), "nodes is missing"),
        (TOML.replace("tflops = 10\n", ""), "device.tflops is missing"),
        ("nodes = 2\ndevices_per_node = 1\n[device]\ntflops=1\nmemory_gbyte_per_s=1", "[across]"),
        ("nodes = 1\ndevices_per_node = 2\n[device]\ntflops=1\nmemory_gbyte_per_s=1", "[inside]"),
        ('algorithm = "star"\n' + TOML, "algorithm must be ring or log"),
        (SITES.replace("count = 4", "count = 1"), "sites.count must be at least 2"),
        ("nodes = [", "cannot be read"),
        (TOML.replace("gbit_per_s = 80", "gbit_per_s = 1e308"), "must lie between 1e-09 and 1e+12"),
        (TOML.replace("tflops = 10", "tflops = 1e-308"), "device.tflops must lie between 1e-09"),
        (TOML.replace("tflops = 10", "tflops = " + "9" * 400), "is a number of 400 digits"),
        (TOML.replace("nodes = 4", "nodes = " + "9" * 400), "nodes must be at most 1000000"),
        (TOML + "codec_share = 7\n", "device.codec_share must be at most 1"),
        (TOML + "kernel_s = 1e300\n", "device.kernel_s must be at most 1e+12"),
        (SITES + "speeds = [1.0, 1.0, 1.0, nan]\n", "sites.speeds must be 4 numbers above 0"),
        (SITES + "speeds = [1.0, 1.0, inf, 1.0]\n", "sites.speeds must be 4 numbers above 0"),
        (SITES + f"speeds = [1, 1, 1, {'9' * 400}]\n", "sites.speeds is a number of 400 digits"),
    ],
)
def test_a_wrong_cluster_file_is_one_clear_line(text, says, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Cluster.read(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_cluster_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        Cluster.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({"dp_shard": 64}, "64 ranks but the cluster 32 devices"),
        ({"tp": 3, "dp_shard": 2}, "mesh.tp 3 doesn't fit nodes of 8"),
    ],
)
def test_a_mesh_that_does_not_fit_the_cluster(mesh, says):
    with pytest.raises(ConfigError, match=says):
        costs(**mesh)


def test_replicas_must_be_dealt_evenly_to_sites():
    with pytest.raises(ConfigError, match="can't be dealt evenly to 4 sites"):
        costs(SITES, dp_replicate=3)


CODEC = Blockwise(bits=4, block_size=128)


def links(**changes):
    speed = Speed.ideal(1e-3, 1e9)
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    group = Group(ranks=((0, 1),), size=2, collectives=dict.fromkeys(names, speed))
    values = {
        "world_size": 2,
        "mesh": {"dp_shard": 2},
        "groups": {"dp_shard": group},
        "codecs": {
            repr(CODEC): CodecSpeed(
                encode_latency_s=1e-4,
                encode_s_per_value=1e-9,
                decode_latency_s=0.0,
                decode_s_per_value=2e-9,
            )
        },
        "compute": Compute(recipe="dense-fsdp", step_s=0.5),
    }
    return Links(**values | changes)


def test_measured_links_price_messages_codecs_and_compute():
    made = job(mesh={"dp_shard": 2}, weights=(WeightsPhase(1.0, CODEC),), prefetch=0, blocking=True)
    found = predict(workload_of(made), MeasuredCosts(links(), made.mesh))
    wire = CODEC.wire_nbytes(500_000, made.dtype)
    assert found.exposed_s["weights"] == pytest.approx(8 * (1e-3 + wire / 1e9))
    assert found.exposed_s["gradients"] == pytest.approx(4 * (1e-3 + 4e6 / 1e9))
    assert found.encode_s == pytest.approx(4 * (1e-4 + 5e5 * 1e-9))
    assert found.decode_s == pytest.approx(8 * 1e6 * 2e-9)
    assert found.compute_s == pytest.approx(0.5)


def test_compute_follows_parameters_and_tokens_where_the_probe_says_them():
    made = job(mesh={"dp_shard": 2})
    probed = Compute(recipe="dense-fsdp", step_s=0.5, tokens=32, params=2_000_000)
    at = MeasuredCosts(links(compute=probed), made.mesh)
    assert at.whole_step_s(workload_of(made)) == pytest.approx(0.5 * 2 * 2)


@pytest.mark.parametrize(
    ("changes", "mesh", "says"),
    [
        ({}, {"dp_shard": 4}, "probed with mesh.dp_shard 2, the plan has 4"),
        ({}, {"dp_shard": 2, "tp": 2}, "probed with mesh.tp 1, the plan has 2"),
        ({"compute": None}, {"dp_shard": 2}, "no compute time"),
    ],
)
def test_links_that_do_not_serve_the_plan(changes, mesh, says):
    with pytest.raises(ConfigError, match=says):
        MeasuredCosts(links(**changes), MESH | mesh)


def test_a_codec_that_was_not_probed_is_named():
    made = job(mesh={"dp_shard": 2}, weights=(WeightsPhase(1.0, Blockwise(bits=6)),))
    with pytest.raises(ConfigError, match="no speed of Blockwise"):
        predict(workload_of(made), MeasuredCosts(links(), made.mesh))


def test_a_step_of_no_seconds_is_refused():
    with pytest.raises(ConfigError, match="step_s must be above 0"):
        MeasuredCosts(links(), MESH | {"dp_shard": 2}, step_s=0.0)


def test_a_prediction_is_plain_json():
    found = predict(workload_of(job(mesh={"dp_shard": 2})), Flat())
    assert json.loads(json.dumps(found.to_dict()))["step_s"] == found.step_s


def test_a_broadcast_takes_as_long_as_gathering_its_pieces():
    at = costs(dp_shard=32)
    whole = message("broadcast", 32 * 10**7, 32)
    assert at.seconds(whole) == at.seconds(message("all_gather", 10**7, 32))
    assert whole.sent == 31 * 32 * 10**7


def test_stages_of_unlike_replicas_are_neighbours():
    import tomllib

    two = "nodes = 2\ndevices_per_node = 2\n" + TOML[TOML.index("[inside]") :]
    made = Cluster.from_dict(tomllib.loads(two))
    mesh = MESH | {"pp": 2, "dp_replicate": 2}
    like, unlike = ClusterCosts(made, mesh), ClusterCosts(made, mesh, unlike_ranks=4)
    assert (like.wire("pp"), like.wire("dp_replicate")) == ("across", "inside")
    assert (unlike.wire("pp"), unlike.wire("dp_replicate")) == ("inside", "across")
    # Three ranks on one node: a whole replica and a pipeline of two.
    one = Cluster.from_dict(
        tomllib.loads("nodes = 1\ndevices_per_node = 3\n" + two[two.index("[inside]") :])
    )
    assert ClusterCosts(one, mesh, unlike_ranks=3).wire("world") == "inside"


def test_a_line_that_a_mesh_needs_is_named():
    import tomllib

    text = TOML.replace("devices_per_node = 8", "devices_per_node = 1")
    sites = "\n[sites]\ncount = 2\nup_gbit_per_s = 1\ndown_gbit_per_s = 1\n"
    alone = text[: text.index("[inside]")] + text[text.index("[device]") :] + sites
    at = ClusterCosts(
        Cluster.from_dict(tomllib.loads(alone)), MESH | {"dp_replicate": 2, "dp_shard": 2}
    )
    with pytest.raises(ConfigError, match=r"talk across nodes, and the cluster has no \[across\]"):
        at.seconds(message("all_gather", 10**6, 2))
