"""Classification as the training loop sees it: batches, mixing, the loss, evaluation, the saved classifier.

Training a classifier: from a recipe to a run directory with checkpoints, metrics and pictures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..checkpoint import load, save
from ..data.order import Process
from ..data.randomness import derive, seeded
from ..models import VisionLongformer
from ..training.backbone_schedule import paper_redraw
from ..training.run import Kind, Trained
from ..training.task import Observer, Tell
from .dataset import EvalData, TrainData, class_names, eval_data, train_data
from .evaluate import AUTOCAST, Result, evaluate_model
from .model import initial_model
from .pictures import draw_confusion, draw_predictions
from .preprocessing import Preprocessing, preprocessing
from .recipe import ClassificationRecipe

PICTURED = 40
"""Images on the page of predictions."""


class ClassificationTask:
    """A classifier with its training and evaluation images; see :class:`~vision_longformer.training.task.Task`."""

    score = "top1"

    def __init__(
        self,
        recipe: ClassificationRecipe,
        model: VisionLongformer,
        train: TrainData,
        evaluation: EvalData,
        preprocessing: Preprocessing,
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.model, self.preprocessing, self.accelerator = recipe, model, preprocessing, accelerator
        self.train, self.evaluation = train, evaluation
        self.batches_per_epoch = train.batches_per_epoch
        self.result: Result | None = None
        self._mix = _mixing(recipe, len(preprocessing.classes))

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.accelerator.device
        for images, labels in self.train.batches(epoch, start):
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], place: int) -> tuple[Tensor, dict[str, Tensor]]:
        images, target = batch
        if self._mix is not None:
            with seeded(derive(self.recipe.seed, "mix", place, self.accelerator.process_index)):
                images, target = self._mix(images, target)
        logits = model(images)
        smoothing = 0.0 if self._mix else self.recipe.smoothing
        loss = F.cross_entropy(logits.float(), target, label_smoothing=smoothing)
        label = target.argmax(1) if target.dim() == 2 else target
        return loss, {"accuracy": 100 * (logits.argmax(1) == label).float().mean()}

    def evaluate(self, tell: Tell) -> dict[str, float]:
        precision = AUTOCAST[self.recipe.precision]
        self.result = evaluate_model(self.model, self.evaluation, self.accelerator.device, precision, tell)
        return {"top1": self.result.top1, "top5": self.result.top5, "loss": self.result.loss}

    @cached_property
    def some_images(self) -> tuple[Tensor, Tensor]:
        """Images and labels spread over the evaluation set; kept, since all of it is read for them."""
        stride, seen, chosen = max(1, self.evaluation.size // PICTURED), 0, []
        for images, labels in self.evaluation.batches():
            places = slice(-seen % stride, None, stride)
            chosen.append((images[places], labels[places]))
            seen += len(labels)
        images, labels = (torch.cat(parts)[:PICTURED] for parts in zip(*chosen, strict=True))
        return images, labels

    def save(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.accelerator.is_main_process:
            whole = VisionLongformer(self.model.config)
            whole.load_state_dict(state)
            save(whole, path, info=self.info(), overwrite=True)

    def info(self) -> dict[str, Any]:
        """What a saved classifier says of itself."""
        return {"preprocessing": self.preprocessing.to_dict(), "recipe": self.recipe.about}


def _mixing(recipe: ClassificationRecipe, classes: int) -> Mixup | None:
    """Mixup and CutMix, which also smooth the labels."""
    if not (recipe.mixup or recipe.cutmix):
        return None
    return Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mix_prob,
        label_smoothing=recipe.smoothing,
        num_classes=classes,
    )


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
