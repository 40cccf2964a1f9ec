"""Grids, blocks and neighbours in plain numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vision_longformer.geometry import BLOCKS, NEIGHBOURS, RULES, SELF_BLOCK, Grid, ceil_div, is_cyclic


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


def test_geometry_does_not_import_torch() -> None:
    """Commands that start at once read it."""
    code = "import sys; import vision_longformer.geometry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
