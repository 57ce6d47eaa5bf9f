"""Student's t for whole degrees of freedom, paired differences and the equivalence test.

The distribution has closed finite sums for whole degrees of freedom (Abramowitz and Stegun,
Handbook of Mathematical Functions, 26.7.3 and 26.7.4); paired samples need no others.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.errors import ConfigError

__all__ = ["Paired", "mean", "paired", "std_err", "t_cdf", "t_quantile"]

CONFIDENCE = 0.95
# Two one-sided tests at 5 % each: the same as a 90 % interval within the margin.
TOST_ALPHA = 0.05


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def std_err(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (n - 1) / n)


def t_cdf(t: float, df: int) -> float:
    """Return P(T <= t) of Student's t with `df` degrees of freedom (a whole number >= 1)."""
    if df < 1:
        raise ConfigError(f"Student's t needs at least 1 degree of freedom, got {df}")
    theta = math.atan(t / math.sqrt(df))
    cos2 = math.cos(theta) ** 2
    term = total = math.cos(theta) if df % 2 else 1.0
    for i in range(3 if df % 2 else 2, df - 1, 2):
        term *= cos2 * (i - 1) / i
        total += term
    inside = math.sin(theta) * total
    if df % 2:
        inside = 2 / math.pi * (theta + (inside if df > 1 else 0.0))
    return 0.5 + 0.5 * inside


def t_quantile(p: float, df: int) -> float:
    """Return the t below which a share `p` of Student's distribution lies (0 < p < 1)."""
    if not 0 < p < 1:
        raise ConfigError(f"a quantile needs a share between 0 and 1, got {p}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of one arm to the reference over the seeds both have, and the verdict.

    Attributes:
        num_pairs: seeds that both arms finished.
        mean: mean difference, arm minus reference (nats; positive: the arm's loss is higher).
        std_err: its standard error, None for a single pair.
        low: lower end of the 95 % t-interval, None for a single pair.
        high: upper end.
        margin: the equivalence margin in the same unit as `mean`.
        tost_p: the larger p-value of the two one-sided tests, None for a single pair.
        verdict: "equivalent", "worse", "better" or "undecided".
    """

    num_pairs: int
    mean: float
    std_err: float | None
    low: float | None
    high: float | None
    margin: float
    tost_p: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for compare.json."""
        return asdict(self)


def paired(values: Sequence[float], reference: Sequence[float], margin: float) -> Paired:
    """Compare paired losses.

    The arm is "equivalent" when both one-sided tests (TOST) reject a true difference outside of
    +-margin at 5 %; otherwise "worse" or "better" when the 95 % interval lies above or below zero;
    otherwise "undecided", as always with a single pair.

    Args:
        values: the arm's losses, in the order of the reference's seeds.
        reference: the first arm's losses.
        margin: largest difference that counts as equal, same unit, > 0.

    Reference: Schuirmann, "A comparison of the two one-sided tests procedure and the power
    approach for assessing the equivalence of average bioavailability", 1987.
    """
    differences = [v - r for v, r in zip(values, reference, strict=True)]
    centre, error = mean(differences), std_err(differences)
    if error is None:
        return Paired(1, centre, None, None, None, margin, None, "undecided")
    df = len(differences) - 1
    reach = t_quantile(0.5 + CONFIDENCE / 2, df) * error
    low, high = centre - reach, centre + reach
    tost_p = _one_sided_p(margin - abs(centre), error, df)
    if tost_p < TOST_ALPHA:
        verdict = "equivalent"
    elif low > 0:
        verdict = "worse"
    elif high < 0:
        verdict = "better"
    else:
        verdict = "undecided"
    return Paired(len(differences), centre, error, low, high, margin, tost_p, verdict)


def _one_sided_p(distance: float, error: float, df: int) -> float:
    """Return the p-value of the test nearest its bound; equal differences leave no doubt."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return 1 - t_cdf(distance / error, df)
