"""Training a detector: from a recipe to a run directory, by the same loop as classification."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..classification.data import Process
from ..training.randomness import derive, seeded
from ..training.runs import Kind, Trained
from ..training.task import Observer
from .checkpoint import load_backbone
from .dataset import open_detection
from .detector import load_named
from .loader import DetectionLoader, DetectionShare
from .models import build_detector
from .pictures import draw_objects, page, save_image
from .predict import find_objects
from .recipe import DetectionRecipe
from .task import DetectionTask

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
    """Train a detector as a recipe says, in a new run directory; see :func:`vision_longformer.classification.train`."""
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
