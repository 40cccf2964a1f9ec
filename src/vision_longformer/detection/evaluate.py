"""COCO's measures, average precision and recall, by pycocotools.

How good a detector is on a data set, over any number of processes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.loading import Progress
from ..data.order import Process
from ..data.sources import check_classes
from .checkpoint import load_named
from .dataset import Category, DetectionShare, Target, open_detection
from .detections import coco_result, found_by_model, run_lengths

MEASURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""In pycocotools' order: over IoUs from .5 to .95, at .5, at .75, of small, medium and large objects; then recall with
at most 1, 10 and 100 results per image, and of small, medium and large objects."""


class Measured(NamedTuple):
    """Percentages: those of ``MEASURES``, and AP by category; NaN where there are no objects to be found."""

    overall: dict[str, float]
    by_category: dict[str, float]


def measure(
    images: Sequence[Mapping[str, Any]],
    truth: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    categories: Sequence[Category],
    *,
    masks: bool = False,
) -> Measured:
    """Compare ``results`` with the ``truth``, both as in COCO's files, by their boxes or by their ``masks``.

    ``images`` have id, height and width. As in COCO's own evaluation, the size of a result is the area of what is
    compared, box or mask.
    """
    sized = [{**result, "area": _area(result, masks)} for result in results]
    with redirect_stdout(io.StringIO()):
        evaluation = COCOeval(
            _indexed(images, truth, categories), _indexed(images, sized, categories), "segm" if masks else "bbox"
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    overall = {name: _percent(value) for name, value in zip(MEASURES, evaluation.stats, strict=True)}
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # IoU × recall × category, all sizes, most results
    names = {category.id: category.name for category in categories}
    by_category = {
        names[number]: _percent(_mean(precision[:, :, place])) for place, number in enumerate(evaluation.params.catIds)
    }
    return Measured(overall, by_category)


def _indexed(
    images: Sequence[Mapping[str, Any]], objects: Sequence[Mapping[str, Any]], categories: Sequence[Category]
) -> COCO:
    """pycocotools' index of objects, which are numbered from 1: it takes number 0 for "no object"."""
    coco = COCO()
    coco.dataset = {
        "images": [dict(image) for image in images],
        "annotations": [{"iscrowd": 0, **one, "id": number} for number, one in enumerate(objects, 1)],
        "categories": [category._asdict() for category in categories],
    }
    coco.createIndex()
    return coco


def _area(result: Mapping[str, Any], masks: bool) -> float:
    return float(rle.area(result["segmentation"])) if masks else result["bbox"][2] * result["bbox"][3]


def _mean(values: np.ndarray) -> float:
    """Of those that are not -1, which stands for "no objects"."""
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else -1.0


def _percent(value: float) -> float:
    return 100 * float(value) if value > -1 else nan


@dataclass
class Collected:
    """What is compared, in the form of COCO's files: images, their annotated objects, and what a detector found.

    ``masks`` says whether all of them have masks to be compared.
    """

    images: list[dict[str, Any]] = field(default_factory=list)
    truth: list[dict[str, Any]] = field(default_factory=list)
    detections: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    masks: bool = True

    def add(self, image: Tensor, target: Target, output: Mapping[str, Tensor], categories: Sequence[Category]) -> None:
        """An image (3, h, w), its objects, and what the detector says."""
        height, width = image.shape[1:]
        self.images.append({"id": target.image_id, "height": height, "width": width})
        self.truth += _annotations(target, categories)
        self.masks &= "masks" in output and target.masks is not None
        for found in found_by_model(output):
            self.detections.append(coco_result(found, target.image_id, categories, (height, width)))

    @classmethod
    def joined(cls, shares: Iterable[Collected]) -> Collected:
        """The shares of all processes in order of images, as a single process would have it."""
        whole = cls()
        for share in shares:
            whole.images += share.images
            whole.truth += share.truth
            whole.detections += share.detections
            whole.skipped += share.skipped
            whole.masks &= share.masks
        whole.images.sort(key=lambda image: image["id"])
        for objects in (whole.truth, whole.detections):
            objects.sort(key=lambda one: one["image_id"])  # stable: best first within an image
        return whole


@dataclass(frozen=True)
class DetectionResult:
    """Percentages as in :mod:`~.ap`: of boxes and, if the detector and the data have them, of masks.

    ``detections`` is COCO's list of results, in the main process only; ``skipped`` counts images that were not read.
    """

    images: int
    skipped: int
    boxes: Measured
    masks: Measured | None
    detections: list[dict[str, Any]]

    @property
    def per_category(self) -> dict[str, tuple[float, float | None]]:
        """By name, AP of boxes and of masks."""
        masks = None if self.masks is None else self.masks.by_category
        return {name: (ap, None if masks is None else masks[name]) for name, ap in self.boxes.by_category.items()}


def evaluate_detector(
    model: nn.Module, data: DetectionShare, device: torch.device, progress: Progress | None = None
) -> DetectionResult:
    """COCO's measures of a model, the same in every process; the model is left in the mode it was in.

    Images run one by one in their own sizes, and each is counted once. Every process runs the model equally often, if
    need be on an image that does not count: of a sharded model it is a joint effort.
    """
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    training = plain.training
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    own = Collected()
    plain.eval()
    try:
        with torch.no_grad():
            for done, (image, target) in enumerate(data.images(), 1):
                own.add(image, target, plain([image.to(device)])[0], data.categories)
                if progress is not None:
                    progress(min(done * processes, data.size), data.size)
            for _ in range(-(-data.size // processes) - len(own.images)):
                plain([torch.zeros(3, 32, 32, device=device)])
    finally:
        plain.train(training)
    own.skipped = data.skipped
    return _result_of_all(own, data.categories)


def _result_of_all(own: Collected, categories: Sequence[Category]) -> DetectionResult:
    """Measured in the main process, told to the others."""
    if not distributed.is_initialized():
        return result_of(own, categories)
    main = distributed.get_rank() == 0
    shares: list[Any] | None = [None] * distributed.get_world_size() if main else None
    distributed.gather_object(own, shares)
    if shares is None:
        told: list[Any] = [None]
        distributed.broadcast_object_list(told)
        return told[0]
    result = result_of(Collected.joined(shares), categories)
    distributed.broadcast_object_list([replace(result, detections=[])])
    return result


def result_of(collected: Collected, categories: Sequence[Category]) -> DetectionResult:
    """The measures of what all processes have collected."""
    if not collected.images:
        raise ValueError(f"none of the {collected.skipped} images could be read")
    compared = collected.images, collected.truth, collected.detections, categories
    return DetectionResult(
        images=len(collected.images),
        skipped=collected.skipped,
        boxes=measure(*compared),
        masks=measure(*compared, masks=True) if collected.masks else None,
        detections=collected.detections,
    )


def _annotations(target: Target, categories: Sequence[Category]) -> list[dict[str, Any]]:
    """The objects of an image as COCO's files have them."""
    annotations = []
    for index, (left, top, right, bottom) in enumerate(target.boxes.tolist()):
        one = {
            "image_id": target.image_id,
            "category_id": categories[int(target.labels[index]) - 1].id,
            "bbox": [left, top, right - left, bottom - top],
            "area": float(target.area[index]),
            "iscrowd": int(target.crowd[index]),
        }
        if target.masks is not None:
            one["segmentation"] = run_lengths(target.masks[index].numpy().astype("uint8"))
        annotations.append(one)
    return annotations


def evaluate(
    checkpoint: str | Path,
    data: str = "garments",
    split: str = "validation",
    *,
    workers: int = 2,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> DetectionResult:
    """COCO's measures of a checkpoint on the ``split`` of ``data``; under ``torchrun``, processes share the images.

    Args:
        checkpoint: a .safetensors file of a detector.
        data: a folder in COCO's form, or the built-in garments.
        split: which part of it.
        workers: data-loading processes.
        skip_bad: leave out images and annotations that make no sense, instead of stopping.
        progress: called with what is done and what there is in all.
    """
    detector = load_named(checkpoint)
    source = open_detection(data, split, masks=detector.config.kind == "mask_rcnn", skip_bad=skip_bad)
    names = [category.name for category in source.categories]
    if detector.named:
        check_classes(data, names, [category.name for category in detector.categories])
    elif len(names) != len(detector.categories):
        count = len(detector.categories)
        raise ValueError(f"{data} has {len(names)} categories, but the detector in {checkpoint} tells {count} apart")
    state = PartialState(cpu=not torch.cuda.is_available())
    process = Process(state.process_index, state.num_processes)
    share = DetectionShare(source, process=process, workers=workers, skip_bad=skip_bad)
    return evaluate_detector(detector.model.to(state.device), share, state.device, progress)
