"""Augmentation of a whole batch at once: crop, horizontal flip and random erasing.

What is drawn is drawn for the global batch, of which a process takes its part: it does not depend on their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...training.randomness import derive

ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)
"""Of the erased box: its part of the image, and its height by its width, as timm draws them."""


@dataclass(frozen=True)
class BatchAugmentation:
    """Makes inputs of ``size`` from larger (or equal) images, ``batch`` of them in a global batch."""

    size: tuple[int, int]
    batch: int
    hflip: float
    erase_probability: float

    def crop(self, images: Tensor, samples: Tensor, seed: int, part: slice) -> Tensor:
        """Randomly placed crops (b, C, H, W) of ``images[samples]``, some flipped; ``images`` is (N, C, H', W')."""
        generator = torch.Generator().manual_seed(seed)
        top, left, flip = torch.rand(3, self.batch, 1, generator=generator)[:, part]
        height, width = self.size
        rows = (top * (images.shape[2] - height + 1)).long() + torch.arange(height)
        columns = (left * (images.shape[3] - width + 1)).long() + torch.arange(width)
        columns = torch.where(flip < self.hflip, columns.flip(1), columns)
        channels = torch.arange(images.shape[1])
        return images[
            samples[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
        ]

    def erase(self, images: Tensor, seed: int, part: slice) -> Tensor:
        """Normalised images (b, C, H, W), some with a box replaced by normal noise."""
        if not self.erase_probability:
            return images
        generator = torch.Generator().manual_seed(derive(seed, "erase"))
        erased, area, aspect, top, left = torch.rand(5, self.batch, 1, generator=generator)[:, part]
        noise = torch.randn(self.batch, *images.shape[1:], generator=generator)[part]
        height, width = self.size
        area = _between(area, *ERASED_AREA) * height * width
        aspect = _between(aspect, *map(math.log, ERASED_ASPECT)).exp()
        rows = _in_run(height, (area * aspect).sqrt(), top)
        columns = _in_run(width, (area / aspect).sqrt(), left)
        box = rows[:, None, :, None] & columns[:, None, None, :] & (erased < self.erase_probability)[..., None, None]
        return torch.where(box, noise, images)


def _between(fraction: Tensor, low: float, high: float) -> Tensor:
    return low + fraction * (high - low)


def _in_run(side: int, length: Tensor, place: Tensor) -> Tensor:
    """Which of ``side`` pixels are in a run of ``length`` (b, 1), below the whole side, at ``place`` in [0, 1)."""
    length = length.round().clamp(max=side - 1)
    start = (place * (side - length + 1)).floor()
    pixels = torch.arange(side)
    return (pixels >= start) & (pixels < start + length)
