"""The built-in detection data, "garments in the wild".

A synthetic composition of real images: Fashion-MNIST's garments pasted onto photos, so that the task can be tried
without a download. Garments are 28 to 112 pixels wide, in images of up to 1600: small objects in large images. What is
shown in validation, garments and parts of photos, is never shown in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from ..classification.data.arrays import FASHION_MNIST_CLASSES
from ..classification.data.splits import EVALUATION, TRAINING
from ..errors import check_choice
from ..training.randomness import derive
from .composition import paint, place, visible
from .cutouts import cutouts, random_sprite
from .dataset import Category, Target
from .photos import random_background

NAME = "garments"
ABOUT = "a synthetic composition of real images"
"""What is to be said wherever such images are shown."""

TRAINING_IMAGES, VALIDATION_IMAGES = 2000, 200
SIDES = 512, 1600
"""Smallest and largest longer side, unless one is asked for."""

SMALLEST = 64
"""Longer side below which garments would fill the images."""

OBJECTS = 3, 12
LARGEST_SCALE = 4.0


class Garments:
    """:class:`~.dataset.DetectionData` made on the fly: an image is a function of split, number and seed alone."""

    categories = tuple(Category(number, name) for number, name in enumerate(FASHION_MNIST_CLASSES, 1))
    has_masks = True

    def __init__(self, training: bool, side: int | None = None) -> None:
        self.training = training
        self.side = side

    def __len__(self) -> int:
        return TRAINING_IMAGES if self.training else VALIDATION_IMAGES

    def with_objects(self) -> Sequence[int]:
        return range(len(self))

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        random = np.random.default_rng(derive("garments", int(self.training), index, 0 if seed is None else seed))
        longer = int(random.integers(SIDES[0], SIDES[1] + 1)) if self.side is None else self.side
        background = random_background(self.training, longer, random)
        height, width = background.shape[:2]
        garments = cutouts(self.training)
        count = int(random.integers(OBJECTS[0], OBJECTS[1] + 1))
        sprites = [random_sprite(garments, random, LARGEST_SCALE) for _ in range(count)]
        placed, masks = visible(place(sprites, height, width, random), height, width)
        labels = [one.sprite.label for one in placed]
        return Image.fromarray(paint(background, placed)), _target(index + 1, masks, labels)


def open_garments(data: str, split: str) -> Garments:
    """``garments``, or ``garments:SIDE`` for images whose longer side is SIDE pixels."""
    check_choice("split", split, TRAINING + EVALUATION)
    _, given, side = data.partition(":")
    if given and not (side.isascii() and side.isdigit() and int(side) >= SMALLEST):
        raise ValueError(f"{data!r} should be {NAME}, or {NAME}:SIDE with at least {SMALLEST} pixels, as {NAME}:320")
    return Garments(split in TRAINING, int(side) if given else None)


def _target(image_id: int, masks: np.ndarray, labels: Sequence[int]) -> Target:
    """From masks (n, h, w), none of them empty."""
    return Target(
        image_id=image_id,
        boxes=torch.tensor([_box(mask) for mask in masks], dtype=torch.float32).view(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
        masks=torch.from_numpy(masks),
        crowd=torch.zeros(len(labels), dtype=torch.bool),
        area=torch.from_numpy(masks.sum((1, 2), dtype=np.float32)),
    )


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
