"""Index tables against the plainest loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vision_longformer.geometry import BLOCKS, RULES, Grid
from vision_longformer.ops.tables import (
    axis_blocks,
    axis_window,
    block_offsets,
    chunk_tables,
    covers_map,
    in_chosen_block,
    map_bias,
    map_offsets,
    neighbour_block,
    present_blocks,
    table_lookup,
    window_steps,
)

CPU = torch.device("cpu")

MAPS = [((1, 1), 1), ((1, 1), 3), ((2, 5), 2), ((3, 4), 3), ((4, 4), 2), ((5, 7), 2), ((7, 3), 3), ((6, 9), 3)]
"""Maps and windows, with 1, 2 and more chunks per axis, whole and not."""


def test_neighbours_are_the_blocks_without_the_own_one() -> None:
    assert neighbour_block(torch.arange(1, 9)).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert neighbour_block(torch.tensor(5)).item() == 5


def test_keys_of_the_own_chunk_and_a_neighbour() -> None:
    """Of nine blocks, row by row: 4 is the own one, neighbour 3 is above and to the right, neighbour 5 to the right."""
    row, column = torch.tensor(BLOCKS).unbind(1)
    chosen = {
        number: in_chosen_block(row, column, number if number is None else torch.tensor(number)).nonzero().flatten()
        for number in (None, 3, 5)
    }
    assert {number: blocks.tolist() for number, blocks in chosen.items()} == {None: [4], 3: [2, 4], 5: [4, 5]}


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_blocks_that_can_hold_a_key(chunks: int) -> None:
    """A single chunk has neighbours only where the rule wraps around."""
    for rule in ("chunk", "exact"):
        assert axis_blocks(chunks, rule) == ((0,) if chunks == 1 else (-1, 0, 1))
    for rule in ("cyclic", "cyclic_release"):
        assert axis_blocks(chunks, rule) == (-1, 0, 1)


def test_present_blocks_of_a_row_of_chunks() -> None:
    assert present_blocks(Grid(1, 4), "chunk") == [3, 4, 5]
    assert present_blocks(Grid(4, 1), "exact") == [1, 4, 7]
    assert present_blocks(Grid(1, 1), "chunk") == [4]
    assert present_blocks(Grid(1, 1), "cyclic") == list(range(9))
    assert present_blocks(Grid(2, 2), "chunk") == list(range(9))


@pytest.mark.parametrize(("grid", "window"), MAPS)
def test_a_map_is_covered_when_every_chunk_neighbours_every_other(grid: tuple[int, int], window: int) -> None:
    chunks = list(itertools.product(*(range(math.ceil(n / window)) for n in grid)))
    pairs = itertools.product(chunks, chunks)
    assert covers_map(Grid(*grid), window) == all(max(abs(a - c), abs(b - d)) <= 1 for (a, b), (c, d) in pairs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("grid", "window"), MAPS)
def test_chunk_tables(grid: tuple[int, int], window: int, rule: str) -> None:
    """Each block of each chunk: which chunk it is, and which of its keys count."""
    tables = chunk_tables(Grid(*grid), window, rule, CPU)
    chunks = [math.ceil(n / window) for n in grid]
    assert tables.source.shape == (9, chunks[0] * chunks[1])
    assert tables.valid.shape == (9, chunks[0] * chunks[1], window * window)
    for block, (row, column) in itertools.product(range(9), itertools.product(*map(range, chunks))):
        index = row * chunks[1] + column
        unwrapped = row + BLOCKS[block][0], column + BLOCKS[block][1]
        source = unwrapped[0] % chunks[0], unwrapped[1] % chunks[1]
        assert tables.source[block, index] == source[0] * chunks[1] + source[1]
        for inner in itertools.product(range(window), range(window)):
            counts = all(_counts(unwrapped[i], source[i], inner[i], grid[i], window, rule) for i in (0, 1))
            assert tables.valid[block, index, inner[0] * window + inner[1]] == counts


def _counts(unwrapped: int, source: int, inner: int, length: int, window: int, rule: str) -> bool:
    """Whether, along one axis, a key of the chunk at ``unwrapped``, stored in chunk ``source``, counts."""
    in_map = source * window + inner < length
    if rule == "cyclic":
        return in_map
    if rule == "cyclic_release":
        return in_map or unwrapped != source
    return in_map and unwrapped == source


def test_chunk_tables_are_cached() -> None:
    first = chunk_tables(Grid(5, 5), 2, "chunk", CPU)
    assert chunk_tables(Grid(5, 5), 2, "chunk", CPU) is first
    assert chunk_tables(Grid(5, 5), 2, "cyclic", CPU) is not first


@pytest.mark.parametrize("window", [1, 2, 3])
def test_block_offsets(window: int) -> None:
    offsets = block_offsets(window, CPU)
    assert offsets.shape == (3, window, window)
    for block, query, key in itertools.product(range(3), range(window), range(window)):
        assert offsets[block, query, key] == query - ((block - 1) * window + key)
    assert offsets.abs().max() == 2 * window - 1


def test_map_offsets() -> None:
    assert map_offsets(3, CPU).tolist() == [[0, -1, -2], [1, 0, -1], [2, 1, 0]]


@pytest.mark.parametrize(("length", "window", "dilation"), [(1, 1, 1), (5, 2, 1), (3, 4, 1), (7, 2, 3)])
def test_axis_window(length: int, window: int, dilation: int) -> None:
    axis = axis_window(length, window, dilation, CPU)
    assert window_steps(window, CPU).tolist() == list(range(-window, window + 1))
    for query in range(length):
        for index, step in enumerate(range(-window, window + 1)):
            key = query + step * dilation
            assert axis.inside[query, index] == (0 <= key < length)
            assert axis.block[query, index] == key // window - query // window


@pytest.mark.parametrize("shape", [(3, 5), (7, 3), (1, 1)])
def test_table_lookup_is_indexing_with_the_nearest_entry_beyond(shape: tuple[int, int]) -> None:
    table = torch.randn(2, *shape)
    rows, columns = torch.tensor([[-4, -1, 0], [1, 2, 9]]), torch.tensor([-3, 0, 2, 5])
    entries = table_lookup(table, rows, columns)
    assert entries.shape == (2, 2, 3, 4)
    for i, j, c in itertools.product(range(2), range(3), range(4)):
        row = min(max(rows[i, j].item() + shape[0] // 2, 0), shape[0] - 1)
        column = min(max(columns[c].item() + shape[1] // 2, 0), shape[1] - 1)
        assert torch.equal(entries[:, i, j, c], table[:, row, column])


@pytest.mark.parametrize(("grid", "shape"), [((2, 3), (3, 5)), ((3, 2), (11, 11)), ((4, 3), (3, 3)), ((1, 1), (1, 1))])
def test_map_bias_is_the_entry_of_each_offset(grid: tuple[int, int], shape: tuple[int, int]) -> None:
    table = torch.randn(2, *shape)
    bias = map_bias(table, Grid(*grid))
    tokens = list(itertools.product(range(grid[0]), range(grid[1])))
    assert bias.shape == (2, len(tokens), len(tokens))
    for (q, (qy, qx)), (k, (ky, kx)) in itertools.product(enumerate(tokens), enumerate(tokens)):
        row = min(max(qy - ky + shape[0] // 2, 0), shape[0] - 1)
        column = min(max(qx - kx + shape[1] // 2, 0), shape[1] - 1)
        assert torch.equal(bias[:, q, k], table[:, row, column])
