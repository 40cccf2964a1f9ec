"""Means with their spread, paired differences with a confidence interval, rank correlation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Mean, standard deviation (n - 1 in its denominator; None of a single value) and number of values."""

    mean: float
    std: float | None
    samples: int


class Difference(NamedTuple):
    """The mean of differences, half the width of its confidence interval (None of a single one), and their number."""

    mean: float
    half_width: float | None
    samples: int


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Values minus those of the baseline with the same seed, by Student's t; None without a common seed."""
    differences = [value - baseline[seed] for seed, value in values.items() if seed in baseline]
    if not differences:
        return None
    mean, std, count = spread(differences)
    if std is None:
        return Difference(mean, None, count)
    return Difference(mean, student_quantile(CONFIDENCE, count - 1) * std / math.sqrt(count), count)


def student_quantile(confidence: float, degrees: int) -> float:
    """The t with which ``confidence`` of Student's distribution lies between -t and t."""
    low, high = 0.0, 1.0
    while student_coverage(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_coverage(middle, degrees) < confidence else (low, middle)
    return high


def student_coverage(t: float, degrees: int) -> float:
    """The part of Student's distribution between -t and t, by its finite series for whole ``degrees`` of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing the mean of their ranks; None if it is not defined."""
    middle = (len(first) + 1) / 2
    x, y = ([rank - middle for rank in _ranks(values)] for values in (first, second))
    covariance = sum(a * b for a, b in zip(x, y, strict=True))
    variances = sum(a * a for a in x) * sum(b * b for b in y)
    return covariance / math.sqrt(variances) if variances else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; n equal values have the mean of the n ranks that they take up."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]
