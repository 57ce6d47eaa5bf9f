"""Published figures are what the committed JSON says."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parity import Pair, row

ROOT = Path(__file__).resolve().parents[2]


def test_pages_are_rendered_from_the_results():
    command = [sys.executable, "benchmarks/results.py", "pages", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("margin", "nats", "difference", "allowed", "verdict"),
    [
        (0.05, True, "+0.020 nats (+0.020 to +0.020)", "0.05 nats", "equivalent"),
        (0.01, True, "+0.020 nats (+0.020 to +0.020)", "0.01 nats", "worse"),
        (0.02, False, "+1.00 % (+1.00 to +1.00)", "2 %", "equivalent"),
    ],
)
def test_parity_judges_an_arm_by_its_paired_seeds(margin, nats, difference, allowed, verdict):
    losses = {"a": {0: 2.02, 1: 2.02, 5: 9.0}, "b none": {0: 2.0, 1: 2.0, 7: 0.0}}
    cells = row(Pair("System", "page", "a", "b none", margin, nats), losses)
    assert cells[:4] == ["System", "`a`", "`b`", "2"]
    assert cells[4:] == [difference, allowed, verdict, "[runs](page.md)"]
