"""The rows of an image as a model takes them, read and normalised when they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reading import LargeImage, open_image

WHITE = {torch.uint8: 255, torch.uint16: 65535}
"""What becomes 1 before normalisation, of integers; floating-point numbers are taken as they are."""


HASHED_ROWS = 256
"""Rows of an array that are hashed at a time."""


class Pixels:
    """A tensor (channels, height, width), or a file or array (height, width, channels) that is read by rows.

    Numbers of type uint8 are divided by 255, of type uint16 by 65535, and normalised by ``mean`` and ``std``; others
    are taken as they are.
    """

    def __init__(self, image: Any, channels: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self._is_tensor = isinstance(image, Tensor)
        if not self._is_tensor and not isinstance(image, LargeImage):
            image = open_image(image, channels)
        self._image = image
        shape = tuple(image.shape)
        if len(shape) != 3:
            raise ValueError(f"image is of shape {shape}; it must be one image, (channels, height, width)")
        given, *size = shape if self._is_tensor else (shape[2], *shape[:2])
        if given != channels:
            raise ValueError(f"image is of shape {shape}, with {given} channels; the model takes {channels}")
        if min(size) < 1:
            raise ValueError(f"image is of shape {shape}; it has no pixels")
        if not len(mean) == len(std) == channels:
            raise ValueError(
                f"mean is {tuple(mean)} and std is {tuple(std)}; give one value for each of {channels} channels"
            )
        self.size = size[0], size[1]
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def identity(self) -> str:
        """What tells the image from others: of a file its path, size and time, of an array a hash of its numbers."""
        if not self._is_tensor and self._image.identity:
            return str(self._image.identity)
        digest = hashlib.sha256()
        for start in range(0, self.size[0], HASHED_ROWS):
            rows = self._rows(range(start, min(start + HASHED_ROWS, self.size[0])))
            digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def read(self, rows: range, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Some rows as the model takes them, (1, channels, n, width)."""
        part = self._rows(rows).permute(2, 0, 1)
        if part.dtype not in WHITE and not part.is_floating_point():
            raise ValueError(
                f"the image is of {part.dtype}; give uint8 or uint16, or floating-point numbers that are normalised"
            )
        normalised = part.to(device, dtype)
        if part.dtype in WHITE:
            mean, std = self._mean.to(normalised), self._std.to(normalised)
            normalised.div_(WHITE[part.dtype]).sub_(mean).div_(std)
        return normalised[None]

    def _rows(self, rows: range) -> Tensor:
        """Some rows as they are, (n, width, channels)."""
        if self._is_tensor:
            return self._image[:, rows.start : rows.stop].permute(1, 2, 0)
        return torch.from_numpy(np.array(self._image[rows.start : rows.stop]))
