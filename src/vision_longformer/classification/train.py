"""Training a classifier: from a recipe to a run directory with checkpoints, metrics and pictures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..checkpoint import load
from ..training.backbone_schedule import paper_redraw
from ..training.runs import Kind, Trained
from ..training.task import Observer
from .data import Process, class_names, eval_data, train_data
from .initial import initial_model
from .pictures import draw_confusion, draw_predictions
from .preprocessing import preprocessing
from .recipe import ClassificationRecipe
from .task import ClassificationTask

logger = logging.getLogger(__name__)


def train(
    recipe: str | ClassificationRecipe = "quickstart",
    *,
    output: str | Path | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Trained:
    """Train as a recipe says, in a new run directory (``runs/NAME-1`` or the next free number).

    Args:
        recipe: name of a shipped one, a .yaml file, or the settings themselves.
        output: the run directory; it must not hold anything yet.
        observer: is told how it goes.
        changes: settings other than the recipe's, as in ``train("cifar10", epochs=5)``.
    """
    return CLASSIFICATION.train(recipe, output, observer, **changes)


def resume(run: str | Path, *, observer: Observer | None = None) -> Trained:
    """Go on with an interrupted run from its last checkpoint, as if it had not been interrupted."""
    return CLASSIFICATION.resume(run, observer)


def _task(recipe: ClassificationRecipe, accelerator: Accelerator) -> ClassificationTask:
    process = Process(accelerator.process_index, accelerator.num_processes)
    classes = class_names(recipe)
    model, report = initial_model(recipe, classes)
    if report:
        logger.info("%s", report)
    model.set_grad_checkpointing(recipe.grad_checkpointing)
    prepare = preprocessing(recipe, model.config, classes)
    data = train_data(recipe, model.config, prepare, process), eval_data(recipe, prepare, process)
    return ClassificationTask(recipe, model, *data, prepare, accelerator)


def _draw(task: ClassificationTask, folder: Path) -> None:
    """The confusion matrix of the evaluation just made and a page of predictions."""
    classes = task.preprocessing.classes
    if task.result is not None and task.result.confusion is not None:
        draw_confusion(task.result.confusion, classes, folder / "confusion.png", overwrite=True)
    images, labels = task.some_images
    with torch.no_grad():
        likely = load(folder / "best.safetensors")(images).softmax(1).max(1)
    shown = task.preprocessing.denormalise(images)
    path = folder / "predictions.png"
    draw_predictions(shown, labels, likely.indices, likely.values, classes, path, overwrite=True)


CLASSIFICATION = Kind("classification", ClassificationRecipe, _task, paper_redraw, _draw, ("top1", "top5"))
