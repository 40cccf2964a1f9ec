"""The export of whole detectors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet

from ..config import size_pair
from ..detection.batches import ImageTransform
from ..detection.photos import photo_parts
from ..detection.transforms import image_tensor
from ..model import VisionLongformer
from .checked import Exported, Tell, export_checked
from .detector_graphs import DetectorGraph, MaskRCNNGraph, RetinaNetGraph
from .metadata import file_metadata

COMPARED = 2
"""Photos on which a file is compared with its detector."""

NOISE = 1e-5
"""Of the pixels, many times what float32 rounds off: what is found in a photo with and without it is well decided."""


def export_detector(
    model: nn.Module,
    path: str | Path,
    *,
    format: str = "onnx",
    size: int | tuple[int, int] | None = None,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> Exported:
    """Write a detector as one ``.onnx`` or ``.pt2`` file, and compare what both find in photos.

    The file takes one float32 image (3, height, width) with values from 0 to 1 and gives what
    :class:`~.detector_graphs.DetectorGraph` says. Images of other sizes are to be resized to fit, and padded at the
    bottom and on the right with the colour that the metadata name ``padding``. The model itself is left as it is.

    Args:
        model: a detector of ``build_detector``.
        path: where to write; the name must end in .onnx or .pt2.
        format: onnx, for onnxruntime and others, or pt2, for ``torch.export.load``.
        size: height and width of the image; a square of the model's ``min_size`` if None.
        info: further JSON data for the file's metadata, such as the categories.
        overwrite: replace an existing file.
        tell: is told of progress.
    """
    if not isinstance(model, RetinaNet | MaskRCNN):
        raise ValueError(f"a {type(model).__name__} is no detector of build_detector, and cannot be exported as one")
    config = model.config
    own = size_pair(size or config.min_size[-1])
    reference = _plain_copy(model)
    graph = (RetinaNetGraph if config.kind == "retinanet" else MaskRCNNGraph)(reference, own).eval()
    details = {"size": own, "padding": reference.transform.image_mean, **(info or {})}

    def expected(image: Tensor) -> tuple[Tensor, ...]:
        (found,) = reference([image])
        return tuple(found[name] for name in graph.outputs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_unbacked_symint", FutureWarning)  # torchvision's, for nms
        return export_checked(
            graph,
            [(photo,) for photo in _photos(graph)],
            path,
            format=format,
            metadata=file_metadata("detector", config.to_dict(), dynamic=False, **details),
            input_names=("image",),
            output_names=graph.outputs,
            expected=expected,
            overwrite=overwrite,
            tell=tell,
        )


class _AsTheyAre(ImageTransform):
    """Images are not resized, so that results need not be moved back; masks stay in the frame of their boxes."""

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        return result


def _plain_copy(model: RetinaNet | MaskRCNN) -> RetinaNet | MaskRCNN:
    """A copy for inference in float32 on the CPU, for images that have the right size."""
    copy = deepcopy(model).cpu().float().eval().requires_grad_(False)
    old = copy.transform
    copy.transform = _AsTheyAre(old.min_size, old.max_size, old.image_mean, old.image_std, old.size_divisible).eval()
    for module in copy.modules():
        if isinstance(module, VisionLongformer):
            module.set_attention_implementation("auto")
    return copy


def _photos(graph: DetectorGraph) -> list[Tensor]:
    """Photos (3, height, width) to compare on.

    Detectors decide: of two boxes with nearly the same score, or with an overlap near the limit, rounding may choose
    another one. Such photos say nothing about a file, nor do those in which nothing is found.
    """
    height, width = graph.size
    photos = [image_tensor(photo.resize((width, height))) for photo in photo_parts(training=False)]
    mirrored = [photo.flip(2) for photo in photos]
    return list(islice(_telling(graph, [*photos, *mirrored]), COMPARED)) or photos[:1]


def _telling(graph: DetectorGraph, photos: list[Tensor]) -> Iterator[Tensor]:
    """Photos in which the same is found with and without a little noise."""
    generator = torch.Generator().manual_seed(0)
    for photo in photos:
        noise = NOISE * torch.randn(photo.shape, generator=generator)
        with torch.no_grad():
            (boxes, labels, *_), (moved, same, *_) = graph(photo), graph(photo + noise)
        if len(boxes) and torch.equal(labels, same) and torch.allclose(boxes, moved, rtol=0, atol=0.5):
            yield photo
