"""Every Triton kernel equals its reference bit for bit under Triton's interpreter.

The interpreter is chosen when Triton is imported, so it runs in a process of its own, which is
also how the GPU benchmark's checks are exercised; optional packages are hidden from it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.testing.device_checks import CHECKS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
# The script must run where torch, numpy and Triton are all there is.
HIDDEN = """
import runpy, sys
for name in ("numba", "llvmlite", "tyro", "safetensors", "tqdm", "hypothesis", "tensorboard"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(*args, **environment):
    return subprocess.run(
        [sys.executable, "-c", HIDDEN, os.fspath(SCRIPT), *args],
        capture_output=True, text=True, timeout=280, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def report():
    done = run_script("--interpret", OMP_NUM_THREADS="1")
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_equals_reference(report, name):
    result = report["checks"][name]
    assert result["wrong"] == []
    assert result["compared"] > 10


def test_report_says_where_it_ran(report):
    assert report["device"] == "interpreter"
    assert report["torch"] == torch.__version__
    assert report["commit"]
