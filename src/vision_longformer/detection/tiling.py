"""Large images in overlapping tiles, and objects that several tiles show put together again.

Two tiles show the same object if what they found has the same label and, cut to the strip that both tiles cover,
boxes of an IoU of at least ``SAME``. So a piece of an object is recognised by what it has in common with the whole one
or with its other piece. Of such a group the best whole one counts; if all are cut by the border of their tile, the
union of their boxes and masks does, with the best score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .found import Box, Found, Patch

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
