"""The paper's tables of what classifiers cost: ours give the printed digits, and where not, the reason is known."""

from __future__ import annotations

from decimal import Decimal

import pytest

from vision_longformer.costs import agreement, compare_entry, paper_entries
from vision_longformer.costs.paper_tables import REMARKS, TABLES, CostRow, compare


@pytest.fixture(scope="module")
def rows() -> list[CostRow]:
    return [compare_entry(entry) for entry in paper_entries()]


def test_agreement_with_the_paper(rows: list[CostRow]) -> None:
    params, gflops = {"rounded": 99, "truncated": 9, "of": 115}, {"rounded": 114, "truncated": 0, "of": 115}
    assert agreement(rows) == {"params": params, "gflops": gflops}
    assert {table: sum(row.entry.table == table for row in rows) for table in TABLES} == {
        "mechanisms": 90,
        "scales": 13,
        "overall": 8,
        "imagenet22k": 4,
    }


def test_every_difference_is_explained_and_no_other(rows: list[CostRow]) -> None:
    different = {(row.entry.table, row.entry.model) for row in rows if not (row.params.agrees and row.gflops.agrees)}
    assert different == set(REMARKS)
    assert [row.entry.model for row in rows if not row.gflops.agrees] == ["E-ViT/16 tiny"]
    assert all(bool(row.remark) == ((row.entry.table, row.entry.model) in REMARKS) for row in rows)


def test_truncated_counts(rows: list[CostRow]) -> None:
    """The paper cuts digits off in these places; its GFLOPs are all rounded."""
    truncated = [row.entry.model for row in rows if row.params.mark == "t"]
    deep = [f"{name} {layout} {position}" for name, position in (("Full", "APE"), ("ViL", "APE"), ("ViL", "RPB"))
            for layout in ("1-1-9-1", "1-2-8-1")]  # fmt: skip
    assert truncated == [*deep, "ViL-Small RPB", "ViL-Medium RPB", "ViL-Medium RPB 224"]
    assert {row.gflops.mark for row in rows} == {"=", "!"}


@pytest.mark.parametrize(
    ("paper", "ours", "mark"),
    [
        ("24.6", "24.649", "="),
        ("24.6", "24.65", "t"),
        ("24.6", "24.7", "!"),
        ("1.00", "0.995", "="),
        ("28", "28.3", "="),
    ],
)
def test_marks(paper: str, ours: str, mark: str) -> None:
    comparison = compare(paper, Decimal(ours))
    assert comparison.mark == mark
    assert comparison.difference == Decimal(ours) - Decimal(paper)
