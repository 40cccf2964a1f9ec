"""Grids, blocks and neighbours in plain numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vision_longformer.geometry import (
    BLOCKS,
    NEIGHBOURS,
    RULES,
    SELF_BLOCK,
    Grid,
    Strip,
    ceil_div,
    even_strips,
    is_cyclic,
    strips,
)


def test_blocks_and_neighbours_go_row_by_row() -> None:
    assert BLOCKS == ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 0), (0, 1), (1, -1), (1, 0), (1, 1))
    assert SELF_BLOCK == 4
    assert NEIGHBOURS == ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))


def test_which_rules_wrap_around() -> None:
    assert [rule for rule in RULES if is_cyclic(rule)] == ["cyclic", "cyclic_release"]


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (7, 7, 1), (8, 7, 2)])
def test_division_rounded_up(a: int, b: int, expected: int) -> None:
    assert ceil_div(a, b) == expected


@pytest.mark.parametrize(
    ("grid", "patch", "padded", "dropped"),
    [((97, 143), 4, (25, 36), (24, 35)), ((8, 4), 4, (2, 1), (2, 1)), ((1, 3), 2, (1, 2), (0, 1))],
)
def test_a_grid_reduced_by_patches(grid: tuple, patch: int, padded: tuple, dropped: tuple) -> None:
    assert Grid(*grid).reduced(patch, pad=True) == padded
    assert Grid(*grid).reduced(patch, pad=False) == dropped
    assert Grid(*grid).chunks(patch) == padded
    assert Grid(*grid).tokens == grid[0] * grid[1]


def test_strips_by_hand() -> None:
    """Seven rows in chunks of 2: chunk rows 0-1, 2-3, 4-5 and 6, two at a time."""
    first, last = strips(Grid(7, 3), 2, "exact", 2)
    assert (first.rows, first.above, first.below) == (range(4), range(0), range(4, 6))
    assert (last.rows, last.above, last.below) == (range(4, 7), range(2, 4), range(0))
    assert (first.halo, last.halo, last.grid, last.keys, last.own) == ((0, 2), (2, 0), (3, 3), 15, slice(6, 15))
    first, last = strips(Grid(7, 3), 2, "cyclic", 2)
    assert (first.above, first.below) == (range(6, 7), range(4, 6))
    assert (last.above, last.below) == (range(2, 4), range(2))
    assert last.halo == (2, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_strip_of_all_chunk_rows_is_the_whole_map(rule: str) -> None:
    (strip,) = strips(Grid(7, 3), 2, rule, 4)
    assert (strip.rows, strip.whole, strip.halo, strip.keys, strip.own) == (range(7), True, None, 21, slice(0, 21))


def test_even_strips_by_hand() -> None:
    """17 rows in chunks of 3 are 6 chunk rows, the last of 2; thirds of 5.67 rows end nearest to rows 6 and 12."""
    assert [strip.rows for strip in even_strips(Grid(17, 4), 3, "chunk", 3)] == [range(6), range(6, 12), range(12, 17)]
    first, middle, last = even_strips(Grid(17, 4), 3, "cyclic", 3)
    assert (first.above, first.below) == (range(15, 17), range(6, 9))
    assert (middle.above, middle.below) == (range(3, 6), range(12, 15))
    assert (last.above, last.below) == (range(9, 12), range(3))


def test_even_strips_may_be_empty() -> None:
    """One chunk row for two; two, of which quarters of 6 rows end nearest to rows 0, 4 and 4."""
    assert even_strips(Grid(3, 4), 4, "cyclic", 2) == [
        Strip(range(0), range(0), range(0), 4, False),
        Strip(range(3), range(0), range(0), 4, True),
    ]
    rows = [strip.rows for strip in even_strips(Grid(6, 4), 4, "chunk", 4)]
    assert rows == [range(0), range(4), range(4, 4), range(4, 6)]


def test_a_strip_divided_by_hand() -> None:
    """Rows 4 to 9 of a map in chunks of 2, counted from row 2, the first that they see."""
    (strip,) = [strip for strip in strips(Grid(11, 3), 2, "exact", 3) if strip.rows.start == 6]
    assert (strip.rows, strip.above, strip.below) == (range(6, 11), range(4, 6), range(0))
    parts = strip.divided(2, "exact", 2)
    assert [(part.above, part.rows, part.below) for part in parts] == [
        (range(2), range(2, 6), range(6, 7)),
        (range(4, 6), range(6, 7), range(7, 7)),
    ]
    wrapped = strips(Grid(11, 3), 2, "cyclic", 3)[0].divided(2, "cyclic", 1)
    assert [(part.above, part.rows, part.below) for part in wrapped] == [
        (range(1), range(1, 3), range(3, 5)),
        (range(1, 3), range(3, 5), range(5, 7)),
        (range(3, 5), range(5, 7), range(7, 9)),
    ]


def test_geometry_does_not_import_torch() -> None:
    """Commands that start at once read it."""
    code = "import sys; import vision_longformer.geometry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
