"""Resuming at any step equals the uninterrupted run bit for bit, and on other layouts in value."""

import json
import shutil
from pathlib import Path

import pytest

from thinwire.train.launch import launch

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
BASE = {
    "steps": 5,
    "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 64},
    "data": {"source": "synthetic", "seq_len_tokens": 32, "batch_seqs": 8, "micro_batches": 2},
    "optim": {"warmup_steps": 2, "lr": 1e-2},
    "evaluation": {"num_seqs": 4},
}
WEIGHTS = {"codec": "static", "bits": 4, "block_size": 32, "min_shard_numel": 64}
LAYOUTS = {
    "static": {"mesh": {"dp_shard": 2}, "systems": {"weights": WEIGHTS}},
    "replicas": {"mesh": {"dp_shard": 1, "dp_replicate": 2}},
    "pipeline": {"mesh": {"dp_shard": 1, "pp": 2}},
    "tensor": {"mesh": {"dp_shard": 1, "tp": 2}},
}


def steps(out):
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "step_s"} for line in lines]


def cases_of(root, name):
    """Whole run; whole run again; stop after 1 and 3 and go on to the end from each."""
    base = BASE | LAYOUTS[name]
    cases = [
        {"config": base | {"out": f"{root}/{name}/{twin}"}, "resume": None}
        for twin in ("whole", "again")
    ]
    for stop in (1, 3):
        out = f"{root}/{name}/stop{stop}"
        cases.append({"config": base | {"out": out, "stop_after": stop}, "resume": None})
        cases.append({"config": base | {"out": out}, "resume": out})
    return cases


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    cases = [case for name in LAYOUTS for case in cases_of(root, name)]
    # Another layout goes on from the checkpoint of another: values, not bits, are kept.
    for name in ("replicas", "pipeline", "tensor"):
        cases.append(
            {
                "config": BASE | LAYOUTS[name] | {"out": f"{root}/moved/{name}"},
                "resume": f"{root}/replicas/stop3/checkpoints/step-00000003",
            }
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        launch(2, "trainer_cases:resumed", {"cases": cases})
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_runs_of_one_configuration_are_equal(root, name):
    """Field case X4: same configuration, different loss."""
    assert steps(root / name / "whole") == steps(root / name / "again")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("stop", [1, 3])
def test_resume_equals_the_uninterrupted_run(root, name, stop):
    whole, resumed = root / name / "whole", root / name / f"stop{stop}"
    assert steps(resumed) == steps(whole)
    runs = [json.loads((out / "run.json").read_text()) for out in (whole, resumed)]
    for key in ("val_loss", "train_loss", "tokens"):
        assert runs[0]["result"][key] == runs[1]["result"][key]


def test_ledger_totals_continue(root):
    whole, resumed = (
        json.loads((root / "static" / out / "run.json").read_text())["ledger"]
        for out in ("whole", "stop3")
    )
    for link in whole:
        for key in ("calls", "dense_bytes", "wire_bytes", "exempt_bytes"):
            assert whole[link][key] == resumed[link][key], (link, key)


@pytest.mark.parametrize("name", ["replicas", "pipeline", "tensor"])
def test_another_layout_continues_from_a_checkpoint(root, name):
    want = steps(root / "replicas" / "whole")[3:]
    got = steps(root / "moved" / name)
    assert [s["loss"] for s in got] == pytest.approx([s["loss"] for s in want], rel=2e-5)
    assert [s["step"] for s in got] == [4, 5]


def test_a_torn_save_is_ignored(root):
    """A folder that a killed run left behind is not a checkpoint."""
    from thinwire.train.saved import find_checkpoint

    out = root / "static" / "stop3"
    torn = root / "torn"
    shutil.copytree(out, torn)
    shutil.copytree(torn / "checkpoints" / "step-00000003", torn / "checkpoints" / ".saving")
    (torn / "checkpoints" / "step-00000009").mkdir()
    assert find_checkpoint(torn) == torn / "checkpoints" / "step-00000003"
