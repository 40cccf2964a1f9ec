"""Draws the README's picture from the package itself: ``python docs/draw_figures.py`` writes ``docs/attention.png``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from vision_longformer import local_attention

SIDE, WINDOW = 28, 7
QUERY = (2, 16)
PANELS: list[tuple[str, dict[str, object]]] = [
    ("rule 'chunk' (default)", {"rule": "chunk"}),
    ("rule 'exact'", {"rule": "exact"}),
    ("rule 'cyclic'", {"rule": "cyclic"}),
    ("random shift, neighbour 7", {"rule": "chunk", "neighbours": 7}),
]


def keys_seen(**options: object) -> Tensor:
    """How much of each key the query sees, (SIDE, SIDE): the gradient of its output with equal scores."""
    q = torch.zeros(1, SIDE * SIDE, 1, 1)
    v = torch.zeros(1, SIDE * SIDE, 1, 1, requires_grad=True)
    out = local_attention(q, q, v, (SIDE, SIDE), window=WINDOW, implementation="masked_dense", **options)  # type: ignore[arg-type]
    (weight,) = torch.autograd.grad(out[0, QUERY[0] * SIDE + QUERY[1], 0, 0], v)
    return weight.view(SIDE, SIDE) > 0


def draw(axes: Axes, title: str, seen: Tensor) -> None:
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.6)
    for line in range(0, SIDE + 1, WINDOW):
        axes.axhline(line - 0.5, color="0.35", linewidth=1)
        axes.axvline(line - 0.5, color="0.35", linewidth=1)
    axes.plot(QUERY[1], QUERY[0], "s", color="crimson", markersize=5)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def main() -> None:
    figure, panels = plt.subplots(1, len(PANELS), figsize=(11, 3.1))
    for axes, (title, options) in zip(panels, PANELS, strict=True):
        draw(axes, title, keys_seen(**options))
    figure.suptitle(
        "A query (red) near the top border and the local keys it attends to (blue); lines are 7×7 chunks", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("attention.png"), dpi=110)


if __name__ == "__main__":
    main()
