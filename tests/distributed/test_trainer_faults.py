"""Runs that must end: each on every rank, with one error that says why."""

import json
import math
from pathlib import Path

import pytest

from thinwire.train.launch import RankFailure, launch

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
SMALL = {
    "steps": 20,
    "model": {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 32},
    "data": {"source": "synthetic", "seq_len_tokens": 16, "batch_seqs": 4},
    "watchdog": {"stuck_steps": 4},
    "evaluation": {"num_seqs": 2},
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")

    def start(case, **changes):
        config = SMALL | {"out": str(tmp_path / "out")} | changes
        return launch(2, f"trainer_cases:{case}", {"config": config})

    return start


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each rank says of the cases that don't end its process: name -> [per rank]."""
    model = SMALL["model"] | {"num_experts": 2, "experts_per_token": 1}
    parts = {
        "stuck": {"config": SMALL | {"out": str(tmp_path_factory.mktemp("stuck"))}},
        "poisoned": {"config": SMALL | {"out": str(tmp_path_factory.mktemp("poisoned"))}},
        "evaluated": {
            "config": SMALL
            | {"systems": {"weights": {"codec": "static", "bits": 4, "min_shard_numel": 64}}}
        },
        "disjoint_experts": {"config": SMALL | {"model": model}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        ranks = launch(2, "trainer_cases:several", {"parts": parts})
    return {name: [rank[name] for rank in ranks] for name in parts}


def test_a_frozen_loss_ends_the_run(answers):
    """Field case W4: loss frozen near ln(vocabulary), gradient norm 0, nobody notices."""
    for answer in answers["stuck"]:
        assert answer["step"] == SMALL["watchdog"]["stuck_steps"] - 1
        assert answer["error"].startswith("StuckError")
        assert f"loss {math.log(256):.4f} unchanged" in answer["error"]


def test_both_gathered_and_master_weights_can_be_evaluated(answers):
    """Field case W2: training looks fine, evaluation is bad."""
    first, second = answers["evaluated"]
    assert first == second
    assert first["gathered"] != first["master"]
    assert first["gathered"] == pytest.approx(first["master"], rel=1e-2)


def test_a_nan_on_one_rank_ends_the_run_on_all(answers):
    first, second = answers["poisoned"]
    assert first == second
    assert first["step"] == 0
    assert first["error"].startswith("NonFiniteError")


def test_ranks_that_use_different_experts_finish(answers):
    """Field case W11: a MoE layer hangs since ranks use different experts."""
    assert [a["chosen"] for a in answers["disjoint_experts"]] == [[0], [1]]
    for answer in answers["disjoint_experts"]:
        assert max(answer["differences"].values()) < 1e-6, answer["differences"]


def test_compression_that_did_not_happen_fails_the_run(run, tmp_path):
    """Field case X3: "compressed" path not taken, nobody told."""
    with pytest.raises(RankFailure, match="link 'tensor' was to be compressed but carried") as info:
        run("undone", steps=2)
    assert info.value.status == 1
    assert json.loads((tmp_path / "out" / "run.json").read_text())["result"]["steps"] == 2


def test_a_killed_rank_ends_the_others(run):
    with pytest.raises(RankFailure, match="rank 1 was ended by SIGKILL"):
        run("one_dies")


def test_an_error_of_one_rank_is_shown_once_and_ends_the_others(run):
    with pytest.raises(RankFailure) as info:
        run("one_raises")
    assert str(info.value) == "rank 1 alone cannot read its data"
    assert info.value.status == 2
