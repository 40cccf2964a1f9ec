"""Detection as the training loop sees it: batches, losses, COCO's measures, the saved detector.

Training a detector: from a recipe to a run directory, by the same loop as classification.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..data.order import Process
from ..data.randomness import derive, seeded
from ..training.run import Kind, Trained
from ..training.task import Observer, Tell
from .checkpoint import load_backbone, load_named, save_detector
from .dataset import Batch, DetectionLoader, DetectionShare, open_detection
from .detectors import build_detector
from .evaluate import DetectionResult, evaluate_detector
from .pictures import draw_objects, page, save_image
from .predict import find_objects
from .recipe import DetectionRecipe


class DetectionTask:
    """A detector with its images; see :class:`~vision_longformer.training.task.Task`."""

    score = "box_AP"

    def __init__(
        self,
        recipe: DetectionRecipe,
        model: nn.Module,
        train: DetectionLoader,
        evaluation: DetectionShare,
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.model, self.accelerator = recipe, model, accelerator
        self.train, self.evaluation = train, evaluation
        self.batches_per_epoch = train.batches_per_epoch
        self.result: DetectionResult | None = None

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        device = self.accelerator.device
        for images, targets in self.train.batches(epoch, start):
            moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
            yield [image.to(device) for image in images], moved

    def loss(self, model: nn.Module, batch: Batch, place: int) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        losses: dict[str, Tensor] = model(images, targets)
        total = sum(losses.values(), start=next(iter(losses.values())).new_zeros(()))
        return total, {name.removeprefix("loss_"): value for name, value in losses.items()}

    def evaluate(self, tell: Tell) -> dict[str, float]:
        self.result = evaluate_detector(self.model, self.evaluation, self.accelerator.device, tell)
        parts = {"box": self.result.boxes, "mask": self.result.masks}
        return {
            f"{part}_{name}": value
            for part, measured in parts.items()
            if measured is not None
            for name, value in measured.overall.items()
        }

    def save(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.accelerator.is_main_process:
            whole = build_detector(self.recipe.config(len(self.train.categories)))
            whole.load_state_dict(state)
            categories = [category._asdict() for category in self.train.categories]
            save_detector(whole, path, info={"categories": categories, "recipe": self.recipe.about}, overwrite=True)


logger = logging.getLogger(__name__)

PICTURED = 6
"""Images on the page of predictions."""

PICTURED_SCORE = 0.3
"""Lowest score of what is drawn there: a detector that has just begun is not sure of anything."""

REDRAW_STEPS = 1000


def train(
    recipe: str | DetectionRecipe = "quickstart",
    *,
    output: str | Path | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Trained:
    """Train a detector as a recipe says, in a new run directory; see :func:`vision_longformer.classification.task`."""
    return DETECTION.train(recipe, output, observer, **changes)


def resume(run: str | Path, *, observer: Observer | None = None) -> Trained:
    """Go on with an interrupted run from its last checkpoint, as if it had not been interrupted."""
    return DETECTION.resume(run, observer)


def _task(recipe: DetectionRecipe, accelerator: Accelerator) -> DetectionTask:
    process = Process(accelerator.process_index, accelerator.num_processes)
    masks = recipe.detector == "mask_rcnn"
    shown, kept = (
        open_detection(recipe.data, split, masks=masks, skip_bad=recipe.skip_bad)
        for split in (recipe.train_split, recipe.eval_split)
    )
    if masks and not shown.has_masks:
        raise ValueError(f"{recipe.data} has boxes but no masks, which mask_rcnn learns from; use --detector retinanet")
    if shown.categories != kept.categories:
        raise ValueError(
            f"the categories of {recipe.train_split} and {recipe.eval_split} in {recipe.data} differ; use one list"
        )
    loader = DetectionLoader(
        shown,
        seed=recipe.seed,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        process=process,
        workers=recipe.workers,
        hflip=recipe.hflip,
        skip_bad=recipe.skip_bad,
    )
    with seeded(derive(recipe.seed, "weights")):
        model = build_detector(recipe.config(len(shown.categories)))
    if recipe.init is not None:
        logger.info("%s", load_backbone(model, recipe.init, recipe.table_resize))
    share = DetectionShare(kept, process=process, workers=recipe.workers, skip_bad=recipe.skip_bad)
    return DetectionTask(recipe, model, loader, share, accelerator)


def _redraw_is_due(step: int, epoch: int, step_of_epoch: int) -> bool:
    return step > 0 and step % REDRAW_STEPS == 0


def _draw(task: DetectionTask, folder: Path) -> None:
    """A page of evaluation images with what the best detector finds in them."""
    model, _, categories, _ = load_named(folder / "best.safetensors")
    names = [category.name for category in categories]
    recipe = task.recipe
    data = open_detection(recipe.data, recipe.eval_split, skip_bad=recipe.skip_bad)
    pictures = []
    for index in range(min(PICTURED, len(data))):
        image = data.read(index)[0]
        pictures.append(draw_objects(image, find_objects(model, image, threshold=PICTURED_SCORE), names))
    caption = f"{recipe.data}, {recipe.eval_split}: found with a score of at least {PICTURED_SCORE}"
    save_image(page(pictures, caption), folder / "predictions.png", overwrite=True)


CURVES = ("box_AP50", "mask_AP50", "box_AP", "mask_AP")

DETECTION = Kind("detection", DetectionRecipe, _task, _redraw_is_due, _draw, CURVES)
