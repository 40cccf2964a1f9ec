"""Fashion-MNIST's garments cut out of their black background, and turned, enlarged and tinted."""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from ..classification.data.arrays import FASHION_MNIST_CLASSES, fashion_mnist

MARGIN = 3
"""Empty pixels around a garment of 28×28, so that its edges are soft, too."""

SURE = 40
"""Grey level from which a pixel is garment, however thin; fainter ones are in squares of 3×3, but not in a halo."""

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
    """A random garment, enlarged 1 to ``largest`` times, turned by up to 30°, mirrored half of the time, and tinted."""
    index = random.integers(len(garments.classes))
    scale, angle = random.uniform(1, largest), math.radians(random.uniform(-30, 30))
    mirror = -1 if random.random() < 0.5 else 1
    both = (Image.fromarray(array[index]) for array in (garments.grey, garments.masks))
    turned = np.asarray(_turned(Image.merge("LA", tuple(both)), scale, angle, mirror), dtype=np.float32) / 255
    base = np.array(colorsys.hsv_to_rgb(random.random(), random.uniform(0.1, 0.85), random.uniform(0.55, 1)))
    shade = 0.2 + 0.8 * turned[..., :1]
    opacity = np.clip((turned[..., 1] - 0.5) * scale + 0.5, 0, 1)
    return Sprite(shade * base.astype(np.float32), opacity, int(garments.classes[index]) + 1)


def _turned(image: Image.Image, scale: float, angle: float, mirror: int) -> Image.Image:
    """The image (with opacity) enlarged and turned, on a canvas that holds it and a margin."""
    cos, sin = math.cos(angle), math.sin(angle)
    side = math.ceil(image.width * scale * (abs(cos) + abs(sin)))
    rows = ((mirror * cos / scale, mirror * sin / scale), (-sin / scale, cos / scale))
    inverse = [value for a, b in rows for value in (a, b, image.width / 2 - (a + b) * side / 2)]
    turned = image.transform((side, side), Image.Transform.AFFINE, inverse, Image.Resampling.BICUBIC)
    left, top, right, bottom = turned.getchannel("A").getbbox() or (0, 0, side, side)
    margin = round(2 * scale)
    return turned.crop((left - margin, top - margin, right + margin, bottom + margin))
