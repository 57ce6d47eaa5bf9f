"""The arithmetic of benchmarks/plan_error.py: interpolation over rates, and the summary."""

import importlib.util
from pathlib import Path

import pytest

from thinwire.plan import Group, Speed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_error.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plan_error", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def group(mbit_per_s):
    bytes_per_s = mbit_per_s * 1e6 / 8 if mbit_per_s else 1e12
    speed = Speed.ideal(1e-3, bytes_per_s)
    return Group(ranks=((0, 1),), size=2, collectives={"all_gather": speed})


def test_links_of_one_latency_and_their_rate_are_interpolated_exactly(script):
    by_rate = {"none": group(0), "500mbit": group(500), "100mbit": group(100), "20mbit": group(20)}
    for rate in ("500mbit", "100mbit", "20mbit"):
        found = script.interpolated(by_rate, rate)
        for nbytes in (10, 10**5, 10**8):
            wanted = by_rate[rate].seconds("all_gather", nbytes)
            assert found.seconds("all_gather", nbytes) == pytest.approx(wanted, rel=1e-3)


def test_a_summary_counts_errors_and_verdicts(script):
    rows = [{"error": e} for e in (0.1, -0.3, 0.02)]
    rows[0]["right"], rows[1]["right"] = True, False
    found = script.summary(rows)
    assert found["median_error"] == 0.1
    assert found["worst_error"] == 0.3
    assert found["right_verdicts"] == 0.5


def test_the_grid_holds_thirty_combinations_and_every_arm_its_twin(script):
    held_out = [rate for rate in script.RATES if rate != "none"]
    names = [*script.TWINS, *script.ARMS]
    count = sum(len(script.RATES[r]) * len(names) for r in held_out)
    assert count * len(script.RANKS) >= 30
    assert set(script.ARMS.values()) == set(script.TWINS)
    for size in script.SIZES:
        for name in names:
            for ranks in script.RANKS:
                made = script.workload(script.from_dict(script.config_of(size, name)), ranks)
                assert script.without_dense_steps(made).phases
