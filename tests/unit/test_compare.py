"""`thinwire compare` with a stand-in for `thinwire train` that writes its files at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire import cli
from thinwire.errors import ConfigError
from thinwire.lab import compare as compare_module
from thinwire.lab.compare import CompareConfig, compare, config_from_arguments
from thinwire.train.parse import to_dict
from thinwire.train.recipes import recipe

# argv: CONTROL RECIPE --nproc N --steps S ... ; CONTROL/RECIPE-SEED holds what to do instead.
FAKE_TRAIN = """
import json, sys, time
from pathlib import Path
control, name, _, nproc, *args = sys.argv[1:]
resume = args[-1] == "--resume"
config = json.loads(Path(control, "recipes.json").read_text())[name]
def read(word):
    try:
        return json.loads(word)
    except ValueError:
        return word
for setting in " ".join(args[:-1] if resume else args)[2:].split(" --"):
    key, *words = setting.split()
    *sections, leaf = key.split(".")
    node = config
    for section in sections:
        node = node[section]
    values = [read(word) for word in words] or [not leaf.startswith("no-")]
    node[leaf.removeprefix("no-")] = values if len(values) > 1 else values[0]
trick = Path(control, f"{name}-{config['seed']}")
trick = trick.read_text() if trick.exists() else ""
with open(Path(control, "calls"), "a") as calls:
    calls.write(f"{name} {config['seed']}{' resume' * resume}\\n")
out = Path(config["out"])
out.mkdir(parents=True, exist_ok=True)
if trick == "fail":
    print("half a bar\\rthinwire: the disk is full", file=sys.stderr)
    sys.exit(2)
if trick == "sleep":
    time.sleep(60)
if trick == "other":
    config["optim"]["lr"] = 7.0
loss = 2.0 + config["seed"] / 10 + (name != "dense-fsdp") / 1000 + config["optim"]["lr"] / 1e3
(out / "metrics.jsonl").write_text("".join(
    json.dumps({"step": s, "loss": loss + 1 / s, "tokens": 8 * s, "wire": {"weights": 100}}) + "\\n"
    for s in range(1, config["steps"] + 1)
))
result = {"steps": config["steps"], "train_loss": loss, "val_loss": float("nan") if trick == "nan"
          else loss, "wall_s": 1.0, "step_s_median": 0.1}
if trick == "nan":
    result["train_loss"] = None
if trick != "empty":
    ledger = {"weights": {"dense_bytes": 400, "wire_bytes": 100}}
    (out / "run.json").write_text(json.dumps({"config": config, "num_ranks": int(nproc),
        "result": result, "ledger": ledger, "versions": {"torch": "1"}}))
"""
ARMS = ("dense-fsdp", "static-6bit", "static-6bit:lr=1e-2")


class Bench:
    def __init__(self, root: Path):
        self.out, self.control = root / "out", root / "control"
        self.control.mkdir()
        (self.control / "fake.py").write_text(FAKE_TRAIN)
        recipes = {name: to_dict(recipe(name)) for name in ARMS[:2]}
        (self.control / "recipes.json").write_text(json.dumps(recipes))
        self.lines = []

    def run(self, recipes=ARMS[:2], **changes):
        config = CompareConfig(
            recipes=recipes, out=self.out, **({"steps": 3, "seeds": 2} | changes)
        )
        return compare(config, self.lines.append, self.command)

    @property
    def command(self):
        return [sys.executable, str(self.control / "fake.py"), str(self.control)]

    def trick(self, name, what):
        (self.control / name).write_text(what)

    def calls(self):
        path = self.control / "calls"
        calls = path.read_text().split("\n")[:-1] if path.exists() else []
        path.unlink(missing_ok=True)
        return calls


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_arms_are_interleaved_by_seed_and_summed_up(bench):
    found = bench.run(ARMS, settings=("dim=64",))
    assert bench.calls() == [f"{arm} {s}" for s in (0, 1) for arm in (ARMS[0], ARMS[1], ARMS[1])]
    assert found.failures == []
    data = json.loads(found.path.read_text())
    assert data == found.summary
    assert data["format"] == "thinwire.compare/1"
    assert data["settings"] == {
        "steps": 3,
        "data": "stdlib",
        "nproc": 2,
        "seeds": [0, 1],
        "margin": 0.01,
        "set": ["dim=64"],
    }
    assert [arm["name"] for arm in data["arms"]] == list(ARMS)
    assert [arm["difference"] and arm["difference"]["mean"] for arm in data["arms"]] == [
        None,
        pytest.approx(0.001),
        pytest.approx(0.001 + 7e-6),
    ]
    assert data["arms"][1]["bytes"] == {"wire": 100, "dense": 400, "ratio": 4.0}
    assert data["versions"] == [{"torch": "1"}]
    record = json.loads((bench.out / ARMS[0] / "seed-1" / "run.json").read_text())
    assert record["config"]["model"]["dim"] == 64


def test_finished_runs_are_kept_and_the_rest_is_run(bench):
    first = bench.run()
    bench.calls()
    assert bench.run().summary == first.summary
    assert bench.calls() == []
    (bench.out / "static-6bit" / "seed-1" / "run.json").write_text('{"config": {')
    (bench.out / "dense-fsdp" / "seed-0" / "run.json").unlink()
    checkpoint = bench.out / "dense-fsdp" / "seed-0" / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "thinwire.json").write_text("{}")
    assert bench.run(seeds=3).failures == []
    assert bench.calls() == [
        "dense-fsdp 0 resume",
        "static-6bit 1",
        "dense-fsdp 2",
        "static-6bit 2",
    ]


CHANGED = [
    ({"nproc": 1}, "nproc = 2, asked for 1"),
    ({"data": "sotu"}, "data.source = stdlib, asked for sotu"),
    ({"settings": ("dim=32",)}, "model.dim = 128, asked for 32"),
]


def test_finished_runs_of_another_configuration_are_not_overwritten(bench):
    bench.run(seeds=1)
    bench.calls()
    for changes, message in CHANGED:
        with pytest.raises(ConfigError, match=message):
            bench.run(seeds=1, **changes)
    assert bench.calls() == []
    # A run of three steps is not a finished run of four.
    assert bench.run(seeds=1, steps=4).failures == []
    assert len(bench.calls()) == 2


FAILURES = {
    "fail": "thinwire: the disk is full",
    "empty": "it ended well but left no run.json of 3 steps",
    "nan": "the run ended without a finite loss",
    "other": "holds a finished run with optim.lr = 7.0, asked for 0.003",
}


def test_failed_runs_are_named_and_leave_the_others(bench):
    for seed, trick in enumerate(FAILURES):
        bench.trick(f"static-6bit-{seed}", trick)
    found = bench.run(seeds=5)
    assert [(f.arm, f.seed) for f in found.failures] == [("static-6bit", s) for s in range(4)]
    for failure, message in zip(found.failures, FAILURES.values(), strict=True):
        assert message in failure.message
        assert any(
            f"seed {failure.seed}, failed: {failure.message}" in line for line in bench.lines
        )
    assert [arm["seeds"] for arm in found.summary["arms"]] == [[0, 1, 2, 3, 4], [4]]
    assert [f["message"] for f in found.summary["failures"]] == [f.message for f in found.failures]
    bench.calls()
    for seed in range(3):
        bench.trick(f"static-6bit-{seed}", "")
    assert bench.run(seeds=3).failures == []
    assert bench.calls() == [f"static-6bit {seed}" for seed in range(3)]


def test_nothing_is_written_when_every_run_fails(bench):
    for arm in ARMS[:2]:
        bench.trick(f"{arm}-0", "fail")
    found = bench.run(seeds=1)
    assert (found.path, found.summary, len(found.failures)) == (None, None, 2)
    assert not (bench.out / "compare.json").exists()


def test_jobs_run_side_by_side_with_the_same_result(bench):
    found = bench.run(jobs=3)
    assert sorted(bench.calls()) == [f"{arm} {s}" for arm in ARMS[:2] for s in (0, 1)]
    again = bench.run(jobs=1)
    assert again.summary == found.summary


def test_termination_ends_the_running_trial_and_can_be_resumed(bench):
    bench.trick("static-6bit-0", "sleep")
    script = (
        "from pathlib import Path\n"
        "from thinwire.lab.compare import CompareConfig, compare\n"
        f"arms, out = {ARMS[:2]!r}, Path({str(bench.out)!r})\n"
        "config = CompareConfig(recipes=arms, out=out, steps=3, seeds=1)\n"
        f"compare(config, print, {bench.command!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    calls = bench.control / "calls"
    deadline = time.monotonic() + 60
    while not (calls.exists() and "static-6bit 0" in calls.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="another comparison is running"):
        bench.run(seeds=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = _words(entry)
        assert str(bench.control / "fake.py") not in words
    bench.calls()
    bench.trick("static-6bit-0", "")
    assert bench.run(seeds=1).failures == []
    assert bench.calls() == ["static-6bit 0"]


def _words(path):
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


REFUSED = [
    (("dense-fsdp",), {}, "at least two recipes"),
    (("dense-fsdp", "statc-6bit"), {}, "did you mean 'static-6bit'"),
    (("dense-fsdp", "dense-fsdp"), {}, "given twice"),
    (("static-6bit", "static-6bit:lr=3e-3", "static-6bit:optim.lr=3e-3"), {}, "given twice"),
    (("dense-fsdp", "static-6bit:"), {}, "ends with a colon"),
    (("dense-fsdp", "static-6bit:lr"), {}, "not of the form key=value"),
    (("dense-fsdp", "static-6bit:lr=1,lr=2"), {}, "lr is set twice"),
    (("dense-fsdp", "static-6bit:seed=1"), {}, "same for all arms: set it with --seeds"),
    (("dense-fsdp", "static-6bit:source=x"), {}, "same for all arms: set it with --data"),
    (("dense-fsdp", "static-6bit:every_steps=1"), {}, "evaluation.every_steps or checkpoints"),
    (("dense-fsdp", "static-6bit:bits=5"), {}, "bits"),
    (("dense-fsdp", "static-6bit:modle.dim=5"), {}, "unknown setting 'modle.dim'"),
    (ARMS[:2], {"settings": ("dim",)}, "not of the form key=value"),
    (ARMS[:2], {"margin": 0.0}, "--margin must be above 0"),
    (ARMS[:2], {"seeds": 0}, "--seeds must be at least 1"),
    (ARMS[:2], {"jobs": 0}, "--jobs must be at least 1"),
]


@pytest.mark.parametrize(("recipes", "changes", "message"), REFUSED)
def test_bad_arguments_are_refused_before_anything_runs(bench, recipes, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        bench.run(recipes, **changes)
    assert "\n" not in str(caught.value)
    assert bench.calls() == []


def test_an_out_that_is_a_file(bench):
    bench.out.write_text("")
    with pytest.raises(ConfigError, match="cannot make --out"):
        bench.run()


def test_arguments_of_the_command():
    text = "a b:lr=1 --out x --seeds 5 --first-seed 2 --margin 0.02 --set dim=64 --set k=v"
    config = config_from_arguments(text.split())
    assert config.recipes == ("a", "b:lr=1")
    assert config.settings == ("dim=64", "k=v")
    assert config.all_seeds == [2, 3, 4, 5, 6]
    assert (config.out, config.margin, config.steps) == (Path("x"), 0.02, 200)
    for args, message in [("a b", "--out"), ("--out x", "ARM"), ("a b --out x --foo 1", "--foo")]:
        with pytest.raises(ConfigError, match=message):
            config_from_arguments(args.split())


def test_truth_values_and_tuples_reach_the_trainer(bench):
    arm = "static-6bit:compute.compile=true,tie_embeddings=false,betas=0.8 0.9"
    found = bench.run(("dense-fsdp", arm), seeds=1)
    assert found.failures == []
    (path,) = bench.out.glob("static-6bit_*/seed-0/run.json")
    config = json.loads(path.read_text())["config"]
    assert config["compute"]["compile"] is True
    assert config["model"]["tie_embeddings"] is False
    assert config["optim"]["betas"] == [0.8, 0.9]
    assert os.path.basename(path.parent.parent).startswith("static-6bit_compute.compile=true_")


def test_command_line(bench, monkeypatch, capsys):
    def with_stand_in(config, say):
        return compare(config, say, bench.command)

    monkeypatch.setattr(compare_module, "compare", with_stand_in)
    args = ["compare", *ARMS[:2], "--steps", "3", "--seeds", "2", "--out", str(bench.out)]
    assert cli.main(args) == 0
    found = capsys.readouterr()
    assert "static-6bit: equivalent to dense-fsdp within 1 %" in found.out
    assert f"page: {bench.out / 'compare.html'}" in found.out
    assert found.err.splitlines()[-1] == "[4/4] static-6bit, seed 1, done"
    bench.trick("static-6bit-2", "fail")
    assert cli.main([*args, "--seeds", "3"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("thinwire: static-6bit, seed 2, failed: thinwire: the disk is full")
    for bad in (["compare", "dense-fsdp"], [*args, "--jobs", "0"], ["compare"]):
        assert cli.main(bad) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
