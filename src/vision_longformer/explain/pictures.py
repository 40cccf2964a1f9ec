"""An explanation as one PNG: a row per layer, with what the chosen token attends to, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageEnhance
from torch import Tensor

from ..classification.pictures import QUIET, check_picture, save_picture
from .explanation import Explanation
from .layers import Layer, Strip
from .weights import global_maps, token_maps

LINE = "#35d6f0"
"""Outlines of chunks, in pictures and pages."""

COLUMNS = 9
"""Panels in a row of a picture; further heads continue in the next one."""

FIXED = 3
"""Panels before the heads: the image, the global token, the rollout."""

PANEL = 1.8
"""Inches of a panel's width."""

HEADER = 0.85
"""Inches of title and legend."""

PANEL_PIXELS = 240
"""Pixels of an image that a panel has use for."""

LEGEND = (
    "white: the token · solid: its chunk · dashed: what it can see · "
    "the lightest colour is each panel's largest weight, written below"
)


def draw(
    explanation: Explanation,
    path: str | Path,
    *,
    stage: int | None = None,
    head: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a picture of the last layer of every stage, or of all layers of one stage; of all heads, or of one.

    Each row shows where the token is, with its chunk and the chunks around it outlined, what the global tokens look at,
    the rollout, and what the token attends to in each head. Every panel has a scale of its own.
    """
    check_picture(path, overwrite=overwrite)
    layers = chosen_layers(explanation, stage)
    heads = [chosen_heads(layer, head) for layer in layers]
    columns = FIXED + min(COLUMNS - FIXED, max(map(len, heads)))
    most = columns - FIXED
    lines = [
        (layer, own[start : start + most])
        for layer, own in zip(layers, heads, strict=True)
        for start in range(0, len(own), most)
    ]
    height, width = explanation.size
    tall = (PANEL * height / width + 0.5) * len(lines)
    figure = Figure(figsize=(PANEL * columns, tall + HEADER))
    figure.subplots_adjust(0.004, 0.2 / (tall + HEADER), 0.996, tall / (tall + HEADER), wspace=0.04, hspace=0.28)
    figure.text(0.005, 1 - 0.1 / (tall + HEADER), _title(explanation), fontsize=13, weight="bold", va="top")
    figure.text(0.005, 1 - 0.4 / (tall + HEADER), LEGEND, fontsize=8.5, color=QUIET, va="top")
    panels = figure.subplots(len(lines), columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    previous = None
    for row, (layer, line) in zip(panels, lines, strict=True):
        if layer is not previous:
            _draw_fixed(row, explanation, layer)
        _draw_heads(row[FIXED:], explanation, layer, line)
        previous = layer
    return save_picture(figure, path, overwrite=overwrite)


def chosen_layers(explanation: Explanation, stage: int | None) -> list[Layer]:
    """The last layer of every stage, or all layers of one, counted from 1."""
    stages = explanation.stages
    if stage is None:
        return [layers[-1] for layers in stages]
    if not 1 <= stage <= len(stages):
        raise ValueError(f"stage is {stage}; this model has stages 1 to {len(stages)}")
    return stages[stage - 1]


def chosen_heads(layer: Layer, head: int | None) -> list[int]:
    """All heads of a layer, or one, counted from 1."""
    if head is None:
        return list(range(1, layer.heads + 1))
    if not 1 <= head <= layer.heads:
        some = f"heads 1 to {layer.heads}" if layer.heads > 1 else "head 1 only"
        raise ValueError(f"head is {head}; stage {layer.stage} has {some}")
    return [head]


def heat() -> np.ndarray:
    """The colours of weights in pictures and pages, from transparent over red to yellow: RGBA as uint8 (256, 4)."""
    level = np.linspace(0, 1, 256)
    colours = matplotlib.colormaps["inferno"](0.25 + 0.73 * level)
    colours[:, 3] = 0.94 * level**0.6
    return np.rint(255 * colours).astype(np.uint8)


def _title(explanation: Explanation) -> str:
    prediction = explanation.prediction
    name, label = Path(prediction.file).name, shorten(prediction.labels[0], 40, placeholder="…")
    return f"{name}, predicted as {label} ({prediction.probabilities[0]:.0%})"


def _draw_heads(panels: Sequence[Axes], explanation: Explanation, layer: Layer, heads: Sequence[int]) -> None:
    cell = layer.cell(explanation.point)
    maps, to_global = token_maps(layer, cell)
    for axes, head in zip(panels, heads, strict=False):
        share = f", {to_global[head - 1].sum():.1%} global" if layer.global_tokens else ""
        _show_map(axes, explanation, layer, maps[head - 1], f"head {head}", f"up to {maps[head - 1].max():.1%}{share}")
        _outline(axes, layer, cell)


def _draw_fixed(panels: Sequence[Axes], explanation: Explanation, layer: Layer) -> None:
    where, of_global, whole = panels[:FIXED]
    attention = "full attention" if layer.window is None else f"chunks of {layer.window}×{layer.window}"
    _show_image(where, explanation, explanation.image)
    _label(where, f"stage {layer.stage}, block {layer.block}", f"{layer.grid.height}×{layer.grid.width}, {attention}")
    _outline(where, layer, layer.cell(explanation.point))
    if layer.global_tokens:
        attended, among = global_maps(layer)
        share = f"up to {attended.mean(0).max():.1%}, {among.mean(0).sum():.1%} global"
        _show_map(of_global, explanation, layer, attended.mean(0), "global token", share)
    else:
        of_global.text(0.5, 0.5, "no global token", ha="center", va="center", fontsize=8, color=QUIET)
    shares = explanation.rollout.maps[layer.stage - 1]
    _show_map(whole, explanation, layer, shares, "rollout", f"up to {shares.max():.1%}")


def _show_map(axes: Axes, explanation: Explanation, layer: Layer, weights: Tensor, title: str, below: str) -> None:
    """Weights (height, width) as heat over the image in dim grey."""
    _show_image(axes, explanation, ImageEnhance.Brightness(explanation.image.convert("L")).enhance(0.55))
    level = (weights / weights.max().clamp(min=1e-12) * 255).round().int().cpu().numpy()
    rows, columns = (length * layer.stride for length in layer.grid)
    axes.imshow(heat()[level], extent=(0, columns, rows, 0), interpolation="nearest")
    _limit(axes, explanation)
    _label(axes, title, below)


def _show_image(axes: Axes, explanation: Explanation, image: Image.Image) -> None:
    height, width = explanation.size
    small = image.copy()
    small.thumbnail((PANEL_PIXELS, PANEL_PIXELS))
    pixels = np.asarray(small.convert("RGB"))
    axes.imshow(pixels, extent=(0, width, height, 0), interpolation="nearest" if width < 64 else "antialiased")
    _limit(axes, explanation)


def _limit(axes: Axes, explanation: Explanation) -> None:
    height, width = explanation.size
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def _label(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, fontsize=9, weight="bold", pad=4)
    axes.text(0.5, -0.03, below, transform=axes.transAxes, ha="center", va="top", fontsize=7.5, color=QUIET)


def _outline(axes: Axes, layer: Layer, cell: tuple[int, int]) -> None:
    """The token, its chunk, and the chunks around it, dashed."""
    rows, columns = layer.strips_of(cell)
    if layer.window is not None:
        for top, bottom in _runs(rows.seen):
            for left, right in _runs(columns.seen):
                _box(axes, layer.stride, top, bottom, left, right, linewidth=1, linestyle=(0, (3, 2)))
        _box(axes, layer.stride, *_ends(rows), *_ends(columns), linewidth=1.2)
    _box(axes, layer.stride, cell[0], cell[0] + 1, cell[1], cell[1] + 1, linewidth=1, edgecolor="white")


def _box(axes: Axes, stride: int, top: int, bottom: int, left: int, right: int, **style: object) -> None:
    style = {"edgecolor": LINE, "facecolor": "none", **style}
    corner = left * stride, top * stride
    axes.add_patch(Rectangle(corner, (right - left) * stride, (bottom - top) * stride, **style))  # type: ignore[arg-type]


def _ends(strip: Strip) -> tuple[int, int]:
    return strip.own.start, strip.own.stop


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open runs of neighbours."""
    breaks = [index for index, (one, next_one) in enumerate(pairwise(positions), 1) if next_one != one + 1]
    bounds = [0, *breaks, len(positions)]
    return [(positions[start], positions[stop - 1] + 1) for start, stop in pairwise(bounds)]
