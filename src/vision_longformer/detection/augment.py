"""Augmentation of an image together with its objects; what is drawn comes from the generator that it is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from random import Random

import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional

from .detections import Target

VISIBLE = 0.3
"""Part of an object's box that a crop must show; objects of which less is left are not learned there."""

PADDING = (124, 116, 104)
"""ImageNet's mean colour, around images that are made smaller."""


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training image; the defaults flip it half of the time, and do nothing else.

    - ``hflip``: probability of a horizontal flip.
    - ``scale_jitter``: smallest and largest factor by which objects change their size in an image that stays as large.
    - ``color_jitter``: brightness, contrast and saturation each change by a factor of up to 1 ± this.
    """

    hflip: float = 0.5
    scale_jitter: tuple[float, float] = (1.0, 1.0)
    color_jitter: float = 0.0

    def __call__(self, image: Image.Image, target: Target, drawn: Random) -> tuple[Image.Image, Target]:
        if drawn.random() < self.hflip:
            image, target = flip(image, target)
        if self.scale_jitter != (1.0, 1.0):
            low, high = map(log, self.scale_jitter)
            scale = exp(drawn.uniform(low, high))
            image, target = zoom(image, target, scale, drawn.random(), drawn.random())
        if self.color_jitter:
            for adjust in (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation):
                image = adjust(image, 1 + drawn.uniform(-self.color_jitter, self.color_jitter))
        return image, target


def flip(image: Image.Image, target: Target) -> tuple[Image.Image, Target]:
    """Left and right exchanged, in the image and in its objects."""
    left, top, right, bottom = target.boxes.unbind(1)
    boxes = torch.stack((image.width - right, top, image.width - left, bottom), 1)
    masks = None if target.masks is None else target.masks.flip(2)
    return ImageOps.mirror(image), replace(target, boxes=boxes, masks=masks)


def zoom(image: Image.Image, target: Target, scale: float, x: float, y: float) -> tuple[Image.Image, Target]:
    """A frame of 1 / ``scale`` times the image's size: a part of it, or all of it with a border around.

    ``x`` and ``y`` from 0 to 1 say where: at 0 the frame starts with the image, at 1 it ends with it. The detector
    brings frames to one size, so objects become ``scale`` times as large. A frame without objects is not taken.
    """
    width, height = max(1, round(image.width / scale)), max(1, round(image.height / scale))
    left, top = round(x * (image.width - width)), round(y * (image.height - height))
    cut = crop_target(target, left, top, width, height)
    if not (~cut.crowd).any():
        return image, target
    frame = Image.new("RGB", (width, height), PADDING)
    frame.paste(image, (-left, -top))
    return frame, cut


def crop_target(target: Target, left: int, top: int, width: int, height: int) -> Target:
    """The objects in a frame of an image, which may go beyond it, with their boxes and masks cut at its borders."""
    moved = target.boxes - torch.tensor([left, top, left, top])
    boxes = moved.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    sides = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0)
    whole = moved[:, 2:] - moved[:, :2]
    kept = (sides >= 1).all(1) & (sides.prod(1) >= VISIBLE * whole.prod(1))
    masks = target.masks
    if masks is not None:
        masks = functional.crop(masks[kept], top, left, height, width)
    return replace(
        target,
        boxes=boxes[kept],
        labels=target.labels[kept],
        masks=masks,
        crowd=target.crowd[kept],
        area=target.area[kept],
    )
