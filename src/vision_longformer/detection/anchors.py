"""Anchors and pooled regions at fixed strides, so that they do not depend on the other images of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops.poolers import LevelMapper


class FixedAnchors(AnchorGenerator):
    """Anchors of exact size around the corners of the cells, size by size and in each by ratio.

    torchvision's are rounded to pixels, go ratio by ratio, and take strides from the size of the padded batch.
    """

    def __init__(self, sizes: list[list[float]], ratios: tuple[float, ...], strides: list[int]) -> None:
        self.strides = strides
        super().__init__(tuple(map(tuple, sizes)), (tuple(ratios),) * len(sizes))

    def generate_anchors(
        self,
        scales: list[float],
        aspect_ratios: list[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Anchors (sizes · ratios, 4) around the origin; a ratio is height to width."""
        size = torch.tensor(scales, dtype=dtype, device=device)[:, None]
        root = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()
        width, height = (size / root).flatten(), (size * root).flatten()
        return torch.stack([-width, -height, width, height], 1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """The anchors of all maps, (N, 4), for each image."""
        first = feature_maps[0]
        self.set_cell_anchors(first.dtype, first.device)
        strides = [[torch.tensor(stride, device=first.device)] * 2 for stride in self.strides]
        anchors = self.grid_anchors([list(one.shape[-2:]) for one in feature_maps], strides)
        return [torch.cat(anchors)] * len(image_list.image_sizes)


class AlignedRoIAlign(MultiScaleRoIAlign):
    """Regions pooled with half-pixel alignment and as many samples as they need, from the level that fits their size.

    torchvision's pools without alignment and guesses the scales from the first image it sees.
    """

    def __init__(self, names: list[str], output_size: int, strides: list[int]) -> None:
        super().__init__(names, output_size, sampling_ratio=0)
        self.strides = strides[: len(names)]
        self.mapper = LevelMapper(*(round(math.log2(stride)) for stride in (self.strides[0], self.strides[-1])))

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """Boxes (n, 4) of each image to (all boxes, channels, size, size)."""
        numbers = torch.cat([torch.full_like(one[:, :1], index) for index, one in enumerate(boxes)])
        regions = torch.cat([numbers, torch.cat(boxes)], 1)
        levels = self.mapper(boxes)
        first = x[self.featmap_names[0]]
        pooled = first.new_zeros(regions.shape[0], first.shape[1], *self.output_size)
        for level, (name, stride) in enumerate(zip(self.featmap_names, self.strides, strict=True)):
            chosen = torch.where(levels == level)[0]
            part = roi_align(x[name], regions[chosen].to(x[name].dtype), self.output_size, 1 / stride, 0, aligned=True)
            pooled = pooled.index_copy(0, chosen, part.to(pooled.dtype))
        return pooled
