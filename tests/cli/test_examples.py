"""Every example runs as its first lines say, and proves its bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    command = next(line for line in example.read_text().splitlines() if line.startswith("Run: "))
    program, *arguments = command.removeprefix("Run: ").split()
    modules = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    done = subprocess.run(
        [sys.executable, *modules[program], *arguments],
        cwd=example.parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "below dense" in done.stdout
    assert len(example.read_text().splitlines()) <= 80
