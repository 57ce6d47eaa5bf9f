"""The trainer's recipes of replicas on two real ranks: learning, bytes, resume, re-deal."""

import json
from pathlib import Path

import pytest

from thinwire.scape.messages import message_nbytes
from thinwire.scape.reduce import owners_sent
from thinwire.scape.table import build_table
from thinwire.train.launch import launch
from thinwire.train.model import build
from thinwire.train.parse import from_dict
from thinwire.train.recipes import REPLICAS

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
MODEL = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 96}
DATA = {"source": "synthetic", "seq_len_tokens": 32, "batch_seqs": 8, "micro_batches": 2}
SCAPE = {"optimizer": "scape", "density": 0.05, "dense_steps": 1}
OPTIMIZERS = {
    "adamw": {},
    "adams": {"optimizer": "adams"},
    "scape": SCAPE,
    "local": SCAPE | {"clip": "local"},
    "overlap": SCAPE | {"overlap": True, "clip": "reconstructed"},
    "no overlap": SCAPE | {"clip": "reconstructed"},
    "offload": SCAPE | {"offload": "all"},
    "topk": SCAPE | {"optimizer": "topk-adamw"},
    "random": SCAPE | {"mask_source": "random"},
    "dgc": {"optimizer": "dgc", "density": 0.01},
    "demo": {"optimizer": "demo"},
    "powersgd": {"optimizer": "powersgd"},
    "powersgd-ddp": {"optimizer": "powersgd-ddp"},
}
RESUMED = ("scape", "topk", "dgc", "powersgd")


# Dense clipping bounds another norm: runs that are compared with each other go without.
FREE = ("adams", "scape", "offload", "one")


def name_is_free(out):
    return out.split("-")[0] in FREE


def config(root, out, replicas, steps=6, **more):
    return {
        "steps": steps,
        "out": f"{root}/{out}",
        "model": MODEL,
        "data": DATA,
        "optim": {"warmup_steps": 2, "lr": 3e-3, "max_norm": 0.0 if name_is_free(out) else 1.0},
        "mesh": {"dp_shard": 1, "dp_replicate": -1},
        "evaluation": {"num_seqs": 4},
        "systems": {"replicas": replicas},
        **more,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("scape")
    cases = [{"config": config(root, n, r), "resume": None} for n, r in OPTIMIZERS.items()]
    wide = {"optimizer": "powersgd-ddp"}
    wide = config(root, "wide", wide, model=MODEL | {"hidden_dim": 1024})
    cases.append({"config": wide, "resume": None})
    for name in RESUMED:
        cut = config(root, f"{name}-cut", OPTIMIZERS[name])
        cases.append({"config": cut | {"stop_after": 3}, "resume": None})
        cases.append({"config": cut, "resume": cut["out"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        launch(2, "trainer_cases:resumed", {"cases": cases})
        one = config(root, "one", SCAPE, steps=6)
        step_3 = f"{root}/scape-cut/checkpoints/step-00000003"
        launch(1, "trainer_cases:resumed", {"cases": [{"config": one, "resume": step_3}]})
    return root


def steps(root, name):
    lines = (Path(root) / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def ledger(root, name):
    return json.loads((Path(root) / name / "run.json").read_text())["ledger"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(root, name):
    losses = [s["loss"] for s in steps(root, name)]
    assert losses[-1] < losses[0]
    assert len(losses) == 6


def test_first_steps_are_dense_and_equal_dense_adams(root):
    dense, sparse = steps(root, "adams"), steps(root, "scape")
    for a, b in zip(dense[:3], sparse[:3], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
    assert [s["density"] for s in sparse] == [1.0, 1.0, 0.05, 0.05, 0.05, 0.05]


def test_sparse_steps_send_less(root):
    sparse = steps(root, "scape")
    dense_bytes = sparse[0]["wire"]["gradients"]
    now = sparse[-1]["wire"]
    model = build(from_dict({"model": MODEL}).model, 32, 0)
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)
    table = build_table(names, shapes, 2)
    assert dense_bytes == 4 * (table.numel + 1)
    assert now["gradients"] == 4 * (table.kept(0.05) + 1)
    lengths = [message_nbytes(table.owned_by(r), 0.05, "auto") for r in range(2)]
    assert now["masks"] == owners_sent(lengths)[1]
    assert sparse[-1]["mask_saved_bytes"] > 0
    assert ledger(root, "scape")["gradients"]["compressed_ratio"] > 15
    run = json.loads((Path(root) / "offload" / "run.json").read_text())
    assert run["memory"]["host_bytes"] > 0


def test_torchs_powersgd_hook_gets_one_bucket(root):
    """DDP's first bucket ends at 1 MiB; chained all-reduces of two could cross between ranks."""
    run = json.loads((Path(root) / "wide" / "run.json").read_text())
    assert 4 * run["memory"]["params"] > 2**20
    assert run["ledger"]["gradients"]["calls"] == 6


@pytest.mark.parametrize(("name", "twin"), [("overlap", "no overlap"), ("offload", "scape")])
def test_where_and_when_do_not_change_numbers(root, name, twin):
    assert [s["loss"] for s in steps(root, name)] == [s["loss"] for s in steps(root, twin)]


@pytest.mark.parametrize("name", RESUMED)
def test_resume_equals_the_uninterrupted_run(root, name):
    """Field case S5: kill at step k, resume: same trajectory, bit for bit."""
    whole, resumed = steps(root, name), steps(root, f"{name}-cut")
    assert [s["loss"] for s in resumed] == [s["loss"] for s in whole]
    assert [s["grad_norm"] for s in resumed] == [s["grad_norm"] for s in whole]


def test_a_checkpoint_of_two_replicas_continues_on_one(root):
    whole, one = steps(root, "scape"), steps(root, "one")
    assert [s["step"] for s in one] == [4, 5, 6]
    # The first step uses the saved weights; then one worker owes what two did.
    assert one[0]["loss"] == pytest.approx(whole[3]["loss"], rel=1e-5)
    assert one[-1]["loss"] == pytest.approx(whole[-1]["loss"], abs=0.1)


def test_recipes_build():
    for name, recipe in REPLICAS.items():
        assert recipe().mesh.dp_shard == 1, name
