"""How models are put together: the stack of stages, one stage, and what images of growing size cost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from draw_style import GLOBAL, MUTED, OWN, QUERY, SEEN, clear, new_figure, write
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from vision_longformer import StageConfig, model_config
from vision_longformer.costs import paper_macs
from vision_longformer.geometry import Grid
from vision_longformer.models.config import Longformer

MODEL = "vision_longformer_small"


def draw_stack(path: Path) -> None:
    """The four maps of a model in true proportion, with their chunks, sizes and global tokens."""
    figure, (axes,) = new_figure(1, 1, 10, 4.2)
    config = model_config(MODEL)
    left, largest = 1.0, config.grids()[0].height
    axes.text(-10, largest / 2, "image\n3×224×224", ha="center", va="center")
    for index, (stage, grid) in enumerate(zip(config.stages, config.grids(), strict=True)):
        left += 14
        _arrow(axes, (left - 12.4, largest / 2), (left - 1.6, largest / 2), f"patches {stage.patch}×{stage.patch}")
        _stage_map(axes, left, largest, index, stage, grid)
        left += max(grid.width, 20)
    axes.set_xlim(-22, left + 2)
    axes.set_ylim(largest + 27, -12)
    axes.set_aspect("equal")
    clear(axes)
    title = f"{MODEL} at 224×224: maps in proportion, white lines between chunks, global tokens yellow"
    axes.set_title(title)
    figure.tight_layout()
    write(figure, path)


def _stage_map(axes: Axes, left: float, largest: int, index: int, stage: StageConfig, grid: Grid) -> None:
    top = (largest - grid.height) / 2
    axes.add_patch(Rectangle((left, top), grid.width, grid.height, facecolor=SEEN, edgecolor=MUTED))
    assert isinstance(stage.attention, Longformer)
    for step in range(stage.attention.window, grid.height, stage.attention.window):
        axes.plot([left, left + grid.width], [top + step] * 2, color="white", linewidth=0.8)
        axes.plot([left + step] * 2, [top, top + grid.height], color="white", linewidth=0.8)
    for token in range(stage.global_tokens):
        axes.add_patch(
            Rectangle((left + 4 * token, top - 5), 3.4, 3.4, facecolor=GLOBAL, edgecolor=MUTED, linewidth=0.6)
        )
    middle = left + grid.width / 2
    lines = (
        f"stage {index + 1}",
        f"{grid.height}×{grid.width} tokens",
        f"width {stage.dim}",
        f"{stage.heads} heads",
        f"{stage.depth} block{'s' if stage.depth > 1 else ''}",
    )
    axes.text(middle, largest + 3, "\n".join(lines), ha="center", va="top")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=MUTED))
    if text:
        axes.text((start[0] + end[0]) / 2, start[1] - 4, text.replace(" ", "\n"), ha="center", va="bottom", fontsize=8)


STAGE_STEPS = (
    (0.0, "map in\nC × H × W", "white"),
    (1.55, "patches p×p\nlinear to d", SEEN),
    (3.1, "LayerNorm", SEEN),
    (4.65, "global tokens\nin front", GLOBAL),
    (6.75, "LayerNorm\nattention", SEEN),
    (8.7, "LayerNorm\nMLP", SEEN),
    (10.75, "drop the\nglobal tokens", GLOBAL),
    (12.3, "map out\nd × H/p × W/p", "white"),
)
"""Left edge, text and colour of each step of a stage."""

BLOCK_STEPS = (6.75, 8.7)


def draw_stage(path: Path) -> None:
    """One E-ViT stage: what happens to a map on its way."""
    figure, (axes,) = new_figure(1, 1, 10.5, 2.5)
    for left, text, colour in STAGE_STEPS:
        box = FancyBboxPatch((left, 0), 1.15, 0.8, boxstyle="round,pad=0.04", facecolor=colour, edgecolor=MUTED)
        axes.add_patch(box)
        axes.text(left + 0.575, 0.4, text, ha="center", va="center", fontsize=8)
    for (left, *_), (right, *_) in pairwise(STAGE_STEPS):
        _arrow(axes, (left + 1.2, 0.4), (right - 0.05, 0.4))
    for left in BLOCK_STEPS:
        _draw_residual(axes, left)
    axes.add_patch(Rectangle((6.2, -0.2), 4.1, 1.6, fill=False, edgecolor=QUERY, linestyle="--"))
    axes.text(8.25, -0.42, "block, n times", color=QUERY, ha="center", va="center")
    axes.text(5.22, -0.14, "absolute position\nis added here …", color=MUTED, ha="center", va="top", fontsize=8)
    axes.text(8.25, 1.5, "… relative bias to the scores in here", color=MUTED, ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.15, 13.6)
    axes.set_ylim(-0.65, 1.8)
    clear(axes)
    figure.tight_layout()
    write(figure, path)


def _draw_residual(axes: Axes, left: float) -> None:
    """A line around a step, and the sum behind it."""
    start, end = left - 0.25, left + 1.42
    axes.plot([start, start, end, end], [0.4, 1.15, 1.15, 0.5], color=OWN, linewidth=1.4)
    axes.plot(end, 0.4, "o", color="white", markeredgecolor=OWN, markersize=11, zorder=3)
    axes.text(end, 0.39, "+", color=OWN, ha="center", va="center", zorder=4)


def draw_cost(path: Path) -> None:
    """MACs of a model with local and with full attention, over the side of a square image."""
    figure, (axes,) = new_figure(1, 1, 7, 3.8)
    sides = range(224, 1345, 32)
    for name, label, colour in (
        (MODEL, "Vision Longformer, all stages (vision_longformer_small)", OWN),
        ("msvit_small_1_2_8_1_partial_vil", "full attention in the last two stages (…_partial_vil)", GLOBAL),
        ("msvit_small_1_2_8_1_full", "full attention (…_full)", QUERY),
    ):
        config = model_config(name)
        axes.plot(sides, [paper_macs(config, (side, side)).total / 1e9 for side in sides], color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("side of a square image, pixels")
    axes.set_ylabel("GMACs per image, forward")
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write(figure, path)
