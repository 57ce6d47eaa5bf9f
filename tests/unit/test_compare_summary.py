import math

import pytest

from thinwire.errors import ConfigError
from thinwire.lab.summary import TrainedRun, format_summary, summarise


def trained(arm, seed, val_loss, *, train_loss=9.0, wire=500, steps=4, wall_s=10.0):
    record = {
        "result": {
            "steps": steps,
            "train_loss": train_loss,
            "val_loss": val_loss,
            "wall_s": wall_s,
            "step_s_median": wall_s / 10,
        },
        "ledger": {
            "weights": {"dense_bytes": 1000, "wire_bytes": wire},
            "scalars": {"dense_bytes": 8, "wire_bytes": 8},
        },
    }
    metrics = [
        {
            "step": s,
            "loss": 10.0 * seed + s,
            "tokens": 32 * s,
            "wire": {"weights": wire, "masks": 1},
        }
        for s in range(1, steps + 1)
    ]
    return TrainedRun(arm, seed, record, metrics)


RUNS = [
    trained("dense", 0, 2.00, wire=1000),
    trained("six", 0, 2.01),
    trained("dense", 1, 2.10, wire=1000, wall_s=20.0),
    trained("six", 1, 2.12),
    trained("dense", 2, 2.20, wire=1000),
    trained("six", 2, 2.23),
]


def test_summary_by_hand():
    found = summarise(RUNS, margin=0.05)
    assert (found["measure"], found["reference"]) == ("val_loss", "dense")
    dense, six = found["arms"]
    assert dense["loss"]["mean"] == pytest.approx(2.1)
    assert dense["loss"]["std_err"] == pytest.approx(0.1 / math.sqrt(3))
    assert dense["loss"]["values"] == [2.0, 2.1, 2.2]
    assert dense["difference"] is None
    assert dense["words"] is None
    assert dense["wall_s"] == pytest.approx(40 / 3)
    assert dense["step_s_median"] == pytest.approx(4 / 3)
    assert six["bytes"] == {"wire": 508, "dense": 1008, "ratio": pytest.approx(1008 / 508)}
    difference = six["difference"]
    assert difference["mean"] == pytest.approx(0.02)
    assert difference["margin"] == pytest.approx(0.05 * 2.1)
    assert difference["relative"]["mean"] == pytest.approx(0.02 / 2.1)
    assert difference["verdict"] == "equivalent"
    assert six["words"].startswith("equivalent to dense within 5 %: +0.95 % (95 % interval")


def test_arms_are_paired_on_common_seeds_only():
    found = summarise([*RUNS, trained("six", 7, 90.0)], margin=0.05)
    six = found["arms"][1]
    assert six["seeds"] == [0, 1, 2, 7]
    assert six["difference"]["num_pairs"] == 3
    assert six["difference"]["mean"] == pytest.approx(0.02)
    alone = summarise([trained("dense", 0, 2.0), trained("six", 1, 2.0)])
    assert alone["arms"][1]["difference"] is None


def test_one_seed_gives_no_interval():
    arm = summarise(RUNS[:2])["arms"][1]
    assert arm["loss"]["std_err"] is None
    assert arm["difference"]["low"] is None
    assert arm["words"] == "undecided against dense: +0.50 % on one seed, which gives no interval"


def test_order_of_arms_and_a_reference_without_runs():
    reordered = summarise(RUNS, arms=("six", "dense"))
    assert [arm["name"] for arm in reordered["arms"]] == ["six", "dense"]
    assert reordered["arms"][1]["difference"]["mean"] == pytest.approx(-0.02)
    found = summarise(RUNS, arms=("gone", "dense", "six"))
    assert found["reference"] == "gone"
    assert [arm["difference"] for arm in found["arms"]] == [None, None]


def test_training_loss_stands_in_where_a_run_has_no_validation():
    runs = [trained("a", 0, None, train_loss=3.0), trained("b", 0, 2.0, train_loss=3.5)]
    found = summarise(runs)
    assert found["measure"] == "train_loss"
    assert found["arms"][1]["difference"]["mean"] == pytest.approx(0.5)


def test_curves_average_seeds_and_sum_bytes():
    curve = summarise(RUNS)["arms"][1]["curve"]
    assert curve["window"] == 1
    assert curve["step"] == [1, 2, 3, 4]
    assert curve["tokens"] == [32, 64, 96, 128]
    assert curve["wire_bytes"] == [501, 1002, 1503, 2004]
    assert curve["mean"] == [11, 12, 13, 14]
    assert curve["low"] == [1, 2, 3, 4]
    assert curve["high"] == [21, 22, 23, 24]


def test_long_curves_are_averaged_in_windows():
    curve = summarise([trained("a", 0, 2.0, steps=250)])["arms"][0]["curve"]
    assert curve["window"] == 3
    assert curve["step"][:2] == [2, 5]
    assert curve["step"][-1] == 250
    assert curve["mean"][:2] == [2, 5]


@pytest.mark.parametrize("margin", [0.0, -0.01, float("nan")])
def test_bad_margins(margin):
    with pytest.raises(ConfigError, match="margin must be above 0"):
        summarise(RUNS, margin=margin)


def test_bad_runs():
    with pytest.raises(ConfigError, match="no finished run"):
        summarise([])
    with pytest.raises(ConfigError, match="two runs of seed 0"):
        summarise([RUNS[0], RUNS[0]])
    with pytest.raises(ConfigError, match="no finite train_loss"):
        summarise([trained("a", 0, None, train_loss=math.nan)])


def test_table_holds_the_numbers():
    lines = format_summary(summarise(RUNS, margin=0.05)).splitlines()
    head = "arm seeds val loss s.e. difference 95 % interval sent ratio"
    assert " ".join(lines[0].split()) == head
    assert lines[2].split()[:5] == ["six", "3", "2.1200", "0.0635", "+0.0200"]
    assert lines[2].split()[-1] == "1.98x"
    assert lines[-1].startswith("six: equivalent to dense within 5 %")
    assert len({len(line) for line in lines[:3]}) == 1
