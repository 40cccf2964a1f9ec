"""Classification as a training task: data, mixing, the loss, evaluation, the saved classifier and its pictures."""

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
from ..data.loading import Progress
from ..data.order import Process
from ..data.randomness import derive, seeded
from ..models import VisionLongformer
from ..training import run
from ..training.callbacks import Callback
from ..training.run import TrainedRun
from ..training.task import TrainingTask
from .dataset import class_names, eval_data, train_data
from .evaluate import AUTOCAST, Result, evaluate_model
from .model import initial_model
from .pictures import draw_confusion, draw_predictions
from .preprocessing import preprocessing
from .recipe import ClassificationRecipe

logger = logging.getLogger(__name__)

PICTURED = 40
"""Images on the page of predictions."""


class ClassificationTask(TrainingTask):
    """A classifier with its training and evaluation images."""

    recipe_type = ClassificationRecipe
    score = "top1"
    curves = ("top1", "top5")
    model: VisionLongformer

    def __init__(self, recipe: ClassificationRecipe, accelerator: Accelerator) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        process = Process(accelerator.process_index, accelerator.num_processes)
        classes = class_names(recipe)
        self.model, report = initial_model(recipe, classes)
        if report:
            logger.info("%s", report)
        self.preprocessing = preprocessing(recipe, self.model.config, classes)
        self.train_set = train_data(recipe, self.model.config, self.preprocessing, process)
        self.eval_set = eval_data(recipe, self.preprocessing, process)
        self.batches_per_epoch = self.train_set.batches_per_epoch
        self.result: Result | None = None
        self._mix = _mixing(recipe, len(classes))

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.accelerator.device
        for images, labels in self.train_set.batches(epoch, start):
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], micro_batch_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images, target = batch
        if self._mix is not None:
            with seeded(derive(self.recipe.seed, "mix", micro_batch_index, self.accelerator.process_index)):
                images, target = self._mix(images, target)
        logits = model(images)
        smoothing = 0.0 if self._mix else self.recipe.smoothing
        loss = F.cross_entropy(logits.float(), target, label_smoothing=smoothing)
        label = target.argmax(1) if target.dim() == 2 else target
        return loss, {"accuracy": 100 * (logits.argmax(1) == label).float().mean()}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        precision = AUTOCAST[self.recipe.precision]
        self.result = evaluate_model(self.model, self.eval_set, self.accelerator.device, precision, progress)
        return {"top1": self.result.top1, "top5": self.result.top5, "loss": self.result.loss}

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

    def draw(self, folder: Path) -> None:
        """The confusion matrix of the evaluation just made and a page of predictions."""
        classes = self.preprocessing.classes
        if self.result is not None and self.result.confusion is not None:
            draw_confusion(self.result.confusion, classes, folder / "confusion.png", overwrite=True)
        images, labels = self.some_images
        with torch.no_grad():
            likely = load(folder / "best.safetensors")(images).softmax(1).max(1)
        pixels = self.preprocessing.denormalise(images)
        path = folder / "predictions.png"
        draw_predictions(pixels, labels, likely.indices, likely.values, classes, path, overwrite=True)

    @cached_property
    def some_images(self) -> tuple[Tensor, Tensor]:
        """Images and labels spread over the evaluation set; kept, since all of it is read for them."""
        stride, seen, chosen = max(1, self.eval_set.size // PICTURED), 0, []
        for images, labels in self.eval_set.batches():
            places = slice(-seen % stride, None, stride)
            chosen.append((images[places], labels[places]))
            seen += len(labels)
        images, labels = (torch.cat(parts)[:PICTURED] for parts in zip(*chosen, strict=True))
        return images, labels

    @staticmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        """As the paper trains classifiers: at the start of epoch T and every 1 + 5T steps from there."""
        return step_of_epoch % (1 + 5 * epoch) == 0


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


def train(
    recipe: str | ClassificationRecipe = "quickstart",
    *,
    output: str | Path | None = None,
    callback: Callback | None = None,
    **changes: Any,
) -> TrainedRun:
    """Train as a recipe says, in a new run directory (``runs/NAME-1`` or the next free number).

    Args:
        recipe: name of a shipped one, a .yaml file, or the settings themselves.
        output: the run directory; it must not hold anything yet.
        callback: watches the run.
        changes: settings other than the recipe's, as in ``train("cifar10", epochs=5)``.
    """
    return run.train(ClassificationTask, recipe, output=output, callback=callback, **changes)


def resume(directory: str | Path, *, callback: Callback | None = None) -> TrainedRun:
    """Resume an interrupted run from its last checkpoint; it ends as if it had not been interrupted."""
    return run.resume(ClassificationTask, directory, callback=callback)
