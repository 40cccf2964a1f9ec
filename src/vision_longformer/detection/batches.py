"""Batches of images of unlike sizes, without padding that anything would attend to.

torchvision pads the images of a batch to one size. Attention reaches into that padding, and the result of an image
would depend on the other images of its batch. Here the padded batch is never made: the backbone gets the images
themselves and brings only its maps to a common size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection.transform import GeneralizedRCNNTransform


class UnlikeImages(NamedTuple):
    """Images (3, h, w) of several sizes, in place of the padded batch of ``shape`` (B, 3, H, W).

    Each h and w is a multiple of the backbone's stride, H and W are the largest.
    """

    images: list[Tensor]
    shape: tuple[int, int, int, int]

    def padded(self) -> Tensor:
        """The padded batch after all."""
        return torch.stack([pad_to(image, self.shape[2:]) for image in self.images])


class ImageTransform(GeneralizedRCNNTransform):
    """torchvision's resizing and normalising, without its batching."""

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> UnlikeImages:
        images = [pad_to(image, _multiples(image.shape[1:], size_divisible)) for image in images]
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        return UnlikeImages(images, (len(images), images[0].shape[0], height, width))


def _multiples(size: Iterable[int], of: int) -> list[int]:
    return [-(-side // of) * of for side in size]


def pad_to(image: Tensor, size: Iterable[int]) -> Tensor:
    """Zeros below and to the right of a map (…, h, w) up to ``size``."""
    height, width = size
    return F.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]))


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of equal keys, in order of their first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())
