"""What a classifier says about single images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data.images import ImageError, decode_image, image_files
from ..errors import check_at_least
from ..export.runtime import ExportedModel
from ..large.memory import Work, format_bytes, free_memory
from ..large.stream import refuse_streaming, stream
from ..models import VisionLongformer
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
    with their number; one that would not fit the free memory is streamed (:mod:`vision_longformer.large`). An image
    that cannot be read is an error, or is skipped with a warning.
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
        logits = _logits(model, transform(image), device)
        best = logits.double().softmax(0).sort(descending=True, stable=True)
        labels = tuple(preprocessing.classes[index] for index in best.indices[:top].tolist())
        predictions.append(Prediction(str(file), labels, tuple(best.values[:top].tolist())))
    return predictions


def _logits(model: VisionLongformer | ExportedModel, image: Tensor, device: torch.device) -> Tensor:
    """Of one input (C, H, W), streamed if the plain model would not fit the memory and can be streamed."""
    height, width = image.shape[-2:]
    if isinstance(model, VisionLongformer) and refuse_streaming(model.config, len(model.stages)) is None:
        work = Work(model.config, len(model.stages), (height, width), torch.float32, torch.float32)
        needed, free = work.plain_bytes(), free_memory(device)
        if needed > free:
            amounts = f"about {format_bytes(needed)}, but only {format_bytes(free)} is free"
            logger.info("%d×%d pixels at once would need %s: computing strip by strip", height, width, amounts)
            memory = min(free_memory(torch.device("cpu")), free + work.token_bytes())  # tokens are not on a GPU
            return stream(model, image, memory=memory).logits
    with torch.no_grad():
        return model(image[None].to(device))[0]
