"""`thinwire probe` as users meet it: the file, one line per mistake, a clean interruption."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from thinwire import cli
from thinwire.plan import COLLECTIVES, Links
from thinwire.train.config import Model
from thinwire.train.recipes import recipe
from thinwire.train.workload import workload

MISTAKES = {
    "aquavti": "arm 'aquavti': unknown recipe 'aquavti': did you mean 'aquavit'?",
    "--seconds 0": "--seconds must be above 0 and finite",
    "--seconds nan": "--seconds must be above 0 and finite",
    "--seconds inf": "--seconds must be above 0 and finite",
    "--max-mbytes -1": "--max-mbytes must be above 0 and finite",
    "--max-mbytes inf": "--max-mbytes must be above 0 and finite",
    "--timeout 0": "--timeout must be above 0 and finite",
    "--set data.source=sotu": "--set data.source: the probe reads no such setting, leave it out",
    "--nproc 0": "--nproc must be at least 1",
    "--nproc 3": "data.batch_seqs 16 must be a multiple of data ranks x data.micro_batches = 3",
    "--step mine": "--step 'mine' must be module:function, or none",
    "--seconds soon": "argument --seconds: invalid float value: 'soon' (see `thinwire probe "
    "--help`)",
    "--config nowhere.toml": "cannot read configuration nowhere.toml: "
    "[Errno 2] No such file or directory: 'nowhere.toml'",
    "hetero --nproc 3": "mesh.replicas cannot be probed: give the axes of mesh, or plain replicas",
    "--out /": "--out / is a folder: name a file in it",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["probe", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert err == f"thinwire: {MISTAKES[arguments]}\n"
    assert out == ""
    assert not list(tmp_path.iterdir())


STEPS = """\
import time
import torch.distributed as dist

def work():
    time.sleep(0.001)

def fails():
    if dist.get_rank() == 1:
        raise ValueError("no data")

def hangs():
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()
"""
SMALL = ["--set", "model.dim=32", "--set", "model.num_layers=2", "--set", "seq_len_tokens=16"]


def _command(*words):
    return [sys.executable, "-m", "thinwire", "probe", "--nproc", "2", "--seconds", "1", *words]


def _run(folder, *words):
    return subprocess.run(
        _command(*words), cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.processes
def test_links_of_a_recipe(tmp_path):
    done = _run(tmp_path, "dense-pp", *SMALL, "--max-mbytes", "20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("numbers in links.json\n")
    links = Links.read(tmp_path / "links.json")
    assert links.mesh == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    assert list(links.groups) == ["pp"]
    assert tuple(links.group("pp").collectives) == COLLECTIVES
    assert links.group("pp").seconds("send_recv", 1000) > 0
    assert any("Blockwise(bits=2" in name for name in links.codecs)
    assert any("Hadamard(" in name for name in links.codecs)
    compute = links.compute
    assert (compute.recipe, compute.tokens) == ("dense-pp", 16 * 16)
    config = replace(recipe("dense-pp"), model=Model(dim=32, num_layers=2))
    assert compute.params == workload(config, 2).rank_params
    parts = compute.forward_s + compute.backward_s + compute.optimizer_s
    assert 0 < parts <= 2 * compute.step_s
    assert set(links.about) == {"versions", "machine"}


@pytest.mark.processes
def test_links_under_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc-per-node", "2", "-m", "thinwire", "probe", "dense-tp", "--seconds", "1"]
    command = [*torchrun, *words, *SMALL, "--step", "none", "--out", "deep/links.json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("numbers in deep/links.json") == 1
    links = Links.read(tmp_path / "deep" / "links.json")
    assert list(links.groups) == ["tp"]
    assert links.compute is None


@pytest.mark.processes
def test_own_steps_that_fail_or_hang(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    expected = "thinwire: rank 1: step of steps:fails failed: ValueError: no data\n"
    done = _run(tmp_path, "--step", "steps:fails")
    assert (done.returncode, done.stderr) == (1, expected)
    done = _run(tmp_path, "--step", "steps:nothing")
    expected = "thinwire: --step 'steps:nothing': module steps has no function 'nothing'\n"
    assert (done.returncode, done.stderr) == (2, expected)
    begin = time.monotonic()
    done = _run(tmp_path, "--step", "steps:hangs", "--timeout", "2")
    assert time.monotonic() - begin < 60
    assert done.returncode == 1
    assert "a rank failed or did not answer within 2 s" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "links.json").exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_probe_leaves_the_old_file(tmp_path, number):
    (tmp_path / "links.json").write_text("old")
    (tmp_path / "steps.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def step():\n    Path('running').touch()\n    time.sleep(0.2)\n"
    )
    words = ["--step", "steps:step", "--seconds", "60"]
    running = subprocess.Popen(
        _command(*words), cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "running").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # A terminal's Ctrl-C reaches the ranks too; SIGTERM only the command.
    if number == signal.SIGINT:
        os.killpg(running.pid, number)
    else:
        running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert err == "thinwire: the probe was interrupted: links.json was not written\n"
    assert running.returncode == 130
    assert (tmp_path / "links.json").read_text() == "old"
    names = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert names == {"links.json", "steps.py", "running"}
