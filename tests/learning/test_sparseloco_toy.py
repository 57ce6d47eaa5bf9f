"""The toy character model under SparseLoCo (arXiv 2508.15706), R = 4, H = 15, 20 rounds.

One run per arm: differences below 0.01 mean nothing and are not asserted.
"""

import functools

import pytest

from benchmarks.sparseloco_quality import ARMS
from benchmarks.sparseloco_sim import ToyTask, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@functools.cache
def outcome(name):
    return run(ToyTask(), ARMS[name], lr=3e-3, steps=300, seed=0, workers=4)


@pytest.mark.parametrize("name", ["senders-none", "senders-paper", "senders-sym"])
def test_the_senders_mean_stays_near_the_dense_average(name):
    assert abs(outcome(name).val_loss - outcome("dense").val_loss) < 0.06
    assert outcome(name).senders == pytest.approx(1.23, abs=0.1)


@pytest.mark.parametrize("name", ["replicas-none", "replicas-sym"])
def test_the_mean_over_all_replicas_moves_too_little_on_short_runs(name):
    quant = name.split("-")[1]
    assert outcome(name).val_loss > outcome(f"senders-{quant}").val_loss + 0.02


def test_bytes():
    sparse, dense = outcome("senders-sym"), outcome("dense")
    assert dense.dense_bytes == 15 * dense.wire_bytes
    assert sparse.dense_bytes > 400 * sparse.wire_bytes
