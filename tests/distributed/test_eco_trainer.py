"""Stored weights in the trainer: arms on 1 and 2 ranks, resume elsewhere, export, dense start."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from thinwire import cli
from thinwire.errors import ConfigError
from thinwire.testing.ranks import run_ranks
from thinwire.train.dense import export_run, from_hf_name
from thinwire.train.loop import train
from thinwire.train.parse import from_dict
from thinwire.train.recipes import RECIPES, recipe

SMALL = {
    "steps": 3,
    "model": {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 48},
    "data": {"source": "synthetic", "seq_len_tokens": 16, "batch_seqs": 4},
    "evaluation": {"num_seqs": 2},
}
ARMS = [
    *("dense-adamw", "bf16-naive", "bf16-sr", "bf16-kahan", "eco-fp8-sr-8bit"),
    *(
        f"{a}-{f}-{r}"
        for a in ("master", "naive", "eco")
        for f in ("fp8", "int8", "int4")
        for r in ("rtn", "sr")
    ),
]
# Two layouts that each add a mechanism, beside the arms that run in the loop below.
RUN = ["bf16-kahan", "master-int8-rtn", "naive-fp8-sr", "eco-fp8-sr", "eco-int4-sr", "eco-moe"]
LAYOUTS = {
    "tensor": (2, {"mesh": {"tp": 2, "dp_shard": 1}}),
    "replicas": (
        2,
        {
            "mesh": {"dp_replicate": 2, "dp_shard": 1},
            "systems": {"storage": {"check_every_steps": 1}},
        },
    ),
    "both": (4, {"mesh": {"tp": 2, "dp_shard": 2}}),
}


def run(name, num_ranks, out, resume=None, **changes):
    config = from_dict({**SMALL, **changes, "out": str(out)}, recipe(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_ranks(num_ranks, lambda _: train(config, resume=resume))[0]


def test_every_arm_is_a_recipe():
    assert set(ARMS) <= RECIPES.keys()
    assert recipe("eco-fp8-sr").systems.storage.error == "momentum"


@pytest.mark.parametrize("name", RUN)
def test_arms_train_alike_on_one_and_two_ranks(name, tmp_path):
    one, two = run(name, 1, tmp_path / "1"), run(name, 2, tmp_path / "2")
    assert two["result"]["val_loss"] == pytest.approx(one["result"]["val_loss"], abs=2e-3)
    link = two["ledger"]["weights"]
    assert link["compressed_ratio"] > 1.8
    memory = one["memory"]
    if name == "eco-fp8-sr":
        stored, dense = memory["stored_params"], memory["params"] - memory["stored_params"]
        rows = 4 * 32 + 2 * 48 + 32
        assert memory["weight_bytes"] == stored + 4 * rows + 4 * dense
        assert memory["optimizer_bytes"] == pytest.approx(8 * memory["params"], rel=1e-3)
        assert memory["peak_bytes"] > memory["weight_bytes"] + memory["optimizer_bytes"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same_losses(layout, tmp_path):
    num_ranks, changes = LAYOUTS[layout]
    one = run("eco-fp8-sr", 1, tmp_path / "1")
    other = run("eco-fp8-sr", num_ranks, tmp_path / "n", **changes)
    assert other["result"]["val_loss"] == pytest.approx(one["result"]["val_loss"], abs=1e-4)


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_resume_export_and_a_dense_start(tmp_path):
    """Field case E3: a final save that crashes; resume is bit-exact, also on one rank in value."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run("eco-int4-sr", 2, whole, checkpoints={"every_steps": 3})
    run("eco-int4-sr", 2, stopped, stop_after=2)
    newest = stopped / "checkpoints" / "step-00000002"
    run("eco-int4-sr", 1, tmp_path / "one", resume=newest)
    assert losses(tmp_path / "one")[-1] == pytest.approx(losses(whole)[-1], abs=1e-5)
    run("eco-int4-sr", 2, stopped, resume=stopped, checkpoints={"every_steps": 3})
    assert losses(stopped) == losses(whole)

    file = export_run(whole, tmp_path / "hf" / "model.safetensors", "hf")
    tensors = load_file(file)
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (48, 32)
    assert {from_hf_name(k) for k in tensors} == {
        from_hf_name(k)
        for k in load_file(export_run(whole, tmp_path / "own.safetensors", "thinwire"))
    }
    assert len(torch.unique(tensors["model.layers.0.mlp.up_proj.weight"])) <= 15
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["hidden_size"] == 32

    tuned = run("eco-int4-finetune", 2, tmp_path / "tuned", init=str(file))
    assert losses(tmp_path / "tuned")[0] < losses(whole)[0]
    assert tuned["memory"]["stored_params"] > 0
    with pytest.raises(ConfigError, match="thinwire export RUN"):
        run("eco-int4-finetune", 1, tmp_path / "none")


MISTAKES = {
    "eco-fp8-sr --systems.storage.only-experts": "systems.storage.only_experts needs "
    "model.num_experts > 0",
    "eco-fp8-sr --systems.storage.fused-backward": "systems.storage.fused_backward steps before",
    "eco-fp8-sr --compute.reshard-after-forward 2 --nproc 4": "stored weights cannot be resharded",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"thinwire: {MISTAKES[arguments]}")
