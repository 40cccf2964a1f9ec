"""Position tables: what they add, and how they are made for another size."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import assert_close
from torch import Tensor

from vision_longformer.geometry import Grid
from vision_longformer.models.position import (
    AbsolutePosition,
    AbsolutePosition1d,
    RelativeBias,
    resize_axis,
    resize_bias_table,
    resize_map,
)

RELEASE = {k: torch.from_numpy(v) for k, v in np.load(Path(__file__).parents[1] / "assets" / "interp.npz").items()}
"""Tables before and after the resize of the authors' release."""


def linear(table: Tensor, length: int) -> Tensor:
    """Linear resize by its definition: cell centres of the new axis in coordinates of the old one, clamped."""
    old = table.shape[0]
    rows = []
    for index in range(length):
        place = min(max((index + 0.5) * old / length - 0.5, 0), old - 1)
        low = int(place)
        high = min(low + 1, old - 1)
        rows.append(table[low] + (place - low) * (table[high] - table[low]))
    return torch.stack(rows)


@pytest.mark.parametrize(("old", "new"), [(7, 12), (12, 7), (1, 4), (4, 1), (5, 5)])
def test_resize_axis_is_linear(old: int, new: int) -> None:
    table = torch.randn(old, 3, dtype=torch.float64)
    assert_close(resize_axis(table, new), linear(table, new), 1e-12)


@pytest.mark.parametrize(("old", "new"), [(7, 12), (12, 7)])
def test_resize_axis_is_the_release_s(old: int, new: int) -> None:
    resized = resize_axis(RELEASE[f"1d_{old}_{new}_in"][0], new)
    assert_close(resized, RELEASE[f"1d_{old}_{new}_out"][0], 1e-12)


@pytest.mark.parametrize(("old", "new"), [(11, 7), (7, 11), (13, 27)])
def test_bilinear_resize_of_offset_tables_is_the_release_s(old: int, new: int) -> None:
    """The release stores (rows × columns, heads); ours are (heads, rows, columns)."""
    table = RELEASE[f"2d_{old}_{new}_in"].t().unflatten(1, (old, old))
    expected = RELEASE[f"2d_{old}_{new}_out"].t().unflatten(1, (new, new))
    assert_close(resize_bias_table(table, (new, new), "bilinear"), expected, 1e-12)


def test_resize_map_is_linear_along_both_axes() -> None:
    table = torch.randn(3 * 4, 2, dtype=torch.float64)
    image = table.unflatten(0, (3, 4))
    rows = linear(image, 5)
    expected = linear(rows.transpose(0, 1), 2).transpose(0, 1).flatten(0, 1)
    assert_close(resize_map(table, Grid(3, 4), Grid(5, 2)), expected, 1e-12)
    assert resize_map(table, Grid(3, 4), Grid(3, 4)) is table


@pytest.mark.parametrize(("old", "new"), [((3, 5), (7, 9)), ((7, 9), (3, 5)), ((5, 5), (7, 3)), ((1, 1), (5, 3))])
def test_offset_resize_keeps_the_value_of_each_offset(old: tuple[int, int], new: tuple[int, int]) -> None:
    """Entry (dy, dx) stays where it is known; beyond, the nearest known entry is taken."""
    table = torch.randn(2, *old)
    resized = resize_bias_table(table, new, "offset")
    assert resized.shape == (2, *new)
    reach = [range(-(n // 2), n // 2 + 1) for n in new]
    for dy, dx in itertools.product(*reach):
        row = min(max(dy, -(old[0] // 2)), old[0] // 2) + old[0] // 2
        column = min(max(dx, -(old[1] // 2)), old[1] // 2) + old[1] // 2
        assert torch.equal(resized[:, dy + new[0] // 2, dx + new[1] // 2], table[:, row, column])


def test_an_unknown_resize_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown table resize 'bilinaer'; did you mean 'bilinear'"):
        resize_bias_table(torch.zeros(1, 3, 3), (5, 5), "bilinaer")


def test_absolute_position_is_a_row_half_and_a_column_half() -> None:
    position = AbsolutePosition(6, Grid(2, 3), 4)
    embedding = position(Grid(2, 3))
    assert embedding.shape == (6, 6)
    for row, column in itertools.product(range(2), range(3)):
        token = embedding[row * 3 + column]
        assert torch.equal(token[:3], position.rows[row])
        assert torch.equal(token[3:], position.columns[column])
    assert position.global_tokens is not None
    assert position.global_tokens.shape == (4, 6)
    assert AbsolutePosition(6, Grid(2, 3), 0).global_tokens is None


def test_absolute_position_on_another_map_is_resized_as_set_grid_does() -> None:
    position = AbsolutePosition(4, Grid(3, 5), 1).double()
    rows, columns = linear(position.rows.detach(), 4), linear(position.columns.detach(), 2)
    expected = torch.cat([rows[:, None].expand(4, 2, 2), columns[None].expand(4, 2, 2)], -1).flatten(0, 1)
    assert_close(position(Grid(4, 2)), expected, 1e-12)
    position.set_grid(Grid(4, 2))
    assert position.rows.shape == (4, 2)
    assert position.columns.shape == (2, 2)
    assert_close(position(Grid(4, 2)), expected, 1e-12)


def test_absolute_position_1d_has_one_row_per_token() -> None:
    position = AbsolutePosition1d(4, Grid(2, 3), 2).double()
    before = position.table.detach().clone()
    assert torch.equal(position(Grid(2, 3)), before)
    expected = resize_map(before, Grid(2, 3), Grid(3, 3))
    assert torch.equal(position(Grid(3, 3)), expected)
    position.set_grid(Grid(3, 3))
    assert torch.equal(position.table, expected)
    assert torch.equal(position(Grid(3, 3)), expected)
    assert_close(position(Grid(2, 3)), resize_map(expected, Grid(3, 3), Grid(2, 3)), 1e-12)


def test_a_transposed_map_of_equal_area_is_not_mistaken_for_its_own() -> None:
    position = AbsolutePosition1d(4, Grid(2, 3), 0)
    assert not torch.allclose(position(Grid(3, 2)), position.table)


def test_tables_start_small() -> None:
    position = AbsolutePosition(64, Grid(50, 50), 1)
    assert 0.018 < position.rows.std().item() < 0.022
    assert position.rows.abs().max() <= 2


def test_relative_bias_of_own_tokens() -> None:
    bias = RelativeBias(2, (3, 3), 2, given=False)
    assert torch.equal(bias.to_global(2), bias.local_to_global)
    rows = bias.from_global(2, Grid(2, 2))
    assert rows.shape == (2, 2, 2 + 4)
    assert torch.equal(rows[..., :2], bias.global_to_global)
    for query, key in itertools.product(range(2), range(4)):
        assert torch.equal(rows[:, query, 2 + key], bias.global_to_local[:, query])


def test_given_tokens_share_one_entry() -> None:
    """One own token and three given ones: index 0 is the own entry, 1 the shared one."""
    bias = RelativeBias(2, (3, 3), 1, given=True)
    entry = [0, 1, 1, 1]
    assert torch.equal(bias.to_global(4), bias.local_to_global[:, entry])
    rows = bias.from_global(4, Grid(1, 2))
    for query, key in itertools.product(range(4), range(4)):
        assert torch.equal(rows[:, query, key], bias.global_to_global[:, entry[query], entry[key]])
    for query, key in itertools.product(range(4), range(2)):
        assert torch.equal(rows[:, query, 4 + key], bias.global_to_local[:, entry[query]])
    assert torch.equal(bias.to_global(1), bias.local_to_global[:, :1])
    assert torch.equal(bias.from_global(1, Grid(1, 2))[..., :1], bias.global_to_global[:, :1, :1])


def test_no_global_tokens_no_entries() -> None:
    bias = RelativeBias(2, (3, 3), 0, given=False)
    assert bias.to_global(0) is None
    assert [name for name, _ in bias.named_parameters()] == ["table"]
    assert RelativeBias(2, (3, 3), 0, given=True).to_global(0) is None


def test_set_shape_keeps_offsets() -> None:
    bias = RelativeBias(2, (5, 3), 1, given=False)
    before = bias.table.detach().clone()
    bias.set_shape((3, 7))
    assert isinstance(bias.table, torch.nn.Parameter)
    assert torch.equal(bias.table[:, :, 2:5], before[:, 1:4])
    assert torch.equal(bias.table[:, :, 6], before[:, 1:4, 2])
