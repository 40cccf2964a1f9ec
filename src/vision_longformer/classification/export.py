"""Classifiers and backbones as files that run without this package: written, read again, and compared on images."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from ..checkpoint import load, load_info
from ..checkpoint.native import DETECTOR, READERS
from ..data.loading import Progress
from ..errors import CheckpointError
from ..export.runtime import ExportedModel, file_bytes, is_exported, load_exported
from ..export.verify import ExportedFile, export_verified
from ..export.writers import file_metadata
from ..models import VisionLongformer
from ..models.config import ModelConfig, size_pair
from .dataset import build_eval_set, find_images
from .metrics import Meter, Result
from .model import Classifier, load_classifier
from .preprocessing import Preprocessing

# Writing

FIXED_SIZE = {
    "linformer": "projects a fixed number of tokens",
    "spatial_reduction": "normalises its reduced map only if that has more than one cell",
}
"""Mechanisms that a file for any size cannot hold, and why."""


class BackboneMaps(nn.Module):
    """The map of each stage, (B, dim, height, width), as detectors take them."""

    def __init__(self, model: VisionLongformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model.forward_intermediates(images, intermediates_only=True))


def export_checkpoint(
    checkpoint: str | Path, path: str | Path, *, backbone: bool = False, **options: Any
) -> ExportedFile:
    """Write a checkpoint's classifier or backbone, with its preprocessing; ``options`` as in :func:`export_model`."""
    if backbone:
        info = load_info(checkpoint).get("preprocessing")
        return export_model(load(checkpoint), path, backbone=True, info=info, **options)
    model, preprocessing, named = load_classifier(checkpoint)
    return export_model(model, path, info={**preprocessing.to_dict(), "named": named}, **options)


def export_model(
    model: VisionLongformer,
    path: str | Path,
    *,
    format: str = "onnx",
    size: int | tuple[int, int] | None = None,
    dynamic: bool = False,
    backbone: bool = False,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportedFile:
    """Write a model as a ``.onnx``, ``.xml`` or ``.pt2`` file, and compare what it computes with the model.

    The file takes float32 images (B, C, height, width), any number of them, and gives logits (B, classes); with
    ``backbone`` the maps of the stages. Its metadata has ``strides`` and ``size`` beside ``info``; classifiers need the
    fields of :class:`Preprocessing` there to be used like a checkpoint. The model itself is left as it is.

    Args:
        model: the classifier, or the backbone if it has no classes.
        path: where to write; the name must end in .onnx, .xml or .pt2.
        format: onnx, for onnxruntime and others, openvino (``.xml``, with a ``.bin`` file beside it), or pt2, for
            ``torch.export.load``.
        size: height and width of the images, fixed in the file; the model's own if None.
        dynamic: take images of any height and width instead.
        backbone: the maps of all stages instead of logits.
        info: further JSON data for the file's metadata.
        overwrite: replace an existing file.
        progress: called with what is done and what there is in all.
    """
    if not (backbone or model.num_classes):
        raise ValueError("this model has no classification head; export it as a backbone")
    if dynamic:
        _check_dynamic(model.config, size)
    reference, traced = _plain_copy(model), _plain_copy(model)
    if not dynamic:
        traced.set_input_size(size_pair(size or model.config.img_size))
    config = traced.config
    details = {"strides": _strides(config), "size": config.img_size, **(info or {})}
    if not dynamic:
        details["size"] = config.img_size
    others = _other_sizes(config) if dynamic else [config.img_size]
    shapes = [(2, *config.img_size), *((1, *other) for other in others)]
    return export_verified(
        BackboneMaps(traced) if backbone else traced,
        [(_images(config, *shape),) for shape in shapes],
        path,
        format=format,
        metadata=file_metadata("backbone" if backbone else "classifier", config.to_dict(), dynamic=dynamic, **details),
        input_names=("images",),
        output_names=[f"stage_{index + 1}" for index in range(len(config.stages))] if backbone else ("logits",),
        dynamic_shapes=(_axes(config, dynamic=dynamic),),
        expected=BackboneMaps(reference) if backbone else reference,
        overwrite=overwrite,
        progress=progress,
    )


def _check_dynamic(config: ModelConfig, size: object) -> None:
    if size is not None:
        raise ValueError(f"a file for any size has no size of its own; give either size={size} or dynamic")
    for index, stage in enumerate(config.stages):
        mechanism = stage.attention.mechanism
        reason = FIXED_SIZE.get(mechanism)
        if reason is not None:
            raise ValueError(
                f"stage {index + 1} cannot be exported for any size: its {mechanism} attention {reason}; "
                "export it for one size instead"
            )


def _plain_copy(model: VisionLongformer) -> VisionLongformer:
    """A copy for inference in float32 on the CPU, which leaves the choice of the attention's implementation open."""
    copy = deepcopy(model).cpu().float().eval().requires_grad_(False)
    copy.set_attention_implementation("auto")
    return copy


def _axes(config: ModelConfig, *, dynamic: bool) -> dict[int, Any]:
    """Which axes of the images may vary, in the terms of ``torch.export``."""
    least = _least_side(config)
    sides = {2: Dim("height", min=least), 3: Dim("width", min=least)} if dynamic else {}
    return {0: Dim("batch", min=1), **sides}


def _strides(config: ModelConfig) -> list[int]:
    return list(accumulate((stage.patch for stage in config.stages), mul))


def _least_side(config: ModelConfig) -> int:
    """What an image needs at least, so that every stage has a map."""
    return 1 if config.patch_remainder == "pad" else _strides(config)[-1]


def _other_sizes(config: ModelConfig) -> list[tuple[int, int]]:
    """An odd rectangle, a large one and a small one: 225×301, 640×480 and 32×32 for a model of 224×224."""
    height, width = config.img_size
    small = max(height // 7, _least_side(config)), max(width // 7, _least_side(config))
    return [(height + 1, width * 4 // 3 + 3), (height * 20 // 7, width * 15 // 7), small]


def _images(config: ModelConfig, batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, config.in_chans, height, width, generator=torch.Generator().manual_seed(0))


# Reading


class ExportedClassifier(NamedTuple):
    """As :class:`~vision_longformer.classification.model.Classifier`, of an exported file."""

    model: ExportedModel
    preprocessing: Preprocessing
    named: bool


def open_classifier(path: str | Path, size: int | tuple[int, int] | None = None) -> Classifier | ExportedClassifier:
    """The classifier of a checkpoint or of an exported file (``.onnx``, ``.xml``, ``.pt2``)."""
    return load_exported_classifier(path, size) if is_exported(path) else load_classifier(path, size)


def load_exported_classifier(path: str | Path, size: int | tuple[int, int] | None = None) -> ExportedClassifier:
    """The classifier of an exported file; one that was exported for a fixed size takes no other ``size``."""
    model = load_exported(path)
    metadata = model.metadata
    if metadata["kind"] != "classifier":
        what = READERS[DETECTOR] if metadata["kind"] == "detector" else f"an exported {metadata['kind']}"
        raise CheckpointError(f"{path} is {what}; a classifier is needed here")
    preprocessing = Preprocessing.from_dict(metadata, str(path))
    if size is not None:
        wanted = size_pair(size)
        if not metadata["dynamic"] and wanted != preprocessing.size:
            height, width = preprocessing.size
            raise ValueError(f"{path} takes images of {height}×{width} only; export with --dynamic for other sizes")
        ModelConfig.from_dict(metadata["config"]).grids(wanted)
        preprocessing = replace(preprocessing, size=wanted)
    return ExportedClassifier(model, preprocessing, metadata.get("named", True))


# Comparing


@dataclass(frozen=True)
class Measured:
    """A file: its length, the median time of an image over all batches, and how good it is."""

    path: Path
    bytes: int
    seconds: float
    result: Result


@dataclass(frozen=True)
class Comparison:
    """Two files, and for how many images they predict different classes."""

    before: Measured
    after: Measured
    changed: int


def compare_exports(
    before: str | Path,
    after: str | Path,
    data: str | None = None,
    split: str | None = None,
    *,
    batch_size: int = 64,
    workers: int = 2,
    progress: Progress | None = None,
) -> Comparison:
    """Two exported classifiers on the same images: size, speed, accuracy, and how often they disagree.

    Both run on each batch of the ``split`` of ``data`` (of the first file's run, if None), the one and the other first
    in turn, so that the machine is equally busy with both. The first file's preprocessing serves both.
    """
    classifiers = [load_exported_classifier(path) for path in (before, after)]
    _, preprocessing, named = classifiers[0]
    where = find_images(before, data, split)
    source = where.open(preprocessing, named)
    eval_set = build_eval_set(
        source, preprocessing, batch_size=batch_size, workers=workers, skip_bad_images=where.skip_bad_images
    )
    first, second = (_Run(classifier.model, len(eval_set.classes)) for classifier in classifiers)
    changed = done = 0
    for index, (images, labels) in enumerate(eval_set.batches()):
        if index == 0:
            for run in (first, second):
                run.model(images)  # the first call is slower
        one, other = (run.add(images, labels) for run in ((second, first) if index % 2 else (first, second)))
        changed += int((one != other).sum())
        done += len(labels)
        if progress is not None:
            progress(done, eval_set.size)
    if not done:
        raise ValueError(f"there are no images in {where}")
    return Comparison(first.measured(Path(before)), second.measured(Path(after)), changed)


def calibration_batches(
    path: str | Path, data: str, split: str = "train", *, count: int = 256, batch_size: int = 8, workers: int = 2
) -> list[Tensor]:
    """The first images of a split, about ``count``, in batches (B, C, H, W) as an exported classifier takes them."""
    _, preprocessing, named = load_exported_classifier(path)
    where = find_images(path, data, split)
    eval_set = build_eval_set(
        where.open(preprocessing, named),
        preprocessing,
        batch_size=batch_size,
        workers=workers,
        skip_bad_images=where.skip_bad_images,
    )
    return [images for images, _ in islice(eval_set.batches(), -(-count // batch_size))]


class _Run:
    """What one file has done so far."""

    def __init__(self, model: ExportedModel, classes: int) -> None:
        self.model = model
        self._meter = Meter(classes, "cpu")
        self._seconds: list[float] = []

    def add(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run on a batch; the predicted class of each image, (b,)."""
        start = perf_counter()
        logits = self.model(images)
        self._seconds.append((perf_counter() - start) / len(images))
        self._meter.add(logits, labels)
        return logits.argmax(1)

    def measured(self, path: Path) -> Measured:
        return Measured(path, file_bytes(path), median(self._seconds), self._meter.result())
