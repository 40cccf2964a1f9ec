"""How good a detector is on a data set: COCO's average precision and recall, over any number of processes."""

from __future__ import annotations

import io
from collections import Counter
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

from ..checkpoint import resolve_checkpoint
from ..checkpoint.native import weights_file
from ..data.loading import Progress
from ..data.order import Process
from ..data.sources import check_classes
from ..data.split import Split
from ..errors import check_choice
from ..export.runtime import is_exported
from ..geometry import ceil_div
from ..training.distributed import autocast
from ..training.recipe import PRECISIONS, resolve
from ..training.run_directory import RECIPE, no_run_error
from .checkpoint import Detector
from .dataset import DetectionData, EvalSet, Subset, has_split, open_detection
from .detections import Category, Target, coco_annotations, coco_result, detections_from_output
from .export import open_detector
from .recipe import DetectionRecipe

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""In pycocotools' order: over IoUs from .5 to .95, at .5, at .75, of small, medium and large objects; then recall with
at most 1, 10 and 100 results per image, and of small, medium and large objects."""

DUMMY_IMAGE_SIDE = 32
"""Pixels of the square that a process with fewer images runs the model on instead."""


class CocoMetrics(NamedTuple):
    """Percentages: those of ``METRICS``, and AP by category; NaN where there are no objects to be found."""

    overall: dict[str, float]
    by_category: dict[str, float]


@dataclass(frozen=True)
class DetectionResult:
    """The metrics of boxes and, if the detector and the data have them, of masks.

    ``detections`` is COCO's list of results, in the main process only; ``skipped`` names images that were not read.
    """

    images: int
    skipped: tuple[str, ...]
    boxes: CocoMetrics
    masks: CocoMetrics | None
    detections: list[dict[str, Any]]

    @property
    def per_category(self) -> dict[str, tuple[float, float | None]]:
        """By name, AP of boxes and of masks."""
        masks = None if self.masks is None else self.masks.by_category
        return {name: (ap, None if masks is None else masks[name]) for name, ap in self.boxes.by_category.items()}


def evaluate(
    checkpoint: str | Path,
    data: str | None = None,
    split: str | None = None,
    *,
    workers: int = 2,
    precision: str = "fp32",
    skip_bad: bool | None = None,
    progress: Progress | None = None,
) -> DetectionResult:
    """COCO's metrics of a checkpoint on the ``split`` of ``data``; under ``torchrun``, processes share the images.

    Args:
        checkpoint: a run directory, a .safetensors file of a detector, or a .onnx, .xml or .pt2 file exported from one.
        data: a folder in COCO's format, or the built-in garments; by default what the checkpoint's run was evaluated
            on.
        split: which part of it; by default the run's, images that it held out included, or validation.
        workers: data-loading processes.
        precision: fp32, bf16 or fp16.
        skip_bad: leave out invalid images and annotations, instead of stopping; if None, as the run did on its own
            data, and not on other data.
        progress: called with what is done and what there is in all.
    """
    check_choice("precision", precision, PRECISIONS)
    if is_exported(checkpoint) and precision != "fp32":
        raise ValueError(f"{checkpoint} computes in the precision that it was exported with; leave out {precision}")
    detector = open_detector(checkpoint)
    where = eval_images(checkpoint, data, split)
    skip_bad = where.skip_bad if skip_bad is None else skip_bad
    source = open_detection(where.data, where.split, masks=detector.config.kind == "mask_rcnn", skip_bad=skip_bad)
    if where.names is not None:
        source = Subset(source, where.names)
    _check_categories(detector, str(checkpoint), source, where.data)
    state = PartialState(cpu=not torch.cuda.is_available())
    process = Process(state.process_index, state.num_processes)
    eval_set = EvalSet(source, process=process, workers=workers, skip_bad=skip_bad)
    return evaluate_detector(detector.model.to(state.device), eval_set, state.device, precision, progress)


class EvalImages(NamedTuple):
    """Images to evaluate on: the ``split`` of ``data``, or ``names`` of them if a run held them out itself.

    ``skip_bad``: whether the run that they are of skips what is invalid.
    """

    data: str
    split: str
    names: tuple[str, ...] | None = None
    skip_bad: bool = False


def eval_images(checkpoint: str | Path, data: str | None, split: str | None) -> EvalImages:
    """What to evaluate a checkpoint on; what is not given is as in the run whose directory it lies in."""
    run = resolve_checkpoint(checkpoint).parent
    if not (run / RECIPE).is_file():
        if data is None:
            weights_file(checkpoint)  # says if there is no such file
            raise no_run_error(checkpoint)
        return _known_part(checkpoint, data, split)
    recipe = resolve(DetectionRecipe, str(run / RECIPE))
    if data is not None and Path(data).absolute() != Path(recipe.data).absolute():
        return _known_part(checkpoint, data, split)
    divided = Split.read(run)
    names = divided and divided.part(split, recipe.train_split, recipe.eval_split)
    own = recipe.train_split if names else split or recipe.eval_split
    return EvalImages(recipe.data, own, names or None, recipe.skip_bad)


def _known_part(checkpoint: str | Path, data: str, split: str | None) -> EvalImages:
    """The part of data that is not divided, by the split that lies beside the checkpoint, if it is of these images."""
    names = None
    if Split.beside(checkpoint) is not None and not has_split(data, "validation"):
        names = Split.known(checkpoint, open_detection(data, "train", masks=False, skip_bad=True).names, split)
    return EvalImages(data, split or "validation") if names is None else EvalImages(data, "train", names)


def _check_categories(detector: Detector, checkpoint: str, source: DetectionData, data: str) -> None:
    names = [category.name for category in source.categories]
    if detector.named:
        check_classes(data, names, [category.name for category in detector.categories])
    elif len(names) != len(detector.categories):
        count = len(detector.categories)
        raise ValueError(f"{data} has {len(names)} categories, but the detector in {checkpoint} has {count}")


def evaluate_detector(
    model: nn.Module,
    eval_set: EvalSet,
    device: torch.device,
    precision: str = "fp32",
    progress: Progress | None = None,
    group: distributed.ProcessGroup | None = None,
) -> DetectionResult:
    """COCO's metrics of a model over the processes of a group, the same in each; the model is left in its mode.

    Images run one by one in their own sizes, and each is counted once. Every process runs the model equally often, if
    need be on an image that does not count, since all must take part in running a sharded model.
    """
    training = model.training
    processes = distributed.get_world_size(group) if distributed.is_initialized() else 1
    own = CocoRecords()
    model.eval()
    try:
        with torch.no_grad(), autocast(device, precision):
            for done, (image, target) in enumerate(eval_set.images(), 1):
                own.add(image, target, model([image.to(device)])[0], eval_set.categories)
                if progress is not None:
                    progress(min(done * processes, eval_set.size), eval_set.size)
            for _ in range(ceil_div(eval_set.size, processes) - len(own.images)):
                model([torch.zeros(3, DUMMY_IMAGE_SIDE, DUMMY_IMAGE_SIDE, device=device)])
    finally:
        model.train(training)
    own.skipped = eval_set.skipped
    return _result_of_all(own, eval_set.categories, group)


def _result_of_all(
    own: CocoRecords, categories: Sequence[Category], group: distributed.ProcessGroup | None
) -> DetectionResult:
    """Computed in the first process from the records of all, and sent to the others."""
    if not distributed.is_initialized():
        return own.result(categories)
    first = distributed.get_rank(group) == 0
    shares: list[Any] | None = [None] * distributed.get_world_size(group) if first else None
    distributed.gather_object(own, shares, group=group, group_dst=0)
    if shares is None:
        received: list[Any] = [None]
        distributed.broadcast_object_list(received, group=group, group_src=0)
        return received[0]
    result = CocoRecords.joined(shares).result(categories)
    distributed.broadcast_object_list([replace(result, detections=[])], group=group, group_src=0)
    return result


@dataclass
class CocoRecords:
    """What is compared, in the form of COCO's files: images, their annotated objects, and the detections.

    ``masks`` says whether all of them have masks to be compared.
    """

    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    detections: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    masks: bool = True

    def add(self, image: Tensor, target: Target, output: Mapping[str, Tensor], categories: Sequence[Category]) -> None:
        """An image (3, h, w), its objects, and the detector's output."""
        height, width = image.shape[1:]
        self.images.append({"id": target.image_id, "height": height, "width": width})
        self.annotations += coco_annotations(target, categories)
        self.masks &= "masks" in output and target.masks is not None
        for detection in detections_from_output(output):
            self.detections.append(coco_result(detection, target.image_id, categories, (height, width)))

    @classmethod
    def joined(cls, shares: Iterable[CocoRecords]) -> CocoRecords:
        """The records of all processes in order of images, as a single process would have them."""
        whole = cls()
        for share in shares:
            whole.images += share.images
            whole.annotations += share.annotations
            whole.detections += share.detections
            whole.skipped += share.skipped
            whole.masks &= share.masks
        whole.images.sort(key=lambda image: image["id"])
        for objects in (whole.annotations, whole.detections):
            objects.sort(key=lambda one: one["image_id"])  # stable: best first within an image
        return whole

    def result(self, categories: Sequence[Category]) -> DetectionResult:
        """The metrics of these records."""
        if not self.images:
            raise ValueError(f"none of the {len(self.skipped)} images could be read")
        compared = self.images, self.annotations, self.detections, categories
        return DetectionResult(
            images=len(self.images),
            skipped=tuple(self.skipped),
            boxes=coco_metrics(*compared),
            masks=coco_metrics(*compared, masks=True) if self.masks else None,
            detections=self.detections,
        )


def coco_metrics(
    images: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    detections: Sequence[Mapping[str, Any]],
    categories: Sequence[Category],
    *,
    masks: bool = False,
) -> CocoMetrics:
    """Compare detections with annotations, both as in COCO's files, by their boxes or by their ``masks``.

    ``images`` have id, height and width. As in COCO's own evaluation, the size of a detection is the area of what is
    compared, box or mask.
    """
    sized = [{**detection, "area": _area(detection, masks)} for detection in detections]
    with redirect_stdout(io.StringIO()):
        evaluation = COCOeval(
            _index(images, annotations, categories), _index(images, sized, categories), "segm" if masks else "bbox"
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    overall = {name: _percent(value) for name, value in zip(METRICS, evaluation.stats, strict=True)}
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # IoU × recall × category, all sizes, most results
    names = distinct_names(categories)
    by_category = {
        names[category_id]: _percent(_mean(precision[:, :, index]))
        for index, category_id in enumerate(evaluation.params.catIds)
    }
    return CocoMetrics(overall, by_category)


def distinct_names(categories: Sequence[Category]) -> dict[int, str]:
    """Names by id; those of several categories are followed by the id, as in ``bat (id 3)``."""
    count = Counter(category.name for category in categories)
    return {one.id: one.name if count[one.name] == 1 else f"{one.name} (id {one.id})" for one in categories}


def _index(
    images: Sequence[Mapping[str, Any]], objects: Sequence[Mapping[str, Any]], categories: Sequence[Category]
) -> COCO:
    """pycocotools' index of objects, which are numbered from 1: it reads number 0 as "no object"."""
    coco = COCO()
    coco.dataset = {
        "images": [dict(image) for image in images],
        "annotations": [{"iscrowd": 0, **one, "id": number} for number, one in enumerate(objects, 1)],
        "categories": [category._asdict() for category in categories],
    }
    coco.createIndex()
    return coco


def _area(detection: Mapping[str, Any], masks: bool) -> float:
    return float(rle.area(detection["segmentation"])) if masks else detection["bbox"][2] * detection["bbox"][3]


def _mean(values: np.ndarray) -> float:
    """Of those that are not -1, which stands for "no objects"."""
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else -1.0


def _percent(value: float) -> float:
    return 100 * float(value) if value > -1 else nan
