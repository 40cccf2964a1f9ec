"""Large images in overlapping tiles, and objects that several tiles show put together again.

Two tiles show the same object if what they found has the same label and, cut to the strip that both tiles cover,
boxes of an IoU of at least ``SAME``. So a piece of an object is recognised by what it has in common with the whole one
or with its other piece. Of such a group the best whole one counts; if all are cut by the border of their tile, the
union of their boxes and masks does, with the best score.

What a detector finds in image files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from ..data.images import decode_image, image_files
from ..errors import check_at_least
from .dataset import image_tensor
from .detections import Box, Found, Patch, found_by_model

OVERLAP = 0.25
"""Part of a tile's side that the next tile shows as well; objects up to this size are whole in some tile."""

SAME = 0.5
TOUCHING = 2.0
"""Pixels from a tile's border within which a box is taken to be cut by it."""


@dataclass(frozen=True)
class Tile:
    """A part of an image: left, top, right, bottom."""

    left: int
    top: int
    right: int
    bottom: int

    def cuts(self, box: Box, height: int, width: int) -> bool:
        """Whether the object goes on beyond this tile, which the border of the whole image does not hide."""
        return (
            (self.left > 0 and box[0] < self.left + TOUCHING)
            or (self.top > 0 and box[1] < self.top + TOUCHING)
            or (self.right < width and box[2] > self.right - TOUCHING)
            or (self.bottom < height and box[3] > self.bottom - TOUCHING)
        )


def tiles(height: int, width: int, side: int) -> list[Tile]:
    """Tiles of at most ``side`` × ``side`` that cover the image, as evenly spaced as whole pixels allow."""
    rows, columns = _starts(height, side), _starts(width, side)
    return [Tile(left, top, min(left + side, width), min(top + side, height)) for top in rows for left in columns]


def _starts(length: int, side: int) -> list[int]:
    if length <= side:
        return [0]
    count = int(np.ceil((length - side) / (side * (1 - OVERLAP)))) + 1
    return [round(place) for place in np.linspace(0, length - side, count)]


def merge(found: Sequence[tuple[Tile, Sequence[Found]]], height: int, width: int) -> list[Found]:
    """What tiles of an image have found, in its coordinates, each object once, best first."""
    pieces = [(tile, one) for tile, objects in found for one in objects]
    merged = []
    for group in _groups(pieces):
        whole = [one for tile, one in group if not tile.cuts(one.box, height, width)]
        merged.append(max(whole, key=_score) if whole else _united([one for _, one in group]))
    return sorted(merged, key=_score, reverse=True)


def _groups(pieces: Sequence[tuple[Tile, Found]]) -> Iterator[list[tuple[Tile, Found]]]:
    """Pieces of the same object, also by way of a third tile's piece."""
    waiting = list(pieces)
    while waiting:
        group = [waiting.pop(0)]
        for member in group:  # grows meanwhile
            same = [other for other in waiting if _same(member, other)]
            waiting = [other for other in waiting if not any(other is one for one in same)]
            group += same
        yield group


def _same(one: tuple[Tile, Found], other: tuple[Tile, Found]) -> bool:
    (tile, found), (other_tile, other_found) = one, other
    if tile == other_tile or found.label != other_found.label:
        return False
    strip = _intersection(
        (tile.left, tile.top, tile.right, tile.bottom),
        (other_tile.left, other_tile.top, other_tile.right, other_tile.bottom),
    )
    return _iou(_intersection(found.box, strip), _intersection(other_found.box, strip)) >= SAME


def _intersection(one: Box, other: Box) -> Box:
    return max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _iou(one: Box, other: Box) -> float:
    common = _area(_intersection(one, other))
    return common / (_area(one) + _area(other) - common) if common else 0.0


def _united(group: Sequence[Found]) -> Found:
    best = max(group, key=_score)
    starts, ends = np.array([one.box[:2] for one in group]).min(0), np.array([one.box[2:] for one in group]).max(0)
    masks = [one.mask for one in group if one.mask is not None and one.mask.pixels.size]
    box = (float(starts[0]), float(starts[1]), float(ends[0]), float(ends[1]))
    return replace(best, box=box, mask=_joined(masks) if masks else best.mask)


def _joined(masks: Sequence[Patch]) -> Patch:
    """Pixels of any of the masks."""
    top, left = min(mask.top for mask in masks), min(mask.left for mask in masks)
    bottom = max(mask.top + mask.pixels.shape[0] for mask in masks)
    right = max(mask.left + mask.pixels.shape[1] for mask in masks)
    pixels = np.zeros((bottom - top, right - left), dtype=bool)
    for mask in masks:
        moved = Patch(mask.top - top, mask.left - left, mask.pixels)
        pixels |= moved.on(*pixels.shape).astype(bool)
    return Patch(top, left, pixels)


def _score(found: Found) -> float:
    return found.score or 0.0


SMALLEST_TILE = 64


@dataclass(frozen=True)
class Prediction:
    """An image file, its pixels, and what was found in it, best first."""

    file: str
    image: Image.Image
    objects: list[Found]


def predict(
    model: nn.Module, images: Sequence[str | Path], *, threshold: float = 0.5, tile: int | None = None
) -> Iterator[Prediction]:
    """Objects with a score of at least ``threshold`` in each image; a folder stands for the images inside.

    Images run one by one; with ``tile``, in overlapping squares of that many pixels, so that objects of large photos
    are not shrunk away, and memory does not grow with the photo.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must be between 0 and 1")
    if tile is not None:
        check_at_least("tile", tile, SMALLEST_TILE)
    for file in image_files(images):
        image = decode_image(file)
        yield Prediction(str(file), image, find_objects(model, image, threshold=threshold, tile=tile))


def find_objects(
    model: nn.Module, image: Image.Image, *, threshold: float = 0.5, tile: int | None = None
) -> list[Found]:
    """Objects in an RGB image, whole or in tiles."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    pixels = image_tensor(image).to(device)
    side = max(image.size) if tile is None else tile
    found = []
    for part in tiles(image.height, image.width, side):
        with torch.no_grad():
            output = model([pixels[:, part.top : part.bottom, part.left : part.right]])[0]
        found.append((part, [one.moved(part.top, part.left) for one in found_by_model(output, threshold)]))
    return merge(found, image.height, image.width)
