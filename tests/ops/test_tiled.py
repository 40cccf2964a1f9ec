"""The PyTorch-only implementation: what small maps with moderate scores do not reach."""

from __future__ import annotations

import pytest
import torch
from builders import Case, compare

from vision_longformer.ops import tiled


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


def test_empty_batch() -> None:
    compare("tiled", Case(batch=0))
