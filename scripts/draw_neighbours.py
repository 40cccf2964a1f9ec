"""Which keys a query sees, by asking local attention itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from draw_style import GLOBAL, MUTED, OWN, QUERY, SEEN, clear, new_figure, write
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from vision_longformer import local_attention
from vision_longformer.geometry import BLOCKS, Grid

SIDE, WINDOW = 28, 7
KEY_COLOURS = ListedColormap(["white", SEEN, OWN])


def keys_seen(
    query: tuple[int, int], grid: tuple[int, int] = (SIDE, SIDE), window: int = WINDOW, **options: object
) -> Tensor:
    """Whether the query sees each local key, (height, width): with equal scores, whether its output depends on it."""
    height, width = grid
    q = torch.zeros(1, height * width, 1, 1)
    v = torch.zeros(1, height * width, 1, 1, requires_grad=True)
    out = local_attention(q, q, v, grid, window=window, implementation="masked_dense", **options)  # type: ignore[arg-type]
    (weight,) = torch.autograd.grad(out[0, query[0] * width + query[1], 0, 0], v)
    return weight.view(height, width) > 0


def draw_map(axes: Axes, query: tuple[int, int], seen: Tensor, window: int = WINDOW) -> None:
    """A map with its chunks: the query, the keys it sees, those of its own chunk darker."""
    height, width = seen.shape
    top, left = (position // window * window for position in query)
    shade = seen.int().numpy()
    shade[top : top + window, left : left + window] *= 2
    axes.imshow(shade, cmap=KEY_COLOURS, vmin=0, vmax=2)
    chunks = Grid(height, width).chunks(window)
    for row in range(chunks.height + 1):
        axes.plot([-0.5, chunks.width * window - 0.5], [row * window - 0.5] * 2, color=MUTED, linewidth=0.9)
    for column in range(chunks.width + 1):
        axes.plot([column * window - 0.5] * 2, [-0.5, chunks.height * window - 0.5], color=MUTED, linewidth=0.9)
    axes.plot(query[1], query[0], "s", color=QUERY, markersize=5)
    axes.set_xlim(-1, chunks.width * window)
    axes.set_ylim(chunks.height * window, -1)
    clear(axes)


def draw_rules(path: Path) -> None:
    """The three rules, and random shift, for a query near the upper border: the README's picture."""
    panels: list[tuple[str, dict[str, object]]] = [
        ("rule 'chunk' (default)", {"rule": "chunk"}),
        ("rule 'exact'", {"rule": "exact"}),
        ("rule 'cyclic'", {"rule": "cyclic"}),
        ("random shift, neighbour 7", {"rule": "chunk", "neighbours": 7}),
    ]
    figure, axes = new_figure(1, len(panels), 11, 3.1)
    query = (2, 16)
    for panel, (title, options) in zip(axes, panels, strict=True):
        draw_map(panel, query, keys_seen(query, **options))
        panel.set_title(title)
    figure.suptitle(
        "A query (red) near the upper border and the local keys it sees (blue); lines are 7×7 chunks", y=0.98
    )
    figure.tight_layout()
    write(figure, path)


def draw_chunks(path: Path) -> None:
    """A map that is no multiple of the chunk, and the attention matrix of a smaller one."""
    figure, (places, matrix) = new_figure(1, 2, 10, 4.6)
    query, grid = (10, 16), (25, 31)
    draw_map(places, query, keys_seen(query, grid))
    _draw_padding(places, Grid(*grid))
    places.add_patch(Rectangle((-5.5, 9), 3, 3, facecolor=GLOBAL, edgecolor=MUTED))
    places.text(-4, 13.6, "global\ntoken", ha="center", va="center")
    places.annotate("", (-2.3, 10.5), (15.2, query[0]), arrowprops={"arrowstyle": "->", "color": QUERY, "lw": 1.4})
    places.set_xlim(-7, 36)
    places.set_title("a map of 25×31 tokens in chunks of 7×7:\nthe query sees 9 chunks and the global token")
    _draw_matrix(matrix)
    figure.tight_layout()
    write(figure, path)


def _draw_padding(axes: Axes, grid: Grid) -> None:
    """Hatching where the last chunks reach beyond the map."""
    chunks = grid.chunks(WINDOW)
    height, width = chunks.height * WINDOW, chunks.width * WINDOW
    style = {"facecolor": "none", "edgecolor": "0.75", "hatch": "////", "linewidth": 0}
    axes.add_patch(Rectangle((grid.width - 0.5, -0.5), width - grid.width, height, **style))
    axes.add_patch(Rectangle((-0.5, grid.height - 0.5), grid.width, height - grid.height, **style))


def _draw_matrix(axes: Axes, grid: tuple[int, int] = (8, 8), window: int = 2) -> None:
    """Queries by keys, the global token first: its row and column are full, the rest is the rule 'chunk'."""
    tokens = Grid(*grid).tokens
    shade = np.zeros((tokens + 1, tokens + 1))
    for query in range(tokens):
        shade[query + 1, 1:] = keys_seen(divmod(query, grid[1]), grid, window).flatten()
    shade[0], shade[:, 0] = 3, 3
    axes.imshow(shade, cmap=ListedColormap(["white", SEEN, OWN, GLOBAL]), vmin=0, vmax=3, interpolation="nearest")
    size, chunk = f"{grid[0]}×{grid[1]}", f"{window}×{window}"
    axes.set_title(f"all queries (rows) and keys (columns) of a map of {size},\nchunks of {chunk}, 1 global token")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("global token first, then the map row by row")


def draw_random_shift(path: Path) -> None:
    """All ten modes, on a map of 3×3 chunks around the query."""
    modes: Sequence[str | int] = ("all", "self", *range(1, 9))
    numbers = {"all": "mode 0", "self": "mode −1"}
    figure, axes = new_figure(2, 5, 10, 4.8)
    side, query = 3 * WINDOW, (10, 10)
    for panel, mode in zip(axes, modes, strict=True):
        draw_map(panel, query, keys_seen(query, (side, side), neighbours=mode))
        panel.set_title(f"'{mode}' ({numbers[mode]})" if isinstance(mode, str) else f"neighbour {mode}")
        if mode == "all":
            _number_neighbours(panel)
    figure.legend(
        handles=[
            Patch(color=QUERY, label="query"),
            Patch(color=OWN, label="its own chunk"),
            Patch(color=SEEN, label="neighbours seen"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1), h_pad=1.6)
    write(figure, path)


def _number_neighbours(axes: Axes) -> None:
    around = [block for block in BLOCKS if block != (0, 0)]
    for number, (row, column) in enumerate(around, 1):
        axes.text((column + 1.5) * WINDOW - 0.5, (row + 1.5) * WINDOW - 0.5, str(number), ha="center", va="center")
