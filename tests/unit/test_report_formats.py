import pytest

from thinwire.report import formats
from thinwire.report.charts import _axis, _tick_text, bin_means, is_noisy, smoothed

CASES = [
    (formats.nbytes, 0, "0 B"),
    (formats.nbytes, 999, "999 B"),
    (formats.nbytes, 1_000, "1.00 kB"),
    (formats.nbytes, 999_600, "1.00 MB"),
    (formats.nbytes, 1_234_567, "1.23 MB"),
    (formats.nbytes, 45_600_000_000, "45.6 GB"),
    (formats.nbytes, None, "–"),
    (formats.count, 9_812, "9,812"),
    (formats.count, 1_228_160, "1.23 M"),
    (formats.number, 2.25, "2.250"),
    (formats.number, 0, "0"),
    (formats.number, 0.0003, "3.00e-4"),
    (formats.number, float("nan"), "nan"),
    (formats.number, "text", "–"),
    (formats.ratio, 2.4512, "2.45x"),
    (formats.ratio, 146.3, "146x"),
    (formats.seconds, 0.00042, "420 µs"),
    (formats.seconds, 0.0412, "41.2 ms"),
    (formats.seconds, 3.214, "3.21 s"),
    (formats.seconds, 185, "3 min 05 s"),
    (formats.seconds, 7_625, "2 h 07 min"),
]


@pytest.mark.parametrize(("function", "value", "text"), CASES)
def test_numbers_read_well(function, value, text):
    assert function(value) == text


AXES = [
    ([1.9, 5.5], 5, False, "number", ["1", "2", "3", "4", "5", "6"]),
    ([2.0, 2.04], 4, False, "number", ["2.00", "2.01", "2.02", "2.03", "2.04"]),
    ([0, 2.28e9], 5, True, "bytes", ["0", "500 MB", "1 GB", "1.5 GB", "2 GB"]),
    ([3.0, 3.0], 2, False, "number", ["2.5", "3.0", "3.5"]),
    ([1, 400], 4, True, "count", ["0", "100", "200", "300", "400"]),
    ([1e-5, 3e-4], 3, False, "number", ["0", "0.0001", "0.0002", "0.0003"]),
    ([-1.0, 1.0], 4, False, "number", ["-1.0", "-0.5", "0", "0.5", "1.0"]),
]


@pytest.mark.parametrize(("values", "num_ticks", "tight", "fmt", "texts"), AXES)
def test_ticks_are_round(values, num_ticks, tight, fmt, texts):
    axis = _axis(values, num_ticks, tight=tight)
    assert [_tick_text(axis, tick, fmt) for tick in axis.ticks] == texts
    assert axis.low <= min(values) or axis.low == 0.0
    assert axis.high >= max(values)


def test_bins_are_means_that_leave_gaps_out():
    assert bin_means([1.0, 3.0, None, 5.0, None, None, 7.0], 4) == [2.0, 5.0, None, 7.0]
    assert bin_means([1.0, 2.0], 4) == [1.0, 2.0]


def test_moving_average_does_not_lag():
    line = [float(i) for i in range(90)]
    assert smoothed(line)[:87] == pytest.approx(line[:87])
    assert smoothed(line)[-1] == 87.5  # the window has only its left half there
    assert smoothed([2.0] * 60) == [2.0] * 60


def test_only_noise_is_smoothed():
    assert is_noisy([(-1.0) ** i for i in range(60)])
    assert not is_noisy([(-1.0) ** i for i in range(20)])
    assert not is_noisy([0.9**i for i in range(60)])
