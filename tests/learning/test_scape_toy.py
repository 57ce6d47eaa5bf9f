"""The toy character model under SCAPE (arXiv 2607.01678): bands measured once, minutes each.

Not asserted: parity with dense, or an advantage over top-k AdamW, on runs of this size.
"""

import functools

import pytest

from benchmarks.scape_toy import Arm, Plan, characters, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS, LR = 400, 2e-3


@functools.cache
def data():
    return characters()


@functools.cache
def outcome(arm, steps=STEPS, lr=LR, dense_steps=0):
    return run(Plan(arm, lr, steps, dense_steps), data())


def loss(arm, **settings):
    return outcome(arm, **settings).val_loss


RULES = ["transfer", "decay"]


@pytest.mark.parametrize("unmasked", RULES)
def test_masks_by_statistic_beat_random_ones_and_stepping_all(unmasked):
    got = loss(Arm("scape", 0.1, unmasked=unmasked))
    assert got < loss(Arm("scape", 0.1, unmasked=unmasked, source="random")) - 0.3
    assert got < loss(Arm("scape", 0.1, unmasked="decay", move_all=True)) - 0.2


@pytest.mark.parametrize("unmasked", RULES)
def test_a_mask_of_the_step_itself_is_better_at_a_tenth(unmasked):
    late = loss(Arm("scape", 0.1, unmasked=unmasked))
    assert loss(Arm("scape", 0.1, unmasked=unmasked, lag=0)) < late - 0.05


def test_a_frozen_mask_loses_in_the_long_run():
    long = {"steps": 1000, "lr": 1e-3, "dense_steps": 300}
    frozen = loss(Arm("scape", 0.1, frozen=True), **long)
    assert loss(Arm("scape", 0.1), **long) < frozen


BANDS = [
    (Arm("scape", 0.1), 0.38, 0.55),
    (Arm("scape", 0.1, unmasked="decay"), 0.38, 0.72),
    (Arm("scape", 0.01), 0.05, 0.30),
    (Arm("scape", 0.01, unmasked="decay"), 0.25, 0.50),
    (Arm("scape", 0.1, source="random"), 0.09, 0.11),
]


@pytest.mark.parametrize(("arm", "low", "high"), BANDS)
def test_overlap_of_successive_masks(arm, low, high):
    assert low <= outcome(arm).overlap <= high
