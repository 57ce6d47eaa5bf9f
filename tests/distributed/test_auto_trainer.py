"""compress "auto" in the trainer: what it chooses, that ranks agree, what run.json tells."""

from pathlib import Path

import pytest

from thinwire.train.launch import launch
from thinwire.train.parse import to_dict
from thinwire.train.recipes import recipe

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
BASE = {
    "steps": 6,
    "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 128},
    "data": {"source": "synthetic", "seq_len_tokens": 32, "batch_seqs": 8},
    "optim": {"warmup_steps": 2, "lr": 1e-2},
    "evaluation": {"num_seqs": 4},
}
AUTO = BASE | {"compress": "auto", "recipe": "auto"}
REPLICAS = {"mesh": {"dp_replicate": 2, "dp_shard": 1}}
TENSOR = {"mesh": {"dp_shard": 1, "tp": 2}}
# On the middle one dense steps seem to take a fifth of a second: there is time to try arms.
SLOW, MIDDLE, FAST = 1e5, 5e6, 1e11


def systems(name):
    return to_dict(recipe(name))["systems"]


def only(*names):
    return {"auto": {"arms": ",".join(names)}}


CASES = {
    "dense itself": (None, BASE),
    "static itself": (None, BASE | {"systems": systems("static-8bit")}),
    "static": (SLOW, AUTO | only("static-8bit")),
    "tried": (MIDDLE, AUTO | only("static-8bit")),
    "fast": (FAST, AUTO),
    "sharded": (SLOW, AUTO),
    # The first 21 steps of SCAPE are dense: a run of a few steps gains nothing.
    "replicas": (SLOW, AUTO | REPLICAS | {"steps": 200, "stop_after": 24}),
    "few steps": (SLOW, AUTO | REPLICAS),
    "tensor": (SLOW, AUTO | TENSOR),
    "given": (SLOW, AUTO | {"systems": systems("static-4bit")} | only("static-8bit")),
    "probed": (None, AUTO | {"auto": {"seconds": 1.0, "arms": "static-8bit"}}),
    "stopped": (SLOW, AUTO | only("static-8bit") | {"stop_after": 3}),
    "resumed": (FAST, AUTO | only("static-8bit")),
    "misfit": (SLOW, AUTO | only("taco")),
    "unknown": (SLOW, AUTO | only("aquavti")),
    "no link": (SLOW, AUTO | only("subspace-pp")),
    "uncovered": (SLOW, AUTO | {"model": BASE["model"] | {"num_experts": 2}}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return every case's outcome on each rank."""
    root = tmp_path_factory.mktemp("auto")
    cases = []
    for name, (bytes_per_s, config) in CASES.items():
        out = root / ("stopped" if name == "resumed" else name)
        case = {"bytes_per_s": bytes_per_s, "config": config | {"out": str(out)}}
        cases.append(case | ({"resume": str(out)} if name == "resumed" else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        ranks = launch(2, "auto_cases:chosen", {"cases": cases})
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(CASES)}


def test_a_slow_link_is_compressed_and_trains_as_the_recipe_itself(found):
    run = found["static"][0]
    assert run["auto"]["chosen"] == "static-8bit"
    assert run["systems"] == systems("static-8bit")
    assert run["losses"] == found["static itself"][0]["losses"]
    assert run["losses"] != found["dense itself"][0]["losses"]
    assert run["wire"]["weights"]["ratio"] > 3


def test_a_fast_link_stays_dense_and_trains_as_dense(found):
    run = found["fast"][0]
    assert run["auto"]["chosen"] == "dense"
    assert run["auto"]["expected_speedup"] == 1.0
    assert run["systems"] == systems("dense-fsdp")
    assert run["losses"] == found["dense itself"][0]["losses"]


def test_an_arm_that_was_tried_trains_as_the_recipe_itself(found):
    run = found["tried"][0]
    (seconds,) = run["auto"]["tried"].values()
    assert 0 < seconds < 0.2
    assert run["auto"]["chosen"] == "static-8bit"
    assert "tried, " in run["auto"]["words"]
    assert run["losses"] == found["static itself"][0]["losses"]
    assert found["static"][0]["auto"]["tried"] == {}  # three dense steps would take too long


@pytest.mark.parametrize(
    ("case", "arms"),
    [
        ("sharded", {"static-8bit", "aquavit", "aquavit-grad4", "zeropp"}),
        ("replicas", {"scape-90"}),
        ("tensor", {"taco"}),
    ],
)
def test_the_arms_of_each_link(found, case, arms):
    auto = found[case][0]["auto"]
    assert {arm["name"] for arm in auto["arms"]} | set(auto["left_out"]) == arms
    assert auto["left_out"] == {}
    assert auto["chosen"] in arms
    assert auto["expected_step_s"] == min(arm["step_s"] for arm in auto["arms"])


@pytest.mark.parametrize(
    "case", ["static", "tried", "fast", "sharded", "replicas", "tensor", "probed"]
)
def test_ranks_choose_alike(found, case):
    first, second = found[case]
    assert first["auto"]["chosen"] == second["auto"]["chosen"]
    assert first["systems"] == second["systems"]


def test_an_arm_whose_gain_begins_after_the_run_is_not_chosen(found):
    auto = found["few steps"][0]["auto"]
    assert auto["chosen"] == "dense"
    assert [arm["name"] for arm in auto["arms"]] == ["scape-90"]


def test_systems_that_were_given_are_one_of_the_arms(found):
    auto = found["given"][0]["auto"]
    assert {arm["name"] for arm in auto["arms"]} == {"static-8bit", "as given"}
    assert auto["chosen"] == "as given"
    assert found["given"][0]["systems"] == systems("static-4bit")


def test_the_run_tells_what_was_chosen_expected_and_measured(found):
    first, second = found["static"]
    chose = first["lines"][0]
    assert "chose static-8bit: expected" in chose
    assert chose.endswith("x")
    assert second["lines"] == []
    auto = first["written"]
    assert auto["chosen"] == "static-8bit"
    assert auto["expected_speedup"] == pytest.approx(
        auto["dense"]["step_s"] / auto["expected_step_s"]
    )
    # Six steps less the three that compile; loopback is far faster than the made-up link.
    assert auto["measured"]["steps"] == 3
    assert auto["measured"]["off"]
    assert auto["words"] in chose
    assert auto["measured"]["over_expected"] < 0.5
    assert auto["links"]["groups"]["dp_shard"]["collectives"]["all_gather"]["bytes_per_s"] == SLOW
    assert first["compress"] == "given"


def test_the_probe_itself(found):
    run = found["probed"][0]
    assert run["auto"]["chosen"] in ("dense", "static-8bit")
    links = run["auto"]["links"]
    assert set(links["groups"]) == {"dp_shard"}
    assert set(links["groups"]["dp_shard"]["collectives"]) == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "send_recv",
    }
    assert links["compute"]["step_s"] > 0
    assert run["auto"]["probe_s"] > 0


def test_a_resumed_run_keeps_the_choice(found):
    """The link is fast when it resumes; the checkpoint's own choice stands."""
    assert found["stopped"][0]["auto"]["chosen"] == "static-8bit"
    run = found["resumed"][0]
    assert run["systems"] == systems("static-8bit")
    assert run["losses"] == found["static itself"][0]["losses"]
    assert run["written"]["chosen"] == "static-8bit"
    assert run["lines"] == []


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "misfit",
            "ConfigError: auto: arm taco: it compresses what crosses mesh.tp, which has one "
            "rank here",
        ),
        ("unknown", "ConfigError: unknown recipe 'aquavti': did you mean 'aquavit'?"),
        (
            "no link",
            "ConfigError: auto.arms: recipe subspace-pp compresses none of the links weights, "
            "gradients, tensor, replicas, which auto chooses for",
        ),
        ("uncovered", "ConfigError: the cost model covers dense models: set model.num_experts 0"),
    ],
)
def test_what_cannot_be_chosen_is_refused_on_every_rank(found, case, message):
    assert [rank["error"] for rank in found[case]] == [message, message]
