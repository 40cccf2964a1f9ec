"""The PyTorch-only implementation: what small maps with moderate scores do not reach."""

from __future__ import annotations

import pytest
import torch
from builders import Case, compare, run

from vision_longformer.ops import tiled
from vision_longformer.ops.tiled.tiles import ChunkClass


@pytest.mark.parametrize("scores", [1, 1500, 6000])
@pytest.mark.parametrize("rule", ["chunk", "cyclic"])
def test_many_tiles(rule: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of chunks and images are cut into several tiles, also of unequal sizes."""
    monkeypatch.setattr(tiled, "TILE", scores)
    compare("tiled", Case((25, 11), 2, rule, batch=3))
    compare("tiled", Case((25, 7), 2, rule, neighbours=8, batch=1, heads=1, global_tokens=0), torch.float32)


@pytest.mark.parametrize("scale", [-3000.0, -300.0, 300.0, 3000.0])
def test_large_scores(scale: float) -> None:
    """Scores whose powers overflow or underflow are shifted first."""
    compare("tiled", Case((9, 8), 3, "exact", dim=8, scale=scale))


@pytest.mark.parametrize("grid", [(7, 1), (1, 7), (1, 1)])
@pytest.mark.parametrize("neighbour", range(1, 9))
def test_a_neighbour_outside_a_narrow_map(grid: tuple[int, int], neighbour: int) -> None:
    """No chunk has a neighbour on that side, whose keys would start beyond the end of the map's."""
    compare("tiled", Case(grid, 4, neighbours=neighbour))


def test_empty_batch() -> None:
    compare("tiled", Case(batch=0))


@pytest.mark.parametrize("needed", [True, False])
def test_the_bias_gradient_is_summed_only_if_needed(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 5×9 map in chunks of 2 has two classes of rows and two of columns, of inner chunks and of the last ones."""
    calls, add_to_table = [], ChunkClass.add_to_table

    def note(chunks: ChunkClass, grads: torch.Tensor, table: torch.Tensor) -> None:
        calls.append(chunks)
        add_to_table(chunks, grads, table)

    monkeypatch.setattr(ChunkClass, "add_to_table", note)
    case = Case(neighbours="self")
    tensors = case.tensors()
    tensors["bias"].requires_grad_(needed)
    run("tiled", case, tensors)
    assert len(calls) == (4 if needed else 0)
