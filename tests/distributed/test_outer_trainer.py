"""The trainer's replicas that train apart on real ranks: learning, bytes, metrics, resume."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_sparseloco_ranks import adam, net, train
from thinwire.errors import CheckpointError
from thinwire.sparseloco import Options, SparseLoCo, message_nbytes
from thinwire.testing.ranks import run_ranks
from thinwire.train.dense import export_run
from thinwire.train.launch import launch
from thinwire.train.model import build
from thinwire.train.outer import OuterSystem
from thinwire.train.parse import from_dict
from thinwire.train.recipes import OUTER

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
MODEL = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 96}
DATA = {"source": "synthetic", "seq_len_tokens": 32, "batch_seqs": 8, "micro_batches": 2}
SPARSE = {"method": "sparseloco", "sync_every": 3}
METHODS = {
    "sparse": SPARSE,
    "paper": SPARSE | {"quant": "paper", "aggregate": "replicas", "alpha": 0.7},
    "diloco": {"method": "diloco", "sync_every": 3, "alpha": 0.7},
    "int8": {"method": "diloco", "sync_every": 3, "alpha": 0.7, "codec": "int8"},
}
# Stops within a round and at the end of one.
CUTS = {"sparse": (4, 6), "diloco": (5,)}
STEPS = 10


def config(root, out, outer, **more):
    return {
        "steps": STEPS,
        "out": f"{root}/{out}",
        "model": MODEL,
        "data": DATA,
        "optim": {"warmup_steps": 2, "lr": 3e-3},
        "mesh": {"dp_shard": 1, "dp_replicate": -1},
        "evaluation": {"num_seqs": 4},
        "systems": {"outer": outer},
        **more,
    }


def whole_and_cut(root, name, outer, stops, **more):
    cases = [{"config": config(root, name, outer, **more), "resume": None}]
    for stop in stops:
        cut = config(root, f"{name}-{stop}", outer, **more)
        cases.append({"config": cut | {"stop_after": stop}, "resume": None})
        cases.append({"config": cut, "resume": cut["out"]})
    return cases


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("outer")
    cases = [c for n, o in METHODS.items() for c in whole_and_cut(root, n, o, CUTS.get(n, ()))]
    shared = config(root, "master", SPARSE) | {"stop_after": 5}
    shared["evaluation"] = {"num_seqs": 4, "every_steps": 5, "weights": "master"}
    cases.append({"config": shared, "resume": None})
    fsdp = {"mesh": {"dp_replicate": 2, "dp_shard": 2}}
    two = whole_and_cut(root, "fsdp", SPARSE, (4,), **fsdp)
    moved = config(root, "moved", SPARSE, mesh={"dp_replicate": 4, "dp_shard": 1})
    two.append({"config": moved, "resume": f"{root}/sparse-6/checkpoints/step-00000006"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        poisoned = {"config": config(root, "poisoned", SPARSE)}
        parts = {"resumed": {"cases": cases}, "poisoned_replica": poisoned}
        both = launch(2, "trainer_cases:several", {"parts": parts})
        launch(4, "trainer_cases:resumed", {"cases": two})
        one = config(root, "one", SPARSE)
        step_4 = f"{root}/sparse-4/checkpoints/step-00000004"
        launch(1, "trainer_cases:resumed", {"cases": [{"config": one, "resume": step_4}]})
        ends = [found["poisoned_replica"] for found in both]
        (root / "poisoned" / "ends.json").write_text(json.dumps(ends))
    return root


def steps(root, name):
    lines = (Path(root) / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run(root, name):
    return json.loads((Path(root) / name / "run.json").read_text())


@pytest.mark.parametrize("name", [*METHODS, "fsdp"])
def test_every_method_learns(root, name):
    losses = [s["loss"] for s in steps(root, name)]
    assert losses[-1] < losses[0]
    assert len(losses) == STEPS


@pytest.mark.parametrize(
    ("name", "stop"), [(n, stop) for n, stops in CUTS.items() for stop in stops] + [("fsdp", 4)]
)
def test_resume_equals_the_uninterrupted_run(root, name, stop):
    whole, resumed = steps(root, name), steps(root, f"{name}-{stop}")
    for key in ("loss", "grad_norm", "outer", "val_loss"):
        assert [s.get(key) for s in resumed] == [s.get(key) for s in whole]


def test_rounds_and_their_bytes_are_in_the_metrics(root):
    lines = steps(root, "sparse")
    rounds = {s["step"]: s["outer"] for s in lines if "outer" in s}
    assert list(rounds) == [3, 6, 9, 10]
    shapes = {
        n: p.shape for n, p in build(from_dict({"model": MODEL}).model, 32, 0).named_parameters()
    }
    nbytes = message_nbytes(shapes, Options()) + 4 + 1 + 1 + 32
    for number, found in enumerate(rounds.values()):
        assert found["round"] == number
        assert found["accepted"] == [0, 1]
        assert found["left_out"] == {}
        assert found["sent_bytes"] == found["received_bytes"] == nbytes
    assert rounds[3]["tokens"] == {"0": 3 * 4 * 32, "1": 3 * 4 * 32}
    assert rounds[10]["tokens"]["0"] == 4 * 32
    assert [s["wire"].get("outer") for s in lines[:4]] == [None, None, nbytes, None]
    assert "gradients" not in lines[0]["wire"]
    ledger = run(root, "sparse")["ledger"]["outer"]
    assert ledger["wire_bytes"] == 4 * nbytes
    assert ledger["compressed_ratio"] > 50


def test_dense_methods_send_what_they_say(root):
    params = run(root, "diloco")["memory"]["params"]
    assert run(root, "diloco")["ledger"]["outer"]["wire_bytes"] == 4 * 4 * params
    assert run(root, "int8")["ledger"]["outer"]["compressed_ratio"] > 3.5


def test_replicas_of_shards_follow_whole_replicas(root):
    whole, sharded = steps(root, "sparse"), steps(root, "fsdp")
    for a, b in zip(whole[:3], sharded[:3], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert sharded[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=0.02)
    ledgers = run(root, "fsdp")["ledger_ranks"]
    assert ["outer" in ledger for ledger in ledgers] == [True, False, True, False]


def test_evaluation_of_shared_and_of_local_weights(root):
    """Field case W2: evaluation states which weights it uses; both can be asked for."""
    record = steps(root, "master")[4]
    third = steps(root, "sparse")[2]
    assert record["loss"] == steps(root, "sparse")[4]["loss"]
    assert record["val_loss"] > 0
    assert third["step"] == 3
    assert run(root, "master")["result"]["val_weights"] == "master"


def test_a_nan_replica_does_not_end_the_run(root):
    """Field case H8: one NaN replica poisons all."""
    lines = steps(root, "poisoned")
    rounds = [s["outer"] for s in lines if "outer" in s]
    assert rounds[0]["accepted"] == [0]
    assert rounds[0]["left_out"] == {"1": "abstained"}
    assert [r["accepted"] for r in rounds[1:]] == [[0, 1]] * 3
    ends = json.loads((Path(root) / "poisoned" / "ends.json").read_text())
    assert all(end["finite"] for end in ends)
    assert len({h for end in ends for h in end["hashes"]}) == 1
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_fewer_and_more_replicas_go_on(root):
    whole = steps(root, "sparse")
    one, four = steps(root, "one"), steps(root, "moved")
    assert [s["step"] for s in one] == [5, 6, 7, 8, 9, 10]
    assert one[-1]["outer"]["accepted"] == [0]
    assert one[-1]["loss"] == pytest.approx(whole[-1]["loss"], abs=0.2)
    assert four[0]["loss"] == pytest.approx(whole[6]["loss"], rel=1e-4)
    assert four[-1]["outer"]["accepted"] == [0, 1, 2, 3]


def test_replicas_are_added_between_rounds_only():
    def work(rank):
        model = net()
        optimizer = adam(model)
        layout = SimpleNamespace(sizes={"dp_replicate": 2}, index=lambda axis: rank)
        system = OuterSystem(SparseLoCo(model, optimizer, sync_every=3), layout)
        train(model, optimizer, rank, 4)
        system.expect({"dp_replicate": 1})
        assert system.heir == 0
        with pytest.raises(CheckpointError, match="between rounds only"):
            system.load_state_dict(system.state_dict())

    run_ranks(2, work)


def test_export_takes_one_replica(root):
    out = export_run(Path(root) / "sparse-6", Path(root) / "dense.safetensors", "thinwire")
    weights = load_file(out)
    assert set(weights) == set(build(from_dict({"model": MODEL}).model, 32, 0).state_dict())
    assert all(torch.isfinite(x).all() for x in weights.values())


def test_recipes_build():
    for name, recipe in OUTER.items():
        assert recipe().systems.outer.method != "none", name
    assert OUTER["sparseloco-fsdp"]().mesh.dp_replicate == 2
