"""benchmarks/gpu.py beside its checks: what it times can be called, and it says what it lacks."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.testing.device_checks import CHECKS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_what_is_timed_runs():
    names = runpy.run_path(os.fspath(SCRIPT))
    assert set(names["TIMED"]) == set(CHECKS) - {"random", "largest"}
    for timed in names["TIMED"].values():
        for label, run, moved in timed(torch.device("cpu"), 2**14):
            run()
            assert moved > 0, label


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of a machine without CUDA")
def test_without_cuda_it_says_so_in_one_line():
    done = subprocess.run([sys.executable, os.fspath(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
