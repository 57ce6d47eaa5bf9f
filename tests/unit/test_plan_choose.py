"""tw.plan.choose on links whose answer is known, and measured steps beside expected ones."""

from dataclasses import replace

import pytest

from tests.unit.choose_cases import ARM, DENSE, HALF, links_of
from tests.unit.plan_cases import job
from thinwire.errors import ConfigError
from thinwire.plan import (
    Choice,
    Measured,
    MeasuredCosts,
    Outer,
    choose,
    predict,
    workload_of,
)
from thinwire.plan.choose import corrected_s, first_s
from thinwire.testing.ranks import run_ranks

# 4 bits and 4 bytes of scale and minimum per 128 values, against 32 bits.
SAVED = 1 - 4.25 / 32


def test_a_slow_link_chooses_the_compressed_arm():
    links = links_of(1e6)
    choice = choose(links, DENSE, [ARM])
    assert choice.name == "block4"
    # Four layers of a million fp32 weights, half of them in each shard, gathered for forward and
    # again for backward; gradients are dense in both runs.
    gathers_s = 2 * 4 * 2e6 / 1e6
    saved_s = choice.dense.step_s - choice.chosen.step_s
    assert saved_s == pytest.approx(gathers_s * SAVED, rel=0.01)
    assert choice.speedup == choice.dense.step_s / choice.chosen.step_s > 1.02
    assert choice.chosen == predict(ARM, MeasuredCosts(links, DENSE.mesh, None))
    assert choice.words().startswith("chose block4: expected ")
    assert choice.words().endswith(f"{choice.speedup:.2f}x")


def test_a_fast_link_chooses_dense_and_says_why():
    choice = choose(links_of(1e12), DENSE, [ARM])
    assert choice.name == "dense"
    assert choice.speedup == 1.0
    assert choice.arms[0].prediction.name == "block4"
    assert "the best arm, block4, does not pay" in choice.words()
    assert "\n" not in choice.words()


def test_a_slow_codec_chooses_dense():
    assert choose(links_of(1e6), DENSE, [ARM]).name == "block4"
    assert choose(links_of(1e6, codec_s=1e-3), DENSE, [ARM]).name == "dense"


def test_the_margin_is_what_an_arm_must_exceed():
    gain = choose(links_of(1e6), DENSE, [ARM]).speedup - 1
    assert choose(links_of(1e6), DENSE, [ARM], margin=0.99 * gain).name == "block4"
    assert choose(links_of(1e6), DENSE, [ARM], margin=1.01 * gain).name == "dense"


def test_the_fastest_of_several_arms():
    choice = choose(links_of(1e6), DENSE, [HALF, ARM])
    assert choice.name == "block4"
    assert [arm.prediction.name for arm in choice.arms] == ["block4", "half"]


def test_no_arms_is_dense():
    assert choose(links_of(1e6), DENSE, []).words().endswith("; no arm fits")


def test_the_steps_computation_can_be_given():
    choice = choose(links_of(1e12), DENSE, [ARM], step_s=2.0)
    assert choice.dense.compute_s == pytest.approx(2.0)


def test_all_ranks_take_rank_0s_choice():
    """Rank 1's own links would choose dense."""
    found = run_ranks(2, lambda rank: choose(links_of([1e6, 1e12][rank]), DENSE, [ARM]))
    assert [choice.name for choice in found] == ["block4", "block4"]
    assert found[0].to_dict() == found[1].to_dict()


def test_what_cannot_be_weighed_is_refused_on_all_ranks():
    def work(rank):
        links = replace(links_of(1e6), codecs={}) if rank == 0 else links_of(1e6)
        with pytest.raises(ConfigError, match="the links hold no speed of Blockwise"):
            choose(links, DENSE, [ARM])

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("arms", "kwargs", "message"),
    [
        ([ARM], {"margin": -0.1}, "margin must be at least 0, got -0.1"),
        ([ARM, ARM], {}, "names unlike each other"),
        ([ARM], {"step_s": float("inf")}, "step_s must be above 0 and finite, got inf"),
        ([replace(ARM, mesh={"tp": 2})], {}, "arm block4 has another mesh than dense"),
    ],
)
def test_bad_arguments(arms, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        choose(links_of(1e6), DENSE, arms, **kwargs)


def test_links_of_another_mesh():
    with pytest.raises(ConfigError, match=r"probed with mesh.dp_shard 1, the plan has 2"):
        choose(links_of(1e6, axes=("tp",)), DENSE, [ARM])


def _choice(phases, step_s=1.0):
    prediction = replace(choose(links_of(1e12), DENSE, []).dense, phases=phases, step_s=step_s)
    return Choice(chosen=prediction, dense=prediction, arms=(), margin=0.0)


def test_expected_seconds_follow_the_phases():
    choice = _choice({"(2, 1024)": (0.5, 1.0), "(6, 32)": (0.5, 3.0)})
    assert [choice.expected_s(i, 4) for i in range(4)] == [1.0, 1.0, 3.0, 3.0]
    choice = _choice({"step": (0.75, 1.0), "dense step": (0.25, 5.0)})
    assert [choice.expected_s(i, 4) for i in range(4)] == [5.0, 1.0, 1.0, 1.0]
    choice = _choice({"step": (0.9, 1.0), "sync": (0.1, 11.0)}, step_s=2.0)
    assert [choice.expected_s(i, 4) for i in range(4)] == [2.0] * 4


def test_a_trial_corrects_all_steps_but_dense_ones():
    choice = _choice({"step": (0.75, 1.0), "dense step": (0.25, 5.0)}, step_s=2.0)
    assert first_s(choice.chosen) == 1.0
    assert corrected_s(choice.chosen, 1.4) == pytest.approx(2.0 + 0.75 * 0.4)
    tried = replace(choice, tried={choice.name: 1.4})
    assert tried.step_s == pytest.approx(2.3)
    assert [tried.expected_s(i, 4) for i in range(4)] == pytest.approx([5.0, 1.4, 1.4, 1.4])
    assert tried.to_dict()["tried"] == {choice.name: 1.4}


def test_rounds_are_phases_that_recur():
    apart = {"mesh": {"dp_replicate": 2}, "outer": Outer(sync_every=10)}
    links = links_of(1e9, axes=("dp_replicate",))
    rounds = workload_of(job(name="rounds", **apart))
    assert choose(links, rounds, []).recurs
    assert not choose(links_of(1e9), DENSE, [ARM]).recurs


def _lines(measured, seconds):
    return [measured.add(step, s) for step, s in enumerate(seconds, start=1)]


def test_a_prediction_that_holds_says_nothing():
    measured = Measured(_choice({}), 100)
    assert set(_lines(measured, [9.0] * 3 + [1.1] * 40)) == {None}
    found = measured.to_dict()
    assert found == {
        "steps": 40,
        "step_s_median": 1.1,
        "over_expected": pytest.approx(1.1),
        "off": False,
    }


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1.5, "steps of dense take 50% more than expected (1.5 s against 1 s)"),
        (0.7, "steps of dense take 30% less than expected (0.7 s against 1 s)"),
    ],
)
def test_a_prediction_that_is_off_is_said_once(seconds, words):
    measured = Measured(_choice({}), 100)
    said = _lines(measured, [1.0] * 3 + [seconds] * 50)
    assert said.index(f"the prediction is off: {words}") == 12
    assert sum(line is not None for line in said) == 1
    assert measured.to_dict()["off"]


def test_a_few_slow_steps_are_not_off():
    measured = Measured(_choice({}), 100)
    assert set(_lines(measured, [1.0, 1.0, 9.0] * 20)) == {None}


def test_rounds_count_whole():
    """Nine steps of 1 s and one of 11 s are the 2 s a step that were expected."""
    measured = Measured(_choice({"step": (0.9, 1.0), "sync": (0.1, 11.0)}, step_s=2.0), 100, skip=0)
    assert set(_lines(measured, ([1.0] * 9 + [11.0]) * 3)) == {None}
    assert measured.ratio == pytest.approx(1.0)


def test_before_any_step_nothing_is_measured():
    measured = Measured(_choice({}), 100)
    assert measured.to_dict() == {
        "steps": 0,
        "step_s_median": None,
        "over_expected": None,
        "off": False,
    }
