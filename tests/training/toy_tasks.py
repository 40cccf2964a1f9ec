"""Small tasks for the tests of training: a linear model, whose steps are worked out by hand, and a small backbone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vision_longformer import ModelConfig, StageConfig, VisionLongformer
from vision_longformer.data.loading import Progress
from vision_longformer.data.randomness import derive_seed, seeded
from vision_longformer.models import config as cfg
from vision_longformer.training.callbacks import Callback
from vision_longformer.training.distributed import make_accelerator
from vision_longformer.training.loop import BackboneSchedule, TrainingLoop, total_steps
from vision_longformer.training.recipe import BackboneSettings, TrainSettings
from vision_longformer.training.run_directory import RunDirectory
from vision_longformer.training.task import TrainingTask

START = (0.5, -1.0, 0.25)
"""Two weights and the bias that the linear model starts from."""


class LinearTask(TrainingTask):
    """Half the mean squared error of a linear model, in float64.

    ``inputs`` (micro-batches, samples, 2) and ``targets`` (micro-batches, samples) are those of the whole run, in
    order. The weights that each loss, evaluation and saved model sees are noted as (weight, weight, bias).
    """

    best_metric = "score"

    def __init__(
        self, inputs: Tensor, targets: Tensor, *, batches_per_epoch: int, scores: Sequence[float] | None = None
    ) -> None:
        self.model = nn.Linear(2, 1).double()
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([START[:2]]))
            self.model.bias.fill_(START[2])
        self.inputs, self.targets, self.batches_per_epoch, self.scores = inputs, targets, batches_per_epoch, scores
        self.weights_in_loss: list[list[float]] = []
        self.weights_in_evaluate: list[list[float]] = []
        self.saved: list[tuple[str, list[float]]] = []

    def weights(self) -> list[float]:
        return [*self.model.weight.detach().flatten().tolist(), *self.model.bias.tolist()]

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(epoch * self.batches_per_epoch + start, (epoch + 1) * self.batches_per_epoch):
            yield self.inputs[index], self.targets[index]

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], micro_batch_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.weights_in_loss.append(self.weights())
        inputs, targets = batch
        return (model(inputs)[:, 0] - targets).square().mean() / 2, {}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        self.weights_in_evaluate.append(self.weights())
        return {"score": self.scores[len(self.weights_in_evaluate) - 1] if self.scores else 0.0}

    def save(self, path: Path) -> None:
        self.saved.append((path.name, self.weights()))
        path.write_text(json.dumps(self.weights()))

    def draw(self, folder: Path) -> None:
        raise AssertionError("the loop itself draws nothing")

    @staticmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        return False


class FixedLossTask(LinearTask):
    """The losses of the micro-batches are given, and "double" is twice each of them."""

    def __init__(self, losses: Sequence[float], **options: Any) -> None:
        super().__init__(torch.zeros(len(losses), 1, 2), torch.zeros(len(losses), 1), **options)
        self.losses = losses

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], micro_batch_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.losses[micro_batch_index] + 0 * model(batch[0].double()).sum()
        return loss, {"double": 2 * loss}


def small_config() -> ModelConfig:
    """A Longformer stage and a Performer stage, so that random shift and new features both matter."""
    stages = (
        StageConfig(8, 1, 2, 2, cfg.Longformer(window=2), 1),
        StageConfig(8, 1, 2, 2, cfg.Performer(4), 0, "absolute"),
    )
    return ModelConfig(stages, img_size=(8, 8), in_chans=1, num_classes=3, drop_path_rate=0.3, neighbours="random")


class ToyTask(TrainingTask):
    """A small Vision Longformer on random images with random labels, a function of epoch and batch."""

    best_metric = "score"

    def __init__(self, batches_per_epoch: int = 8) -> None:
        with seeded(5):
            self.model = VisionLongformer(small_config())
        self.batches_per_epoch = batches_per_epoch
        self.evaluations = 0
        self.spoil: int | None = None

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, self.batches_per_epoch):
            generator = torch.Generator().manual_seed(derive_seed(1, epoch, index))
            images = torch.randn(2, 1, 8, 8, generator=generator)
            yield images, torch.randint(3, (2,), generator=generator)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], micro_batch_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * (float("nan") if micro_batch_index == self.spoil else 1), {"accuracy": torch.tensor(50.0)}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        self.evaluations += 1
        return {"score": float(self.model.head.weight.detach().double().sum())}

    def save(self, path: Path) -> None:
        path.write_text(str(float(self.model.head.weight.detach().double().sum())))

    def draw(self, folder: Path) -> None:
        raise AssertionError("the loop itself draws nothing")

    @staticmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        return step_of_epoch % (1 + 5 * epoch) == 0


@dataclass(frozen=True, kw_only=True)
class ToyRecipe(BackboneSettings):
    task: ClassVar[str] = "toy"
    run_prefix: ClassVar[str] = "small-"
    generated: ClassVar[Mapping[str, Mapping[str, Any]]] = {"brief": {"epochs": 1, "batch_size": 2, "seed": 6}}


class RecipeTask(ToyTask):
    """The toy task, built from a recipe as :func:`train` builds tasks; the last one built is ``built``."""

    recipe_type = ToyRecipe
    curves = ("score",)
    built: ClassVar[RecipeTask]

    def __init__(self, recipe: ToyRecipe, accelerator: Accelerator, run: Path | None) -> None:
        super().__init__(batches_per_epoch=4)
        self.recipe = recipe
        self.drawn: list[Path] = []
        type(self).built = self

    def evaluate(self, progress: Progress) -> dict[str, float]:
        progress(1, 1)
        return super().evaluate(progress)

    def draw(self, folder: Path) -> None:
        self.drawn.append(folder)


BRIEF = ToyRecipe(epochs=1, batch_size=2)


class SignalAt(Callback):
    """Sends a signal to this process after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def training_loop(
    folder: Path, task: TrainingTask, settings: TrainSettings, callback: Callback | None = None
) -> TrainingLoop:
    """A run of ``task`` in a new directory, or the one to resume if there is a run already."""
    accelerator = make_accelerator(settings)
    if accelerator.is_main_process and not folder.exists():
        run = RunDirectory.create(folder, "seed: 0\n")
    else:
        run = RunDirectory(folder)
    steps = total_steps(settings, task.batches_per_epoch)
    schedule = BackboneSchedule(task.model, settings.seed, round(0.75 * steps), task.redraws_features)
    return TrainingLoop(task, settings, run, accelerator, schedule, callback or Callback())


class StuckTask(FixedLossTask):
    """Its second step never ends."""

    def loss(self, model: nn.Module, batch: Any, micro_batch_index: int) -> tuple[Tensor, dict[str, Tensor]]:
        if micro_batch_index == 1:
            Path("stuck").touch()
            while True:
                time.sleep(0.05)
        return super().loss(model, batch, micro_batch_index)


def train_until_stuck() -> None:
    """In a process of its own: in ``run`` of its working directory, with a file ``stuck`` when it is."""
    training_loop(Path("run"), StuckTask([1.0] * 4, batches_per_epoch=4), TrainSettings(epochs=1, batch_size=1)).train()
