"""Training a classifier: from a recipe to a run directory with checkpoints, metrics and pictures."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..checkpoint import load
from ..training.backbone_schedule import BackboneSchedule, paper_redraw
from ..training.distribution import make_accelerator
from ..training.loop import Training, total_steps
from ..training.observers import Observers, TensorBoard
from ..training.recipes import build, load_recipe, to_yaml
from ..training.run_directory import RECIPE, RunDirectory, next_free
from ..training.task import Observer
from .data import EvalData, Process, class_names, eval_data, train_data
from .initial import initial_model
from .pictures import draw_confusion, draw_predictions
from .preprocessing import preprocessing
from .recipe import ClassificationRecipe
from .task import ClassificationTask

logger = logging.getLogger(__name__)

PICTURED = 40
"""Images on the page of predictions."""


class Trained(NamedTuple):
    """A finished run: its directory, the last evaluation and the pictures drawn."""

    run: Path
    results: dict[str, float]
    pictures: list[Path]

    @property
    def checkpoint(self) -> Path:
        return self.run / "best.safetensors"


def resolve(recipe: str | ClassificationRecipe = "quickstart", **changes: Any) -> ClassificationRecipe:
    """A recipe by name or file, with single settings changed."""
    if isinstance(recipe, ClassificationRecipe):
        return replace(recipe, **changes)
    return build(ClassificationRecipe, {**load_recipe("classification", recipe), **changes}, f"recipe {recipe}")


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
    resolved = resolve(recipe, **changes)
    accelerator = make_accelerator(resolved)
    name = Path(recipe).stem if isinstance(recipe, str) else "run"
    task = _task(resolved, accelerator)
    path = Path(_from_main(accelerator, str(output or next_free(Path("runs"), name))))
    run = RunDirectory.create(path, to_yaml(resolved)) if accelerator.is_main_process else RunDirectory(path)
    return _run(task, run, observer)


def resume(run: str | Path, *, observer: Observer | None = None) -> Trained:
    """Go on with an interrupted run from its last checkpoint, as if it had not been interrupted."""
    directory = RunDirectory.reopen(Path(run))
    path = str(directory.path / RECIPE)
    recipe = build(ClassificationRecipe, load_recipe("classification", path), path)
    accelerator = make_accelerator(recipe)
    if accelerator.is_main_process:
        directory.lock()
    return _run(_task(recipe, accelerator), directory, observer)


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


def _run(task: ClassificationTask, run: RunDirectory, observer: Observer | None) -> Trained:
    recipe, accelerator = task.recipe, task.accelerator
    steps = total_steps(recipe, task.batches_per_epoch)
    schedule = BackboneSchedule(task.model, recipe.seed, round(recipe.shift_until * steps), paper_redraw)
    if recipe.compile:
        task.model.compile()
    watching = [observer or Observer()] if accelerator.is_main_process else []
    if watching and TensorBoard.installed():
        watching.append(TensorBoard(run.path / "tensorboard"))
    results = Training(task, recipe, run, accelerator, schedule, Observers(*watching)).train()
    pictures = _draw(task, run.path) if accelerator.is_main_process else []
    accelerator.wait_for_everyone()
    return Trained(run.path, results, pictures)


def _draw(task: ClassificationTask, folder: Path) -> list[Path]:
    """The confusion matrix of the last evaluation and a page of predictions."""
    pictures = []
    classes = task.preprocessing.classes
    if task.result is not None and task.result.confusion is not None:
        path = folder / "confusion.png"
        pictures.append(draw_confusion(task.result.confusion, classes, path, overwrite=True))
    images, labels = _some_images(task.evaluation, PICTURED)
    with torch.no_grad():
        best = load(folder / "last.safetensors")(images).softmax(1).max(1)
    shown = task.preprocessing.denormalise(images)
    path = folder / "predictions.png"
    pictures.append(draw_predictions(shown, labels, best.indices, best.values, classes, path, overwrite=True))
    return pictures


def _some_images(data: EvalData, count: int) -> tuple[Tensor, Tensor]:
    """About ``count`` images and labels spread over the set."""
    stride, seen, chosen = max(1, data.size // count), 0, []
    for images, labels in data.batches():
        places = slice(-seen % stride, None, stride)
        chosen.append((images[places], labels[places]))
        seen += len(labels)
    images, labels = (torch.cat(parts)[:count] for parts in zip(*chosen, strict=True))
    return images, labels


def _from_main(accelerator: Accelerator, value: str) -> str:
    """The first process's value in every process."""
    return str(broadcast_object_list([value])[0]) if accelerator.num_processes > 1 else value
