"""How large and how many the objects of a data set are, and the image size and anchors that suit them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from ..geometry import ceil_div
from .dataset import DetectionData

SAMPLED_IMAGES = 1000
"""Images looked at, evenly spaced, where there are more."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

SMALL_OBJECT = 24
"""Pixels that the side of an object at the lower tenth should have in a training image: three cells of stride 8."""

LEAST_SIDE, SIDE_STEP = 320, 32
"""Longer side below which images are not shrunk, and what longer sides are multiples of: the coarsest stride."""

ANCHOR_STRIDE = 8
"""Of the map with the smallest anchors."""


class ObjectStatistics(NamedTuple):
    """Of a data set, or of evenly spaced images of it.

    - ``counts``: objects by category's name and number of images with them, in the order of the categories.
    - ``image_sizes``: (n, 2) widths and heights; ``per_image``: (n,) objects; ``sides``: (objects,) geometric means of
      width and height, relative to the longer side of their image; ``ratios``: heights to widths.
    - ``empty``: images without objects, which the others leave out.
    """

    counts: dict[str, int]
    image_sizes: np.ndarray
    per_image: np.ndarray
    sides: np.ndarray
    ratios: np.ndarray
    empty: int = 0

    @property
    def longer_side(self) -> int:
        """Median of the images, in pixels."""
        return round(float(np.median(self.image_sizes.max(1))))

    @property
    def small_side(self) -> float:
        """Relative side that a tenth of the objects do not reach."""
        return float(np.quantile(self.sides, 0.1))

    def image_side(self, limit: int) -> int:
        """Longer side for training: small objects remain visible, nothing is enlarged, and ``limit`` is kept."""
        wanted = max(LEAST_SIDE, SMALL_OBJECT / self.small_side)
        side = min(wanted, limit, max(self.longer_side, 2 * SIDE_STEP))
        return ceil_div(round(side), SIDE_STEP) * SIDE_STEP

    def anchor_scale(self, image_side: int) -> float:
        """Side in cells of the smallest anchor, as large as small objects are in images of this longer side."""
        cells = self.small_side * image_side / ANCHOR_STRIDE
        return min(max(round(2 * cells) / 2, 1.0), 8.0)

    def too_small(self, image_side: int) -> str:
        """What is too small in images of this longer side and what to do; empty if they are as large as suits them."""
        suitable = self.image_side(self.longer_side)
        if suitable <= image_side:
            return ""
        return (
            f"a tenth have sides of {self.small_side * image_side:.0f} pixels or less in images of {image_side}; cut "
            f"the images into tiles, or train with --detector-options '{{\"min_size\": [{suitable}]}}'"
        )

    def rows(self) -> dict[str, str]:
        """For people: what there is, by name."""
        widths, heights = self.image_sizes.T
        sides = ", ".join(f"{100 * value:.1f}" for value in np.quantile(self.sides, QUANTILES))
        empty = f"; {self.empty} image{'s have' if self.empty > 1 else ' has'} none" if self.empty else ""
        return {
            "image sizes": f"{_range(widths)} × {_range(heights)} pixels",
            "objects in an image": f"{_range(self.per_image)}, median {np.median(self.per_image):g}{empty}",
            "sides of objects": f"{sides} % of the image's longer side (5, 25, 50, 75, 95 % of objects are smaller)",
            "height to width": f"median {np.median(self.ratios):.2f}",
        }


def _range(values: np.ndarray) -> str:
    return span(int(values.min()), int(values.max()))


def span(low: int, high: int) -> str:
    """``320 to 384``, or ``384`` where both are the same."""
    return str(low) if low == high else f"{low} to {high}"


def missing_categories(data: DetectionData) -> list[str]:
    """Names of the categories that no image shows."""
    there = {label for index in range(len(data)) for label in data.shapes(index)[3]}
    return [category.name for label, category in enumerate(data.categories, 1) if label not in there]


def object_statistics(data: DetectionData) -> ObjectStatistics:
    """Of the images with objects; crowds are not counted."""
    indices = data.with_objects()
    step = ceil_div(len(indices), SAMPLED_IMAGES)
    shapes = [data.shapes(index) for index in indices[::step]]
    sizes = np.array([(width, height) for width, height, _, _ in shapes], dtype=float)
    boxes = np.concatenate([boxes for _, _, boxes, _ in shapes])
    widths, heights = (boxes[:, 2:] - boxes[:, :2]).T
    per_image = np.array([len(boxes) for _, _, boxes, _ in shapes])
    found = Counter(label for _, _, _, labels in shapes for label in labels)
    return ObjectStatistics(
        counts={category.name: found[label] for label, category in enumerate(data.categories, 1)},
        image_sizes=sizes,
        per_image=per_image,
        sides=np.sqrt(widths * heights) / np.repeat(sizes.max(1), per_image),
        ratios=heights / widths,
        empty=len(data) - len(indices),
    )
