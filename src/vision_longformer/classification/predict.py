"""What a classifier says about single images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data.images import ImageError, decode_image, image_files
from ..errors import check_at_least
from .export import open_classifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image, best first, with their probabilities."""

    file: str
    labels: tuple[str, ...]
    probabilities: tuple[float, ...]


def predict(
    checkpoint: str | Path,
    images: Sequence[str | Path],
    *,
    top: int = 5,
    size: int | tuple[int, int] | None = None,
    skip_bad_images: bool = False,
) -> list[Prediction]:
    """The ``top`` classes of each image, with the preprocessing of the checkpoint or exported file.

    A folder stands for the images inside. ``size`` is the (height, width) that the model sees of each image, or the
    side of a square; the one it was trained with if None. Images run one by one, so that memory does not grow
    with their number. An image that cannot be read is an error, or is skipped with a warning.
    """
    check_at_least("top", top, 1)
    files = image_files(images)
    model, preprocessing, _ = open_classifier(checkpoint, size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    transform = preprocessing.transform()
    predictions = []
    for file in files:
        try:
            image = decode_image(file)
        except ImageError as error:
            if not skip_bad_images:
                raise
            logger.warning("skipped: %s", error)
            continue
        with torch.no_grad():
            logits = model(transform(image)[None].to(device))[0]
        best = logits.double().softmax(0).sort(descending=True, stable=True)
        labels = tuple(preprocessing.classes[index] for index in best.indices[:top].tolist())
        predictions.append(Prediction(str(file), labels, tuple(best.values[:top].tolist())))
    return predictions
