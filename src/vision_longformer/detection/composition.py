"""Cut-outs painted onto a background, one over the other, with what remains visible of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from .cutouts import Sprite

HIDDEN = 0.8
"""Part of an object beyond which, being hidden, it is left out altogether."""

CANDIDATES = 3
"""Random places of which the one farthest from the objects before is taken: overlaps happen, heaps do not."""

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
    """The objects that can be seen well enough, and what is seen of each: masks (n, height, width), bool.

    Later ones cover earlier ones; leaving out those that are hidden can only show more of the others.
    """
    owners = _owners(placed, height, width)
    seen = np.bincount(owners.ravel(), minlength=len(placed) + 1)[1:]
    kept = [
        one
        for one, pixels in zip(placed, seen, strict=True)
        if pixels >= (1 - HIDDEN) * np.count_nonzero(one.sprite.mask)
    ]
    if len(kept) < len(placed):
        owners = _owners(kept, height, width)
    return kept, owners == np.arange(1, len(kept) + 1)[:, None, None]


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
