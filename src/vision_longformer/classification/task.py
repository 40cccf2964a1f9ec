"""Classification as a training task: data, mixing, the loss, evaluation, the saved classifier and its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint import load, save
from ..data.loading import Progress
from ..data.randomness import derive_seed, seeded
from ..data.shards import ShardSource
from ..data.sources import Source
from ..data.split import SPLIT_FILE
from ..large.spatial import check_divisible, spatial_parallel
from ..models import VisionLongformer
from ..training import run
from ..training.callbacks import Callback
from ..training.distributed import replica
from ..training.run import TrainedRun
from ..training.task import SkippedImages, TrainingTask
from .dataset import build_eval_set, build_train_set, open_splits
from .estimate import run_summary
from .evaluate import evaluate_model
from .metrics import Result
from .model import initial_model
from .own_images import derive_settings
from .pictures import draw_confusion, draw_predictions
from .preprocessing import recipe_preprocessing
from .recipe import ClassificationRecipe

NUM_PICTURES = 40
"""Images on the page of predictions."""


class ClassificationTask(TrainingTask):
    """A classifier with its training and evaluation images."""

    recipe_type = ClassificationRecipe
    best_metric = "top1"
    curves = ("top1", "top5")
    model: VisionLongformer

    def __init__(self, recipe: ClassificationRecipe, accelerator: Accelerator, run: Path | None = None) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        process = replica(accelerator, recipe)
        self.batching = recipe.batching(process)
        self.splits = open_splits(recipe, run)
        classes = self.splits.train.classes
        self.model, self.starts_from = initial_model(recipe, classes)
        if recipe.spatial > 1:
            check_divisible(self.model, recipe.spatial, self.model.config.img_size)
        self.preprocessing = recipe_preprocessing(recipe, self.model.config, classes)
        self.train_set = build_train_set(self.splits.train, recipe, self.preprocessing, process)
        self.eval_set = build_eval_set(
            self.splits.evaluation,
            self.preprocessing,
            batch_size=recipe.eval_batch_size or self.batching.micro_batch_size,
            workers=0 if recipe.in_memory else recipe.workers,
            skip_bad_images=recipe.skip_bad_images,
            process=process,
        )
        self.batches_per_epoch = self.train_set.batches_per_epoch
        self.result: Result | None = None
        self._skipped = SkippedImages()
        self._weights = _class_weights(self.splits.train).to(accelerator.device) if recipe.balance == "loss" else None
        self._mix = _mixing(recipe, len(classes))

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derive_settings(values)

    def files(self) -> dict[str, str]:
        return {} if self.splits.split is None else {SPLIT_FILE: self.splits.split.to_json()}

    def summary(self) -> dict[str, str]:
        return run_summary(self.recipe, self.splits, self.starts_from)

    def divide_images(self, mesh: DeviceMesh) -> None:
        spatial_parallel(self.model, mesh["spatial"])
        self.eval_group = mesh.get_group("data")

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.accelerator.device
        for images, labels in self.train_set.batches(epoch, start):
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], micro_batch_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images, target = batch
        if self._mix is not None:
            with seeded(derive_seed(self.recipe.seed, "mix", *self.batching.part(micro_batch_index))):
                images, target = self._mix(images, target)
        logits = model(images)
        smoothing = 0.0 if self._mix else self.recipe.smoothing
        losses = F.cross_entropy(logits.float(), target, self._weights, reduction="none", label_smoothing=smoothing)
        label = target.argmax(1) if target.dim() == 2 else target
        return losses.mean(), {"accuracy": 100 * (logits.argmax(1) == label).float().mean()}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        device, precision = self.accelerator.device, self.recipe.precision
        self.result = evaluate_model(self.model, self.eval_set, device, precision, progress, self.eval_group)
        results = {**self.result.accuracies, "loss": self.result.loss}
        if self.recipe.skip_bad_images:
            results |= self._skipped.report(self.train_set.skipped, self.result.skipped)
        return results

    def save(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.accelerator.is_main_process:
            whole = VisionLongformer(self.model.config)
            whole.load_state_dict(state)
            info = {"preprocessing": self.preprocessing.to_dict()}
            save(whole, path, info=info, overwrite=True)

    def draw(self, folder: Path) -> None:
        """The confusion matrix of the evaluation just made and a page of predictions."""
        classes = self.preprocessing.classes
        if self.result is not None and self.result.confusion is not None:
            draw_confusion(self.result.confusion, classes, folder / "confusion.png", overwrite=True)
        images, labels = self.eval_set.examples(NUM_PICTURES)
        if not len(labels):
            return
        with torch.no_grad():
            likeliest = load(folder / "best.safetensors")(images).softmax(1).max(1)
        pixels = self.preprocessing.denormalise(images)
        path = folder / "predictions.png"
        total = None if self.result is None else self.result.samples
        draw_predictions(
            pixels, labels, likeliest.indices, likeliest.values, classes, path, total=total, overwrite=True
        )

    @staticmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        """As the paper trains classifiers: at the start of epoch T and every 1 + 5T steps from there."""
        return step_of_epoch % (1 + 5 * epoch) == 0


def _class_weights(images: Source | ShardSource) -> Tensor:
    """Of each class, (classes,), the inverse of its frequency, so that the mean over all images is 1."""
    assert not isinstance(images, ShardSource)  # build_train_set refuses to balance shards
    counts = torch.bincount(torch.as_tensor(images.labels), minlength=len(images.classes))
    return len(images) / (len(images.classes) * counts.float())


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
    recipe: str | ClassificationRecipe | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    **changes: Any,
) -> TrainedRun:
    """Train as a recipe says, in a new run directory (``runs/NAME-1`` or the next free number).

    Args:
        recipe: name of a shipped one, a .yaml file, or the settings themselves; by default own_images if ``data`` is
            among the changes, and otherwise quickstart.
        output: the run directory; it must not hold anything yet, but for ``resume``.
        resume: resume the run that the same call has started before, if there is one.
        callback: watches the run.
        changes: settings other than the recipe's, as in ``train("cifar10", epochs=5)``.
    """
    return run.train(
        ClassificationTask,
        recipe or ClassificationRecipe.default_name(changes),
        output=output,
        resume=resume,
        callback=callback,
        **changes,
    )


def resume(directory: str | Path, *, epochs: int | None = None, callback: Callback | None = None) -> TrainedRun:
    """Resume an interrupted run from its last checkpoint; it ends as if it had not been interrupted.

    With ``epochs``, a finished run is trained further, to that many epochs in all; its schedule starts anew.
    """
    return run.resume(ClassificationTask, directory, epochs=epochs, callback=callback)
