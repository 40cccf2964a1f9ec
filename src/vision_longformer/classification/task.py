"""Classification as the training loop sees it: batches, mixing, the loss, evaluation, the saved classifier."""

from __future__ import annotations

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

from ..checkpoint import save
from ..model import VisionLongformer
from ..training.randomness import derive, seeded
from ..training.task import Tell
from .data import EvalData, TrainData
from .evaluate import AUTOCAST, evaluate_model
from .metrics import Result
from .preprocessing import Preprocessing
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
