"""Draws every figure of the documentation from the package itself: ``python scripts/draw_figures.py [FOLDER]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from draw_models import draw_cost, draw_stack, draw_stage
from draw_neighbours import draw_chunks, draw_random_shift, draw_rules

DOCS = Path(__file__).parents[1] / "docs"

FIGURES: dict[str, Callable[[Path], None]] = {
    "attention.png": draw_rules,
    "chunks.png": draw_chunks,
    "random_shift.png": draw_random_shift,
    "stack.png": draw_stack,
    "stage.png": draw_stage,
    "cost.png": draw_cost,
}


def main(folder: Path) -> None:
    """Write all figures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
