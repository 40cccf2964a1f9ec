"""Means, confidence intervals and rank correlation, by printed tables and hand calculations."""

from __future__ import annotations

from math import sqrt

import pytest

from vision_longformer.studies.statistics import (
    paired_difference,
    spearman,
    spread,
    student_coverage,
    student_quantile,
)


def test_spread() -> None:
    """Deviations of 1, 2 and 6 from 3 are -2, -1 and 3: a sum of squares of 14, over 2."""
    assert spread([1, 2, 6]) == pytest.approx((3, sqrt(7), 3))
    assert spread([4.5]) == (4.5, None, 1)


@pytest.mark.parametrize(
    ("degrees", "printed"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)]
)
def test_student_quantile(degrees: int, printed: float) -> None:
    """The two-sided 95% column of any table of Student's distribution."""
    assert student_quantile(0.95, degrees) == pytest.approx(printed, abs=5e-4)


def test_student_quantile_of_other_confidence() -> None:
    """The two-sided 99% and 80% columns."""
    assert student_quantile(0.99, 2) == pytest.approx(9.925, abs=5e-4)
    assert student_quantile(0.8, 7) == pytest.approx(1.415, abs=5e-4)


def test_student_coverage_in_closed_form() -> None:
    """One degree is Cauchy's distribution, half of which is within 1; two degrees have t / √(2 + t²)."""
    assert student_coverage(1, 1) == pytest.approx(0.5)
    assert student_coverage(3, 2) == pytest.approx(3 / sqrt(11))


def test_paired_difference() -> None:
    """Differences 1, 1.5 and 2.5: mean 5/3, variance 7/12, half-width 4.302653 · √(7/12 / 3)."""
    values, baseline = {0: 51.0, 1: 52.0, 2: 53.5}, {0: 50.0, 1: 50.5, 2: 51.0}
    assert paired_difference(values, baseline) == pytest.approx((5 / 3, 4.302653 * sqrt(7 / 36), 3), rel=1e-6)


def test_paired_difference_of_common_seeds_only() -> None:
    assert paired_difference({0: 51.0, 1: 90.0}, {0: 50.0, 2: 1.0}) == (1.0, None, 1)
    assert paired_difference({0: 51.0}, {1: 50.0}) is None


def test_spearman() -> None:
    """1 - 6 Σd² / (n (n² - 1)) with d² of 1, 1, 1, 1 and 0."""
    assert spearman([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert spearman([1, 2, 3], [7, 5, 1]) == pytest.approx(-1)


def test_spearman_with_equal_values() -> None:
    """Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: a covariance of 4.5 over √(4.5 · 5)."""
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / sqrt(4.5 * 5))
    assert spearman([1, 1, 1], [1, 2, 3]) is None
