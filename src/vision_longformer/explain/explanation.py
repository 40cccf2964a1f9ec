"""What a classifier attends to in an image file, ready to be drawn; and where a pixel of the file is in its input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..checkpoint.native import DETECTOR, read_info
from ..classification.model import Classifier, load_classifier
from ..classification.predict import Prediction
from ..data.images import decode_image
from ..errors import CheckpointError
from ..export.runtime import is_exported
from .layers import Layer, capture
from .weights import Progress, Rollout, rollout

TOP_CLASSES = 3
"""Predicted classes that are named."""

MOST_DETAIL = 4
"""How many times finer than the model's input an image is drawn, if its file is that fine."""

LONGEST_SIDE = 900
"""Pixels of the longer side beyond which an image is not drawn finer."""


@dataclass(frozen=True)
class Explanation:
    """The layers of a model that looked at an image, and what follows from them.

    - ``image``: what the model saw, perhaps in finer pixels; ``size``: (height, width) of the model's input.
    - ``point``: the chosen pixel (x, y) of that input.
    """

    prediction: Prediction
    image: Image.Image
    size: tuple[int, int]
    point: tuple[float, float]
    layers: tuple[Layer, ...]
    rollout: Rollout

    @property
    def stages(self) -> list[list[Layer]]:
        """The layers of each stage."""
        count = self.layers[-1].stage
        return [[layer for layer in self.layers if layer.stage == stage] for stage in range(1, count + 1)]


def explain(
    checkpoint: str | Path,
    image: str | Path,
    *,
    point: tuple[int, int] | None = None,
    size: int | tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Look at an image with a classifier and record what its attention did.

    ``point`` is a pixel (x, y) of the image file, its middle if None. ``size`` is the (height, width) that the model
    sees, or the side of a square; its own if None. ``progress`` is called with the number of layers done and of all
    layers.
    """
    decoded = decode_image(image)
    model, preprocessing, _ = _load(checkpoint, size)
    view = centre_view(decoded.size, preprocessing.size, preprocessing.crop_pct)
    chosen = input_point(point, decoded.size, view)
    pixels = preprocessing.transform()(decoded)[None]
    layers = capture(model, pixels)
    with torch.no_grad():
        probabilities = model(pixels)[0].double().softmax(0)
    finer = preprocessing.transform(_drawn_size(preprocessing.size, view))(decoded)
    return Explanation(
        _prediction(str(image), probabilities, preprocessing.classes),
        _to_image(preprocessing.denormalise(finer[None])[0]),
        preprocessing.size,
        chosen,
        tuple(layers),
        rollout(layers, model.config, progress),
    )


def _load(checkpoint: str | Path, size: int | tuple[int, int] | None) -> Classifier:
    if is_exported(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is an exported file, whose attention cannot be seen; give the run directory or the "
            ".safetensors checkpoint that it was exported from"
        )
    try:
        return load_classifier(checkpoint, size)
    except CheckpointError as error:
        if _is_detector(checkpoint):
            raise CheckpointError(
                f"{checkpoint} is a detector, and only classifiers can be explained; for the attention of its "
                "backbone, use capture(detector_backbone(load_detector(...)), images) of vision_longformer.explain in "
                "Python"
            ) from error
        raise


def _is_detector(checkpoint: str | Path) -> bool:
    try:
        read_info(checkpoint, DETECTOR)
    except CheckpointError:
        return False
    return True


def _prediction(file: str, probabilities: Tensor, classes: Sequence[str]) -> Prediction:
    best = probabilities.sort(descending=True, stable=True)
    labels = tuple(classes[index] for index in best.indices[:TOP_CLASSES].tolist())
    return Prediction(file, labels, tuple(best.values[:TOP_CLASSES].tolist()))


def _drawn_size(size: tuple[int, int], view: View) -> tuple[int, int]:
    """A multiple of the model's input, as fine as the file is, within limits."""
    finer = max(1, min(MOST_DETAIL, round(1 / view.scale), LONGEST_SIDE // max(size)))
    return size[0] * finer, size[1] * finer


def _to_image(pixels: Tensor) -> Image.Image:
    """uint8 (1 or 3, H, W) as an RGB image."""
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())


class View(NamedTuple):
    """A pixel (x, y) of the file is at ``(x + 0.5) * scale - left``, ``(y + 0.5) * scale - top`` of the input.

    ``size`` is the input's (height, width).
    """

    scale: float
    left: float
    top: float
    size: tuple[int, int]

    def to_input(self, point: tuple[float, float]) -> tuple[float, float]:
        """A pixel (x, y) of the file in the input's pixels."""
        x, y = point
        return (x + 0.5) * self.scale - self.left, (y + 0.5) * self.scale - self.top

    def visible(self, length: int, axis: int) -> range:
        """Which pixels of the file along its width (axis 0) or height (1), ``length`` long, the input shows."""
        before, side = (self.left, self.top)[axis], self.size[1 - axis]
        first, last = math.ceil(before / self.scale - 0.5), math.ceil((before + side) / self.scale - 0.5)
        return range(max(0, first), min(length, last))


def centre_view(image: tuple[int, int], size: tuple[int, int], crop_pct: float) -> View:
    """The view of an image of (width, height) for an input of ``size`` (height, width).

    As the preprocessing does it: resize so that the image just covers ``size / crop_pct``, then crop the centre.
    """
    width, height = image
    rows, columns = size
    scale = max(math.floor(rows / crop_pct) / height, math.floor(columns / crop_pct) / width)
    return View(scale, (width * scale - columns) / 2, (height * scale - rows) / 2, size)


def input_point(point: tuple[int, int] | None, image: tuple[int, int], view: View) -> tuple[float, float]:
    """A pixel of the file, its middle if None, in the input's pixels; one that the model does not see is refused."""
    columns, rows = (view.visible(length, axis) for axis, length in enumerate(image))
    if point is None:
        point = image[0] // 2, image[1] // 2
    elif point[0] not in columns or point[1] not in rows:
        raise ValueError(
            f"point is {point[0]},{point[1]}; of this image of {image[0]}×{image[1]} pixels the model sees "
            f"x from {columns.start} to {columns.stop - 1} and y from {rows.start} to {rows.stop - 1}"
        )
    return view.to_input(point)
