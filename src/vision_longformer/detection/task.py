"""Detection as a training task: data, losses, COCO's metrics, the saved detector and its pictures."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..data.loading import Progress
from ..data.order import Process
from ..data.randomness import derive_seed, seeded
from ..training import run
from ..training.callbacks import Callback
from ..training.run import TrainedRun
from ..training.task import TrainingTask
from .checkpoint import load_backbone, save_detector
from .dataset import Batch, DetectionData, EvalSet, TrainSet, open_detection
from .detectors import build_detector
from .evaluate import evaluate_detector
from .export import open_detector
from .pictures import draw_detections, page, save_image
from .predict import predict_image
from .recipe import DetectionRecipe

logger = logging.getLogger(__name__)

NUM_PICTURES = 6
"""Images on the page of predictions."""

MIN_PICTURED_SCORE = 0.3
"""Lowest score of what is drawn there: a detector that has just begun is not sure of anything."""

REDRAW_STEPS = 1000
"""Between new Performer features, as in the paper."""


class DetectionTask(TrainingTask):
    """A detector with its training and evaluation images."""

    recipe_type = DetectionRecipe
    best_metric = "box_AP"
    curves = ("box_AP50", "mask_AP50", "box_AP", "mask_AP")

    def __init__(self, recipe: DetectionRecipe, accelerator: Accelerator, run: Path | None = None) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        process = Process(accelerator.process_index, accelerator.num_processes)
        train_data, eval_data = _open_data(recipe)
        self.train_set = TrainSet(
            train_data,
            seed=recipe.seed,
            batch_size=recipe.batch_size,
            accumulate=recipe.accumulate,
            process=process,
            workers=recipe.workers,
            hflip=recipe.hflip,
            skip_bad=recipe.skip_bad,
        )
        self.eval_set = EvalSet(eval_data, process=process, workers=recipe.workers, skip_bad=recipe.skip_bad)
        with seeded(derive_seed(recipe.seed, "weights")):
            self.model = build_detector(recipe.detector_config(len(train_data.categories)))
        if recipe.init is not None:
            logger.info("%s", load_backbone(self.model, recipe.init, recipe.table_resize))
        self.batches_per_epoch = self.train_set.batches_per_epoch

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        device = self.accelerator.device
        for images, targets in self.train_set.batches(epoch, start):
            moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
            yield [image.to(device) for image in images], moved

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        losses: dict[str, Tensor] = model(images, targets)
        total = sum(losses.values(), start=next(iter(losses.values())).new_zeros(()))
        return total, {name.removeprefix("loss_"): value for name, value in losses.items()}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        device, precision = self.accelerator.device, self.recipe.precision
        result = evaluate_detector(self.model, self.eval_set, device, precision, progress)
        return {
            f"{part}_{name}": value
            for part, metrics in (("box", result.boxes), ("mask", result.masks))
            if metrics is not None
            for name, value in metrics.overall.items()
        }

    def save(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.accelerator.is_main_process:
            whole = build_detector(self.recipe.detector_config(len(self.train_set.categories)))
            whole.load_state_dict(state)
            categories = [category._asdict() for category in self.train_set.categories]
            save_detector(whole, path, info={"categories": categories}, overwrite=True)

    def draw(self, folder: Path) -> None:
        """A page of evaluation images with the detections of the best detector."""
        detector = open_detector(folder / "best.safetensors")
        names = [category.name for category in detector.categories]
        pictures = []
        for image in self.eval_set.examples(NUM_PICTURES):
            detections = predict_image(detector.model, image, threshold=MIN_PICTURED_SCORE)
            pictures.append(draw_detections(image, detections, names))
        where = f"{self.recipe.data}, {self.recipe.eval_split}"
        caption = f"{where}: objects with a score of at least {MIN_PICTURED_SCORE}"
        save_image(page(pictures, caption), folder / "predictions.png", overwrite=True)

    @staticmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        return step > 0 and step % REDRAW_STEPS == 0


def _open_data(recipe: DetectionRecipe) -> tuple[DetectionData, DetectionData]:
    """The training and the evaluation split, which must have the same categories."""
    masks = recipe.detector == "mask_rcnn"
    train_data, eval_data = (
        open_detection(recipe.data, split, masks=masks, skip_bad=recipe.skip_bad)
        for split in (recipe.train_split, recipe.eval_split)
    )
    if masks and not train_data.has_masks:
        raise ValueError(f"{recipe.data} has boxes but no masks, which mask_rcnn learns from; use --detector retinanet")
    if train_data.categories != eval_data.categories:
        raise ValueError(
            f"the categories of {recipe.train_split} and {recipe.eval_split} in {recipe.data} differ; use one list"
        )
    return train_data, eval_data


def train(
    recipe: str | DetectionRecipe = "quickstart",
    *,
    output: str | Path | None = None,
    callback: Callback | None = None,
    **changes: Any,
) -> TrainedRun:
    """Train a detector as a recipe says, in a new run directory; see :func:`vision_longformer.classification.train`."""
    return run.train(DetectionTask, recipe, output=output, callback=callback, **changes)


def resume(directory: str | Path, *, epochs: int | None = None, callback: Callback | None = None) -> TrainedRun:
    """Resume a run, or train a finished one for more epochs; see :func:`vision_longformer.classification.resume`."""
    return run.resume(DetectionTask, directory, epochs=epochs, callback=callback)
