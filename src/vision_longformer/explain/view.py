"""Where a pixel of an image file is in what the model sees of it: the centre of the image, resized."""

from __future__ import annotations

import math
from typing import NamedTuple


class View(NamedTuple):
    """A pixel (x, y) of the file is at ``(x + 0.5) * scale - left``, ``(y + 0.5) * scale - top`` of the input.

    ``size`` is the input's (height, width).
    """

    scale: float
    left: float
    top: float
    size: tuple[int, int]

    def inside(self, point: tuple[float, float]) -> tuple[float, float]:
        """A pixel (x, y) of the file in the input's pixels."""
        x, y = point
        return (x + 0.5) * self.scale - self.left, (y + 0.5) * self.scale - self.top

    def seen(self, length: int, axis: int) -> range:
        """Which pixels of the file along its width (axis 0) or height (1), ``length`` long, the input shows."""
        before, side = (self.left, self.top)[axis], self.size[1 - axis]
        first, last = math.ceil(before / self.scale - 0.5), math.ceil((before + side) / self.scale - 0.5)
        return range(max(0, first), min(length, last))


def seen_part(image: tuple[int, int], size: tuple[int, int], crop_pct: float) -> View:
    """The view of an image of (width, height) for an input of ``size`` (height, width).

    As the preprocessing does it: resize so that the image just covers ``size / crop_pct``, then crop the centre.
    """
    width, height = image
    rows, columns = size
    scale = max(math.floor(rows / crop_pct) / height, math.floor(columns / crop_pct) / width)
    return View(scale, (width * scale - columns) / 2, (height * scale - rows) / 2, size)


def check_point(point: tuple[int, int] | None, image: tuple[int, int], view: View) -> tuple[float, float]:
    """A pixel of the file, its middle if None, in the input's pixels; one that the model does not see is refused."""
    columns, rows = (view.seen(length, axis) for axis, length in enumerate(image))
    if point is None:
        point = image[0] // 2, image[1] // 2
    elif point[0] not in columns or point[1] not in rows:
        raise ValueError(
            f"point is {point[0]},{point[1]}; of this image of {image[0]}×{image[1]} pixels the model sees "
            f"x from {columns.start} to {columns.stop - 1} and y from {rows.start} to {rows.stop - 1}"
        )
    return view.inside(point)
