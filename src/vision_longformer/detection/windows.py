"""The pyramid and the heads of a detector over windows of their maps, so that none of these maps is ever whole.

A convolution of 3×3 reads one cell around its output. So a window is computed with a margin of as many cells as there
are such layers, and the margin is dropped. At the border of the map the window ends where the map ends, and the zeros
that each layer pads are the detector's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import roi_align
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from ..geometry import Grid, ceil_div
from .backbone import PyramidBackbone, group_by
from .detectors import AlignedRoIAlign, FixedAnchors

ROI_BATCH = 64
"""Regions that the heads of Mask R-CNN see at a time."""


class Window(NamedTuple):
    """A rectangle of cells of a map."""

    top: int
    left: int
    bottom: int
    right: int

    def grown(self, cells: int, grid: Grid) -> Window:
        """With so many more cells on each side, as far as the map goes."""
        top, left = max(self.top - cells, 0), max(self.left - cells, 0)
        return Window(top, left, min(self.bottom + cells, grid.height), min(self.right + cells, grid.width))

    def inside(self, outer: Window) -> tuple[slice, slice]:
        """Rows and columns that it takes of a window around it."""
        rows = slice(self.top - outer.top, self.bottom - outer.top)
        return rows, slice(self.left - outer.left, self.right - outer.left)

    @property
    def cells(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


def windows(grid: Grid, side: int) -> Iterator[Window]:
    """Windows of at most ``side`` × ``side`` that cover a map, each cell once."""
    for top in range(0, grid.height, side):
        for left in range(0, grid.width, side):
            yield Window(top, left, min(top + side, grid.height), min(left + side, grid.width))


class PyramidWindows:
    """The maps of a feature pyramid, of which windows are computed when they are read.

    ``maps`` are those of the backbone's stages, (height, width, dim) each, every one half as high and wide as the last.
    """

    def __init__(self, backbone: PyramidBackbone, maps: Sequence[Tensor]) -> None:
        self.fpn, self.maps, self.strides = backbone.fpn, maps, backbone.strides
        weight = next(backbone.fpn.parameters())
        self.device, self.dtype, self.channels = weight.device, weight.dtype, backbone.out_channels
        self.grids = [Grid(*one.shape[:2]) for one in maps]
        while len(self.grids) < len(self.strides):
            self.grids.append(Grid(*(ceil_div(side, 2) for side in self.grids[-1])))

    def read(self, level: int, window: Window) -> Tensor:
        """A window of a level's map, (1, channels, height, width)."""
        top = len(self.maps) - 1
        if level <= top:
            outer = window.grown(1, self.grids[level])
            rows, columns = window.inside(outer)
            return self.fpn.layer_blocks[level](self._inner(level, outer))[..., rows, columns]
        extra = self.fpn.extra_blocks
        if not isinstance(extra, LastLevelP6P7):  # every second cell of the top level
            return self.read(top, _twice(window, self.grids[top]))[..., ::2, ::2]
        if level == top + 1:
            return self._halved(extra.p6, window, self.grids[top], lambda source: self._stage(top, source))
        return self._halved(extra.p7, window, self.grids[top + 1], lambda source: F.relu(self.read(top + 1, source)))

    def _inner(self, level: int, window: Window) -> Tensor:
        """What the last convolution of a level reads: its stage's map and those of all levels above."""
        inner = self.fpn.inner_blocks[level](self._stage(level, window))
        if level == len(self.maps) - 1:
            return inner
        above = Window(window.top // 2, window.left // 2, ceil_div(window.bottom, 2), ceil_div(window.right, 2))
        enlarged = F.interpolate(self._inner(level + 1, above), scale_factor=2, mode="nearest")
        rows, columns = window.inside(Window(2 * above.top, 2 * above.left, 2 * above.bottom, 2 * above.right))
        return inner + enlarged[..., rows, columns]

    def _stage(self, level: int, window: Window) -> Tensor:
        """A window of a backbone's map, (1, dim, height, width)."""
        part = self.maps[level][window.top : window.bottom, window.left : window.right]
        return part.to(self.device, self.dtype).permute(2, 0, 1)[None]

    def _halved(self, layer: nn.Module, window: Window, grid: Grid, read: Callable[[Window], Tensor]) -> Tensor:
        """A window of what a 3×3 convolution of stride 2 makes of a map."""
        outer = Window(max(window.top - 1, 0), max(window.left - 1, 0), window.bottom, window.right)
        rows, columns = window.inside(outer)
        return layer(read(_twice(outer, grid)))[..., rows, columns]


def _twice(window: Window, grid: Grid) -> Window:
    """The cells of a map that a window of the map of half its size covers."""
    bottom, right = min(2 * window.bottom, grid.height), min(2 * window.right, grid.width)
    return Window(2 * window.top, 2 * window.left, bottom, right)


# Anchors


class Candidates(NamedTuple):
    """The best anchors of a level: their numbers (n,) in its map, logits (n, classes) and offsets (n, 4)."""

    numbers: Tensor
    logits: Tensor
    offsets: Tensor

    def best(self, most: int) -> Candidates:
        """The anchors that have the ``most`` highest logits, in the order of their numbers."""
        classes = self.logits.shape[1]
        highest = self.logits.flatten().topk(min(most, self.logits.numel())).indices
        chosen = highest.div(classes, rounding_mode="floor").unique()
        chosen = chosen[self.numbers[chosen].argsort()]
        return Candidates(*(values[chosen] for values in self))


Head = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a map (1, channels, h, w) to logits (h · w · anchors, classes) and offsets (h · w · anchors, 4)."""


def best_anchors(
    pyramid: PyramidWindows,
    level: int,
    head: Head,
    *,
    margin: int,
    most: int,
    side: int,
    progress: Callable[[int], Any] = lambda cells: None,
) -> Candidates:
    """The anchors of a level with the ``most`` highest logits, from a head over windows of ``side`` cells.

    ``margin``: cells around its output that the head reads. ``progress`` is called with the cells of each window.
    """
    grid, best = pyramid.grids[level], None
    for window in windows(grid, side):
        outer = window.grown(margin, grid)
        rows, columns = window.inside(outer)
        logits, offsets = (
            values.view(outer.bottom - outer.top, outer.right - outer.left, -1, values.shape[1])[rows, columns]
            for values in head(pyramid.read(level, outer))
        )
        anchors = torch.arange(logits.shape[2], device=logits.device)
        down = torch.arange(window.top, window.bottom, device=logits.device)[:, None, None]
        across = torch.arange(window.left, window.right, device=logits.device)[:, None]
        numbers = (down * grid.width + across) * len(anchors) + anchors
        found = Candidates(numbers.flatten(), logits.flatten(0, 2), offsets.flatten(0, 2)).best(most)
        if best is not None:
            found = Candidates(*(torch.cat(pair) for pair in zip(best, found, strict=True))).best(most)
        best = found
        progress(window.cells)
    assert best is not None
    return best


def anchor_boxes(generator: FixedAnchors, pyramid: PyramidWindows, level: int, numbers: Tensor) -> Tensor:
    """The boxes (n, 4) of a level's anchors by their numbers."""
    generator.set_cell_anchors(torch.promote_types(pyramid.dtype, torch.float32), numbers.device)
    assert generator.cell_anchors is not None
    shapes, width = generator.cell_anchors[level], pyramid.grids[level].width
    cells, shape = numbers.div(len(shapes), rounding_mode="floor"), numbers % len(shapes)
    down, across = cells.div(width, rounding_mode="floor"), cells % width
    return shapes[shape] + torch.stack([across, down, across, down], 1) * pyramid.strides[level]


# Regions


def pool_regions(
    pyramid: PyramidWindows, pooler: AlignedRoIAlign, boxes: Tensor, side: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Boxes (n, 4) pooled from the pyramid, some at a time: their positions, and (some, channels, size, size).

    Regions that begin in the same square of half a ``side`` share a window, unless they are longer than that.
    """
    levels = pooler.mapper([boxes])
    scales = 1 / torch.tensor(pooler.strides, dtype=boxes.dtype, device=boxes.device)
    cells = boxes * scales[levels, None] - 0.5
    corners = torch.cat([cells[:, :2].floor(), cells[:, 2:].floor() + 2], 1).long()
    squares = corners[:, :2].div(side // 2, rounding_mode="floor")
    long = ((corners[:, 2:] - corners[:, :2]) > side // 2).any(1)
    alone = torch.where(long, torch.arange(len(boxes), device=boxes.device), -1)
    for group in group_by(map(tuple, torch.cat([levels[:, None], squares, alone[:, None]], 1).tolist())):
        level = int(levels[group[0]])
        left, top = (int(side) for side in corners[group, :2].amin(0))
        right, bottom = (int(side) for side in corners[group, 2:].amax(0))
        window = Window(top, left, bottom, right).grown(0, pyramid.grids[level])
        part = pyramid.read(level, window).to(boxes.dtype)
        origin = boxes.new_tensor([window.left, window.top] * 2)
        for positions in torch.tensor(group, device=boxes.device).split(ROI_BATCH):
            moved = cells[positions] - origin + 0.5  # in this order, rounded as they are in the whole map
            regions = torch.cat([torch.zeros_like(moved[:, :1]), moved], 1)
            pooled = roi_align(part, regions, pooler.output_size, 1.0, 0, aligned=True)
            yield positions, pooled.to(pyramid.dtype)
