"""`thinwire train` as a user meets it: what it writes, and one line for each mistake."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire import cli
from thinwire.train import parse
from thinwire.train.recipes import RECIPES, recipe

SMALL = [
    *("--steps", "3", "--data", "synthetic", "--data.seq-len-tokens", "16"),
    *("--data.batch-seqs", "4", "--evaluation.num-seqs", "2", "--model.num-layers", "1"),
    *("--model.dim", "32", "--model.num-heads", "2", "--model.num-kv-heads", "2"),
    *("--model.hidden-dim", "32", "--systems.weights.min-shard-numel", "64"),
    *("--systems.weights.block-size", "128"),
]

# arguments -> what the one line must say
MISTAKES = {
    "static-6bits": "unknown recipe 'static-6bits': did you mean 'static-6bit'?",
    "--model.dmi 64": "unknown setting 'model.dmi': did you mean 'model.dim'?",
    "--block-size 64": "unknown setting 'block-size': did you mean 'systems.weights.block-size'?",
    "--steps=0": "steps must be at least 1, got 0",
    "--model.dim x": "--model.dim: invalid literal for int() with base 10: 'x'",
    "--systems.weights.bits 5": "invalid choice '5' for argument '--systems.weights.bits'. "
    "Expected one of ('2', '4', '6', '8').",
    "--model.num-heads 3": "model.dim 128 must be an even multiple of model.num_heads 3",
    "--nproc zero": "--nproc must be a number of at least 1, got 'zero'",
    "dense-3d --nproc 2": "mesh pp 2 x dp_replicate 1 x dp_shard -1 x tp 2 needs a multiple of 4 "
    "ranks, but 2 run: change --nproc",
    "dense-tp --nproc 3": "tp 3 must divide model.num_kv_heads 2 and model.hidden_dim 384",
    "--nproc 3": "data.batch_seqs 16 must be a multiple of data ranks x data.micro_batches = 3",
    "dense-pp --nproc 2 --data.micro-batches 1": "pp 2 needs at least 2 micro-batches: set "
    "data.micro_batches (now 1)",
    "--nproc 4 --compute.reshard-after-forward 3": "compute.reshard_after_forward 3 must be -1, 0 "
    "or a divisor of mesh.dp_shard 4",
    "--config missing.toml": "cannot read configuration missing.toml: "
    "[Errno 2] No such file or directory: 'missing.toml'",
    "--resume nowhere": "no checkpoint in nowhere: nothing to resume from",
    "zzz": "unknown recipe 'zzz': the nearest are @; `thinwire recipes` lists all",
    "--data nowhere": "data source 'nowhere' is no file or folder here, nor one of stdlib, sotu, "
    "synthetic",
    "--init none.safetensors": "cannot start from init none.safetensors: no such file; export a "
    "run with `thinwire export RUN --out none.safetensors`",
    "subspace-pp --nproc 2 --systems.pipeline.ratio 3": "systems.pipeline.ratio 3 does not divide "
    "model.dim 128: take a divisor, or say systems.pipeline.rank 42",
    "hetero --nproc 3 --mesh.replicas 0_1,2:3": "mesh.replicas '0 1,2:3': rank_ratio 3 does not "
    "divide model.dim 128: take a divisor",
    "sparseloco --nproc 2 --systems.outer.min-quorum 3": "systems.outer.min_quorum 3 can't be met "
    "by 2 replicas: no round would ever commit",
    "sparseloco --nproc 2 --mesh.dp-replicate 1 --mesh.dp-shard 2": "systems.outer.method "
    "sparseloco compresses traffic of mesh.dp_replicate, but mesh.dp_replicate is 1: set "
    "mesh.dp_replicate to 2 or more, or systems.outer.method none",
    "taco --nproc 2 --mesh.tp 1 --mesh.dp-replicate 2": "systems.tensor.codec hadamard compresses "
    "traffic of mesh.tp, but mesh.tp is 1: set mesh.tp to 2 or more, or systems.tensor.codec dense",
    "dgc --nproc 4 --mesh.dp-replicate 2 --mesh.tp 2": "systems.replicas.optimizer dgc "
    "synchronizes whole replicas: set mesh.dp_replicate -1 and all other axes 1",
    "subspace-pp --nproc 4 --mesh.pp 2 --mesh.dp-replicate 2 --systems.outer.method sparseloco": (
        "systems.pipeline.mode and systems.outer.method go together in mesh.replicas: say "
        '--mesh.replicas "0,1:8 2,3:8" in place of the axes'
    ),
    "dense-pp --nproc 4 --mesh.pp 2 --mesh.dp-replicate 2 --systems.outer.method diloco": (
        "systems.outer.method diloco gathers whole replicas: set mesh.pp 1, or name replicas of "
        "several stages in mesh.replicas (sparseloco)"
    ),
    "everything-sites --nproc 4 --systems.storage.check-every-steps 5": (
        "systems.storage.check_every_steps compares replicas, which differ between the rounds of "
        "systems.outer: set it to 0 (systems.outer.check_every compares what they share)"
    ),
    "everything-sites --nproc 4 --systems.storage.error kahan": "systems.storage.error kahan keeps "
    "a second copy of each weight, which systems.outer.method sparseloco would leave behind: set "
    "it to momentum or drop",
    "everything --nproc 4 --systems.weights.codec difference": "systems.weights.codec difference "
    "keeps a full-precision copy, which systems.storage fp8_e4m3 does without: take aquavit or "
    "static",
    "taco-scape --nproc 4 --systems.replicas.overlap --optim.max-norm 0 "
    "--compute.sequence-parallel": "systems.replicas.overlap sends values before "
    "compute.sequence_parallel has summed them over the pieces of the sequence: leave one of them "
    "out",
    "--mesh.tp 2 --model.num-experts 4 --nproc 2": "experts cannot be split over tp: set mesh.tp 1 "
    "or model.num_experts 0",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(arguments, capsys, tmp_path, monkeypatch):
    """Field case X1: an unknown or misspelt config key is ignored."""
    monkeypatch.chdir(tmp_path)
    words = [word.replace("0_1", "0 1") for word in arguments.split()]
    assert cli.main(["train", *words]) == 2
    out, err = capsys.readouterr()
    before, _, after = MISTAKES[arguments].partition("@")  # where three names stand
    assert err.startswith(f"thinwire: {before}")
    assert err.endswith(f"{after}\n")
    assert err.count("\n") == 1
    assert len(err) - len(f"thinwire: {before}{after}\n") < (
        60 if "@" in MISTAKES[arguments] else 1
    )
    assert out == ""
    assert not list(tmp_path.iterdir())


FILES = {
    "a.toml": ("[model]\ndmi = 3", "unknown setting 'model.dmi': did you mean 'model.dim'?"),
    "b.toml": ("[model]\ndim = '64'", "setting 'model.dim' must be int, got '64'"),
    "c.toml": ("model = 3", "setting 'model' is a section, got 3"),
    "d.json": ('{"config": {"step": 3}}', "unknown setting 'step': did you mean 'steps'?"),
    "e.toml": ("[systems.weights]\nbits = 3", "setting 'systems.weights.bits' must be one of "),
    "f.toml": ("[optim]\nbetas = [0.9]", "setting 'optim.betas' must be 2 values, got [0.9]"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_in_a_file_is_one_line(name, capsys, tmp_path):
    text, message = FILES[name]
    (tmp_path / name).write_text(text)
    assert cli.main(["train", "--config", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_files(name, tmp_path):
    config = recipe(name)
    (tmp_path / "run.json").write_text(json.dumps({"config": parse.to_dict(config)}))
    assert parse.load(tmp_path / "run.json") == config


def test_recipes_are_listed_without_torch():
    code = "import sys, thinwire.cli as c; c.main(['recipes']); print('torch' in sys.modules)"
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(RECIPES)
    assert lines[-1] == "False"


def thinwire(*args, limit_bytes=None, program=("-m", "thinwire")):
    def limit():
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, *program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=280,
        preexec_fn=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.processes
def test_a_run_writes_its_files_and_prints_the_byte_table(tmp_path):
    out = tmp_path / "run"
    args = (*SMALL, "--out", out, "--tensorboard", "--compute.dtype", "bfloat16")
    done = thinwire("train", "static-4bit", "--nproc", 2, *args)
    assert done.returncode == 0, done.stderr
    run = json.loads((out / "run.json").read_text())
    assert run["result"]["steps"] == 3
    assert run["result"]["tokens"] == 3 * 4 * 16
    assert run["config"]["recipe"] == "static-4bit"
    assert run["ledger"]["weights"]["compressed_ratio"] == pytest.approx(16 / (4 + 32 / 128))
    assert any(e["name"] == "norm.weight" for e in run["exemptions"])
    assert run["memory"]["params"] == 2 * 256 * 32 + 3 * 32 + 4 * 32 * 32 + 3 * 32 * 32
    assert {"weights", "gradients", "scalars"} <= {line.split()[0] for line in table_of(done)}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (
        sum(line["wire"]["weights"] for line in lines) + lines[-1]["eval_wire"]["weights"]
        == (run["ledger"]["weights"]["wire_bytes"])
    )
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert list((out / "tensorboard").iterdir())


def table_of(done):
    """Return the rows of the byte table: link, calls, dense bytes, ... (not the progress lines)."""
    row = re.compile(r"[a-z]+ +\d+ +[\d.]+ [KMG]?i?B ")
    return [line for line in done.stdout.splitlines() if row.match(line)]


@pytest.mark.processes
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    first = thinwire("train", "dense-fsdp", *SMALL, "--out", out, "--stop-after", 1)
    assert first.returncode == 0, first.stderr
    full = thinwire("train", "--resume", out, "--checkpoints.every-steps", 1, limit_bytes=40_000)
    good = out / "checkpoints" / "step-00000001"
    assert full.returncode == 2
    line = full.stderr.splitlines()[-1]
    assert line.startswith(f"thinwire: cannot save step 2 in {out}/checkpoints: ")
    assert "File too large" in line
    assert line.endswith(f"the last good checkpoint is {good}")
    assert [p.name for p in good.parent.iterdir()] == ["step-00000001"]
    resumed = thinwire("train", "--resume", out, "--checkpoints.every-steps", 3)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((out / "run.json").read_text())["result"]["steps"] == 3
    assert cli.main(["train", "--resume", str(out), "--model.dim", "64"]) == 2
    newest = good.with_name("step-00000003")
    assert capsys.readouterr().err == (
        f"thinwire: checkpoint {newest} was written by another configuration: "
        "model.dim was 32, now 64\n"
    )
    assert cli.main(["train", "dense-fsdp", *SMALL, "--out", str(out)]) == 2
    assert "holds checkpoints of an earlier run: continue it with --resume" in (
        capsys.readouterr().err
    )


@pytest.mark.processes
def test_bad_data_is_one_line_on_all_ranks(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    done = thinwire("train", "dense-fsdp", "--nproc", 2, *SMALL, "--data.source", short)
    assert done.returncode == 2
    assert done.stderr == (
        f"thinwire: data source '{short}' has 9 bytes, one sequence needs 17: give more text or "
        "lower data.seq_len_tokens\n"
    )


@pytest.mark.processes
def test_torchrun_runs_the_same_trainer(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    args = ("thinwire", "train", "dense-fsdp", *SMALL, "--out", tmp_path / "run")
    done = thinwire(*args, program=torchrun)
    assert done.returncode == 0, done.stderr
    assert len(table_of(done)) == 3
    assert Path(tmp_path / "run" / "run.json").exists()
