import math

import pytest

from thinwire.errors import ConfigError
from thinwire.lab.statistics import mean, paired, std_err, t_cdf, t_quantile

# scipy 1.14: scipy.stats.t.ppf(p, df)
QUANTILES = [
    (0.975, 1, 12.706204736432095),
    (0.975, 2, 4.302652729911275),
    (0.975, 3, 3.182446305284263),
    (0.975, 4, 2.7764451051977987),
    (0.975, 9, 2.2621571628540993),
    (0.975, 30, 2.0422724563012373),
    (0.95, 1, 6.313751514675037),
    (0.95, 2, 2.919985580355516),
    (0.95, 4, 2.13184678632665),
    (0.05, 4, -2.13184678632665),
    (0.5, 7, 0.0),
]


@pytest.mark.parametrize(("p", "df", "expected"), QUANTILES)
def test_quantiles_match_scipy(p, df, expected):
    assert t_quantile(p, df) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert t_cdf(expected, df) == pytest.approx(p, abs=1e-10)


def test_distribution_is_a_distribution():
    for df in (1, 2, 3, 4, 5, 10, 51):
        assert t_cdf(0.0, df) == 0.5
        assert t_cdf(-1.3, df) == pytest.approx(1 - t_cdf(1.3, df), abs=1e-14)
    # One degree of freedom is Cauchy's distribution; many are nearly the normal one.
    assert t_cdf(1.0, 1) == pytest.approx(0.75, abs=1e-14)
    assert t_cdf(1.5, 2001) == pytest.approx(0.5 * math.erfc(-1.5 / math.sqrt(2)), abs=2e-4)
    with pytest.raises(ConfigError):
        t_cdf(1.0, 0)
    with pytest.raises(ConfigError):
        t_quantile(1.0, 3)


def test_mean_and_standard_error_by_hand():
    assert mean([1.0, 2.0, 6.0]) == 3.0
    # Deviations -2, -1, 3: squares sum to 14, variance 7, error sqrt(7/3).
    assert std_err([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(7 / 3))
    assert std_err([1.0]) is None


def test_paired_difference_by_hand():
    # Differences 0.01, 0.02, 0.03: mean 0.02, error 0.01 / sqrt(3), t(0.975, 2) = 4.30265.
    result = paired([2.01, 2.12, 2.23], [2.00, 2.10, 2.20], margin=0.05)
    assert result.num_pairs == 3
    assert result.mean == pytest.approx(0.02)
    assert result.std_err == pytest.approx(0.01 / math.sqrt(3))
    assert result.low == pytest.approx(0.02 - 4.302652729911275 * 0.01 / math.sqrt(3))
    assert result.high == pytest.approx(0.02 + 4.302652729911275 * 0.01 / math.sqrt(3))
    # The nearer bound is 0.03 away: t = 5.19615, upper tail with 2 degrees 1/2 - t/(2 sqrt(t^2+2)).
    t = 0.03 / (0.01 / math.sqrt(3))
    assert result.tost_p == pytest.approx(0.5 - t / (2 * math.sqrt(t * t + 2)), rel=1e-9)
    assert result.verdict == "equivalent"


VERDICTS = [
    # differences, margin, verdict
    ([0.001, -0.001, 0.000], 0.02, "equivalent"),
    ([0.010, 0.011, 0.012], 0.02, "equivalent"),  # surely higher, and surely within the margin
    ([0.030, 0.031, 0.032], 0.02, "worse"),
    ([-0.030, -0.031, -0.032], 0.02, "better"),
    ([0.018, 0.021, 0.024], 0.02, "worse"),  # surely higher, not shown within the margin
    ([0.05, -0.05, 0.00], 0.02, "undecided"),
    ([0.001], 0.02, "undecided"),
    ([0.0, 0.0, 0.0], 0.02, "equivalent"),  # bit-equal losses
    ([0.5, 0.5, 0.5], 0.02, "worse"),
    ([-0.5, -0.5], 0.02, "better"),
]


@pytest.mark.parametrize(("differences", "margin", "verdict"), VERDICTS)
def test_verdicts(differences, margin, verdict):
    # The reference is zero so that the differences are exact.
    result = paired(differences, [0.0] * len(differences), margin)
    assert result.verdict == verdict


def test_equivalence_is_a_ninety_percent_interval_within_the_margin():
    differences = [0.004, 0.009, 0.001, 0.006]
    centre, error = mean(differences), std_err(differences)
    edge = centre + t_quantile(0.95, 3) * error
    assert paired(differences, [0.0] * 4, edge * 1.001).verdict == "equivalent"
    assert paired(differences, [0.0] * 4, edge * 0.999).verdict != "equivalent"
