"""The built-in detection data, "garments in the wild": made on the fly, to try detection without a download.

A synthetic composition of real images: Fashion-MNIST's garments cut out of their black background, rotated, enlarged
and tinted, and pasted onto the shipped photos one over the other. Garments are 28 to 112 pixels wide, in images of up
to 1600: small objects in large images. Garments and parts of photos of the validation split are never in the training
split.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter

from ..data.images import decode_image
from ..data.randomness import derive_seed
from ..data.sources import EVALUATION, FASHION_MNIST_CLASSES, TRAINING, fashion_mnist
from ..errors import check_choice
from .detections import Category, Target

NAME = "garments"
TRAINING_IMAGES, VALIDATION_IMAGES = 2000, 200
SIDES = 512, 1600
"""Smallest and largest longer side, unless one is asked for."""

SMALLEST_SIDE = 64
"""Longer side below which garments would fill the images."""

OBJECTS = 3, 12
"""Fewest and most garments of an image."""

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

    @property
    def names(self) -> Sequence[str]:
        return [str(number) for number in range(1, 1 + len(self))]

    def with_objects(self) -> Sequence[int]:
        return range(len(self))

    def shapes(self, index: int) -> tuple[int, int, np.ndarray, list[int]]:
        image, target = self.read(index)
        return image.width, image.height, target.boxes.numpy(), target.labels.tolist()

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        random = np.random.default_rng(derive_seed("garments", int(self.training), index, 0 if seed is None else seed))
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
    if given and not (side.isascii() and side.isdigit() and int(side) >= SMALLEST_SIDE):
        raise ValueError(
            f"{data!r} should be {NAME}, or {NAME}:SIDE with at least {SMALLEST_SIDE} pixels, as {NAME}:320"
        )
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


# Backgrounds: parts of photos

TRAINING_PART = 0.75
"""Of a photo's width, from the left; the rest is for validation, so that no pixel is in both."""

ASPECTS = (4 / 3, 3 / 4, 1.0)
"""Width to height of the backgrounds."""


@lru_cache(maxsize=2)
def photo_parts(training: bool) -> tuple[Image.Image, ...]:
    """Each photo's part for training or for validation."""
    folder = files("vision_longformer") / "assets" / "photos"
    photos = sorted((file for file in folder.iterdir() if file.name.endswith(".jpg")), key=lambda file: file.name)
    parts = []
    for photo in photos:
        image = decode_image(photo.read_bytes(), photo.name)
        border = round(TRAINING_PART * image.width)
        parts.append(image.crop((0, 0, border, image.height) if training else (border, 0, *image.size)))
    return tuple(parts)


def random_background(training: bool, longer: int, random: np.random.Generator) -> np.ndarray:
    """A random crop of a random photo's part, flipped half of the time: (h, w, 3), uint8, ``longer`` at most."""
    parts = photo_parts(training)
    part = parts[random.integers(len(parts))]
    aspect = ASPECTS[random.integers(len(ASPECTS))]
    largest = min(part.width / aspect, part.height)
    height = random.uniform(0.5, 1) * largest
    width = height * aspect
    left, top = random.uniform(0, part.width - width), random.uniform(0, part.height - height)
    scale = longer / max(width, height)
    size = round(width * scale), round(height * scale)
    crop = part.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + width, top + height), reducing_gap=1)
    pixels = np.array(crop)
    return np.ascontiguousarray(pixels[:, ::-1]) if random.random() < 0.5 else pixels


# Sprites: garments without their background

MARGIN = 3
"""Empty pixels around a garment of 28×28, so that its edges are soft, too."""

SURE = 40
"""Grey level from which a pixel is garment, however thin; fainter ones are only where they fill a square of 3×3."""

OPENWORK = tuple(FASHION_MNIST_CLASSES.index(name) for name in ("Sandal", "Bag"))
"""Classes through which one can see: straps and handles. Holes in others are black cloth."""


@dataclass(frozen=True)
class Cutouts:
    """N garments: grey levels and masks (N, side, side), uint8 (masks are 0 or 255), and their classes (N,)."""

    grey: np.ndarray
    masks: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True)
class Sprite:
    """A garment to be painted: colours (h, w, 3) and opacity (h, w) in 0 to 1, float32."""

    colour: np.ndarray
    opacity: np.ndarray
    label: int

    @property
    def mask(self) -> np.ndarray:
        """(h, w) bool."""
        return self.opacity > 0.5


@lru_cache(maxsize=2)
def cutouts(training: bool) -> Cutouts:
    """The garments of Fashion-MNIST's training images, or those of its test images."""
    source = fashion_mnist("train" if training else "test")
    grey = np.pad(source.images, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)))
    masks = _masks(grey, np.isin(source.labels, OPENWORK))
    return Cutouts(grey, masks.astype(np.uint8) * 255, source.labels)


def _masks(grey: np.ndarray, openwork: np.ndarray) -> np.ndarray:
    """Pixels above 0, without faint lines that stand alone, and with holes filled that are none."""
    masks = (grey >= SURE) | _opened(grey > 0, 3)
    holes = ~masks & ~_outside(masks)
    holes[openwork] &= ~_opened(holes[openwork], 2)
    return masks | holes


def _opened(masks: np.ndarray, side: int) -> np.ndarray:
    """Pixels of (N, h, w) that belong to a whole square of ``side`` × ``side``."""
    whole = np.lib.stride_tricks.sliding_window_view(masks, (side, side), axis=(1, 2)).all((3, 4))
    opened = np.zeros_like(masks)
    rows, columns = whole.shape[1:]
    for down in range(side):
        for right in range(side):
            opened[:, down : down + rows, right : right + columns] |= whole
    return opened


def _outside(masks: np.ndarray) -> np.ndarray:
    """Pixels of (N, h, w) that can be reached from the first corner without crossing a mask."""
    free = ~masks
    reached = np.zeros_like(masks)
    reached[:, 0, 0] = True
    before = 0
    while (count := int(reached.sum())) != before:
        before = count
        for axis in (1, 2):
            for _ in range(2):
                _spread(np.moveaxis(reached, axis, 0), np.moveaxis(free, axis, 0))
                reached, free = np.flip(reached, axis), np.flip(free, axis)
    return reached


def _spread(reached: np.ndarray, free: np.ndarray) -> None:
    """Carry ``reached`` along the first axis, in place, as far as it is ``free``."""
    for here in range(1, len(reached)):
        reached[here] |= reached[here - 1] & free[here]


def random_sprite(garments: Cutouts, random: np.random.Generator, largest: float) -> Sprite:
    """A random garment, enlarged 1 to ``largest`` times, rotated by up to 30°, flipped half of the time, and tinted."""
    index = random.integers(len(garments.classes))
    scale, angle = random.uniform(1, largest), math.radians(random.uniform(-30, 30))
    mirror = -1 if random.random() < 0.5 else 1
    both = (Image.fromarray(array[index]) for array in (garments.grey, garments.masks))
    rotated = np.asarray(_rotated(Image.merge("LA", tuple(both)), scale, angle, mirror), dtype=np.float32) / 255
    base = np.array(colorsys.hsv_to_rgb(random.random(), random.uniform(0.1, 0.85), random.uniform(0.55, 1)))
    shade = 0.2 + 0.8 * rotated[..., :1]
    opacity = np.clip((rotated[..., 1] - 0.5) * scale + 0.5, 0, 1)
    return Sprite(shade * base.astype(np.float32), opacity, int(garments.classes[index]) + 1)


def _rotated(image: Image.Image, scale: float, angle: float, mirror: int) -> Image.Image:
    """The image (with opacity) enlarged and rotated, on a canvas that holds it and a margin."""
    cos, sin = math.cos(angle), math.sin(angle)
    side = math.ceil(image.width * scale * (abs(cos) + abs(sin)))
    rows = ((mirror * cos / scale, mirror * sin / scale), (-sin / scale, cos / scale))
    inverse = [value for a, b in rows for value in (a, b, image.width / 2 - (a + b) * side / 2)]
    rotated = image.transform((side, side), Image.Transform.AFFINE, inverse, Image.Resampling.BICUBIC)
    left, top, right, bottom = rotated.getchannel("A").getbbox() or (0, 0, side, side)
    margin = round(2 * scale)
    return rotated.crop((left - margin, top - margin, right + margin, bottom + margin))


# Sprites on a background

HIDDEN = 0.8
"""Hidden part of an object beyond which it is left out altogether."""

CANDIDATES = 3
"""Random places of which an object gets the one farthest from those before it: overlaps happen, heaps do not."""

SHADOW = 0.35
"""Darkness of an object's shadow."""


class Placed(NamedTuple):
    """A sprite and its canvas's left upper corner, which may lie outside the image."""

    sprite: Sprite
    top: int
    left: int

    def windows(self, height: int, width: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Where it is in an image, and what part of its canvas that is."""
        rows, columns = self.sprite.opacity.shape
        top, left = max(self.top, 0), max(self.left, 0)
        bottom, right = min(self.top + rows, height), min(self.left + columns, width)
        image = slice(top, bottom), slice(left, right)
        return image, (slice(top - self.top, bottom - self.top), slice(left - self.left, right - self.left))


def place(sprites: Sequence[Sprite], height: int, width: int, random: np.random.Generator) -> list[Placed]:
    """Random places; centres are inside the image, and so objects may be cut by its border."""
    placed: list[Placed] = []
    centres = np.zeros((0, 2))
    for sprite in sprites:
        candidates = random.uniform((0, 0), (height, width), (CANDIDATES, 2))
        if placed:
            distances = np.linalg.norm(candidates[:, None] - centres[None], axis=2).min(1)
            candidates = candidates[distances.argmax()][None]
        centres = np.concatenate((centres, candidates[:1]))
        corner = candidates[0] - np.array(sprite.opacity.shape) / 2
        placed.append(Placed(sprite, *corner.round().astype(int).tolist()))
    return placed


def visible(placed: Sequence[Placed], height: int, width: int) -> tuple[list[Placed], np.ndarray]:
    """The objects that can be seen well enough, and what is seen of each: masks (n, height, width), bool."""
    remaining, owners = visible_owners(placed, height, width)
    return remaining, owners == np.arange(1, len(remaining) + 1)[:, None, None]


def visible_owners(placed: Sequence[Placed], height: int, width: int) -> tuple[list[Placed], np.ndarray]:
    """The objects that can be seen well enough, and for each pixel the number of the one on top, as of :func:`_owners`.

    Later ones cover earlier ones; leaving out those that are hidden can only show more of the others.
    """
    owners = _owners(placed, height, width)
    seen = np.bincount(owners.ravel(), minlength=len(placed) + 1)[1:]
    remaining = [
        one
        for one, pixels in zip(placed, seen, strict=True)
        if pixels >= (1 - HIDDEN) * np.count_nonzero(one.sprite.mask)
    ]
    return remaining, _owners(remaining, height, width) if len(remaining) < len(placed) else owners


def _owners(placed: Sequence[Placed], height: int, width: int) -> np.ndarray:
    """For each pixel (height, width) the number of the object on top, from 1; 0 for none."""
    owners = np.zeros((height, width), dtype=np.int16)
    for number, one in enumerate(placed, 1):
        image, canvas = one.windows(height, width)
        owners[image][one.sprite.mask[canvas]] = number
    return owners


def paint(background: np.ndarray, placed: Sequence[Placed]) -> np.ndarray:
    """The objects over the background (h, w, 3) uint8, each with a soft shadow below it."""
    painted = background.astype(np.float32) / 255
    for one in placed:
        image, canvas = one.windows(*background.shape[:2])
        opacity = one.sprite.opacity[canvas][..., None]
        painted[image] *= 1 - SHADOW * _shadow(one.sprite.opacity)[canvas][..., None]
        painted[image] += opacity * (one.sprite.colour[canvas] - painted[image])
    return (painted * 255).round().clip(0, 255).astype(np.uint8)


def _shadow(opacity: np.ndarray) -> np.ndarray:
    """Softened, and shifted downwards."""
    width = sum(opacity.shape) / 80
    soft = Image.fromarray((opacity * 255).astype(np.uint8)).filter(ImageFilter.BoxBlur(width))
    return np.roll(np.asarray(soft, dtype=np.float32) / 255, round(width), axis=0)
