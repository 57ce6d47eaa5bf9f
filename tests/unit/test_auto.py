"""Which arms compress "auto" weighs, and how real steps calibrate what is predicted."""

import math
import threading
from dataclasses import replace

import pytest

from tests.unit.choose_cases import ARM, DENSE, HALF, links_of
from thinwire.errors import ConfigError
from thinwire.plan import Compute, choose
from thinwire.plan.choose import first_s
from thinwire.testing.ranks import run_ranks
from thinwire.train.auto import arms_of, without_warmup
from thinwire.train.config import Auto, Config, Outer, Replicas, Storage, Systems
from thinwire.train.parse import load, to_dict
from thinwire.train.recipes import recipe
from thinwire.train.saved import as_chosen
from thinwire.train.trial import calibrated_s, try_arms

SIZES = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
AUTO = Config(compress="auto")


def arms(config=AUTO, **sizes):
    return arms_of(config, SIZES | sizes)


def test_links_of_several_axes_are_compressed_alone_and_together():
    dense, found = arms(dp_shard=2, tp=2)
    assert dense == Config()
    sharded = ["static-8bit", "aquavit", "aquavit-grad4", "zeropp"]
    assert set(found) == {*sharded, "taco", *(f"{name}+taco" for name in sharded)}
    both = found["zeropp+taco"].systems
    assert both.weights == recipe("zeropp").systems.weights
    assert both.gradients == recipe("zeropp").systems.gradients
    assert both.tensor == recipe("taco").systems.tensor
    assert all(arm.compress == "given" for arm in found.values())


def test_what_is_no_link_stays_in_every_arm():
    systems = Systems(storage=Storage(fmt="int8"), replicas=Replicas(optimizer="adams"))
    dense, found = arms(replace(AUTO, systems=systems), dp_shard=2)
    assert dense.systems == systems
    assert all(arm.systems.storage.fmt == "int8" for arm in found.values())
    assert all(arm.systems.replicas.optimizer == "adams" for arm in found.values())


def test_replicas_that_train_apart_are_not_asked_to_agree_each_step():
    systems = Systems(outer=Outer(method="sparseloco"))
    dense, found = arms(replace(AUTO, systems=systems), dp_replicate=2)
    assert (dense.systems, found) == (systems, {})


def test_given_compression_is_one_arm_beside_dense():
    given = recipe("scape-99").systems
    dense, found = arms(replace(AUTO, systems=given), dp_replicate=2)
    assert dense.systems == Systems()
    assert list(found) == ["scape-90", "as given"]
    assert found["as given"].systems == given


def test_arms_by_name():
    _, found = arms(replace(AUTO, auto=Auto(arms=" static-4bit, taco+zeropp ")), dp_shard=2, tp=2)
    assert list(found) == ["static-4bit", "taco+zeropp"]
    with pytest.raises(ConfigError, match="unknown recipe 'tacoo': did you mean 'taco'"):
        arms(replace(AUTO, auto=Auto(arms="tacoo")))


@pytest.mark.parametrize(
    "settings", [{"seconds": 0.0}, {"margin": -0.1}, {"seconds": -1.0}, {"seconds": math.inf}]
)
def test_bad_settings(settings):
    with pytest.raises(ConfigError, match="auto: seconds must be above 0 and margin at least 0"):
        Auto(**settings)


def test_a_configuration_file_may_say_auto(tmp_path):
    (tmp_path / "run.toml").write_text('compress = "auto"\n[auto]\nseconds = 3\narms = "aquavit"\n')
    config = load(tmp_path / "run.toml")
    assert (config.compress, config.auto) == ("auto", Auto(seconds=3.0, arms="aquavit"))
    assert recipe("auto").compress == "auto"


def test_a_resumed_run_takes_the_systems_of_its_checkpoint():
    chosen = replace(Config(), systems=recipe("zeropp").systems)
    assert as_chosen(AUTO, to_dict(chosen)) == chosen
    assert as_chosen(Config(), to_dict(chosen)) == Config()


class Clock(threading.local):
    """Seconds of each rank's own, which only steps move."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s


def test_real_steps_say_what_computation_costs(monkeypatch):
    """The probe found 10 ms of computation; steps take 40 ms, and little of it in messages."""
    clock = Clock()
    monkeypatch.setattr("thinwire.train.trial.time", clock)
    links = replace(links_of(1e10), compute=Compute(recipe="job", step_s=0.01))
    built = []

    def work(rank):
        def build():
            built.append(rank)
            return Trainer(clock, 0.04 if rank else 0.02)  # the slowest rank counts

        return calibrated_s(links, DENSE, build, 1.0)

    first, second = run_ranks(2, work)
    assert first == second
    assert 0.035 < first <= 0.04
    assert sorted(built) == [0, 1]


def test_on_slow_links_no_real_step_is_taken():
    links = replace(links_of(1e6), compute=Compute(recipe="job", step_s=0.01))

    def work(rank):
        return calibrated_s(links, DENSE, lambda: pytest.fail("a step would take 24 s"), 10.0)

    assert run_ranks(2, work) == [None, None]


class Trainer:
    """Steps that take a stated time."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.steps, self.closed = 0, False

    def train_step(self):
        self.steps += 1
        self.clock.now_s += self.seconds

    def close(self):
        self.closed = True


def choice_of(rate=1e6):
    """Return a choice among dense (most of it messages), block4 and half."""
    links = replace(links_of(rate), compute=Compute(recipe="job", step_s=0.01))
    return choose(links, DENSE, [ARM, HALF])


def clocked(monkeypatch, seconds):
    """Return `build` for `try_arms`, arms taking these seconds a step, and what it built."""
    clock, built = Clock(), {}
    monkeypatch.setattr("thinwire.train.trial.time", clock)

    def build(name):
        return built.setdefault(name, Trainer(clock, seconds[name]))

    return build, built


@pytest.mark.parametrize(
    ("block4", "half", "chosen"),
    [
        (0.5, 9.0, "block4"),  # faster than what is predicted for half: that isn't tried
        (40.0, 0.5, "half"),
        (40.0, 60.0, "dense"),
    ],
)
def test_arms_are_tried_until_one_keeps_its_promise(monkeypatch, block4, half, chosen):
    choice = choice_of()
    build, built = clocked(monkeypatch, {"block4": block4, "half": half})
    found = run_ranks(1, lambda _: try_arms(choice, build, 1e3))[0]
    assert found.name == chosen
    assert list(built) == (["block4"] if chosen == "block4" else ["block4", "half"])
    assert found.tried == {name: trainer.seconds for name, trainer in built.items()}
    assert all(trainer.closed for trainer in built.values())
    # What the first phase of half took beyond its prediction counts for its other phase too.
    prediction = choice.arms[1].prediction
    both = half + prediction.step_s - first_s(prediction)
    took = {"block4": block4, "half": both, "dense": choice.dense.step_s}
    assert found.step_s == pytest.approx(took[chosen])
    assert found.speedup == pytest.approx(choice.dense.step_s / took[chosen])
    said = "no arm that was tried is faster: block4 40 s, half 60 s"
    assert (said in found.words()) == (chosen == "dense")


def test_without_time_to_try_the_prediction_stands(monkeypatch):
    choice = choice_of()
    build, built = clocked(monkeypatch, {})
    assert run_ranks(1, lambda _: try_arms(choice, build, 1e-3))[0] == choice
    assert not built


def test_a_trial_ends_with_its_time_however_slow_the_steps(monkeypatch):
    """Ten steps of 18 s are foreseen; the first two take 400 s."""
    build, built = clocked(monkeypatch, {"block4": 400.0, "half": 400.0})
    found = run_ranks(1, lambda _: try_arms(choice_of(), build, 200.0))[0]
    assert found.name == "dense"
    assert {name: trainer.steps for name, trainer in built.items()} == {"block4": 2}


def test_arms_are_tried_without_their_dense_steps_and_ramp():
    replicas = Replicas(optimizer="scape", dense_steps=7, ramp_steps=5)
    config = without_warmup(Config(systems=Systems(replicas=replicas)))
    assert config.systems.replicas == Replicas(optimizer="scape", dense_steps=0, ramp_steps=0)
