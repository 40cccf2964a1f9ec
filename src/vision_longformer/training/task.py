"""What is trained: a model with its data, as the loop, the callbacks and the checkpoints see it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..data.loading import Progress, describe_skipped
from .recipe import BackboneSettings

logger = logging.getLogger(__name__)


class TrainingError(ValueError):
    """A run that cannot continue; its last checkpoint is intact."""


class SkippedImages:
    """The images that a run could not read, over all its processes; each is named once, when it is first skipped."""

    def __init__(self) -> None:
        self._named: dict[str, set[str]] = {"training": set(), "evaluation": set()}

    def report(self, training: Collection[str], evaluation: Collection[str]) -> dict[str, float]:
        """Name those that are new, and count them all for the results of an evaluation.

        ``training``: names of those that this process could not train on so far; ``evaluation``: of those that no
        process could evaluate now. ``skipped`` and ``skipped_in_training`` both count images, each once.
        """
        found = {"training": set(gather_object(list(training))), "evaluation": set(evaluation)}
        for part, names in found.items():
            new = sorted(names - self._named[part])
            if new and PartialState().is_main_process:
                logger.warning("%s: %s", part, describe_skipped(new))
            self._named[part] |= names
        return {"skipped": len(found["evaluation"]), "skipped_in_training": len(found["training"])}


class TrainingTask(ABC):
    """One object per run. Building it from a recipe opens the data and makes the model.

    Batches are whatever the task makes of them; the loop does not look inside.
    """

    recipe_type: ClassVar[type[BackboneSettings]]
    best_metric: ClassVar[str]
    """The result of :meth:`evaluate` by which the best checkpoint is chosen."""
    curves: ClassVar[tuple[str, ...]]
    """The results of :meth:`evaluate` that are drawn as curves."""

    model: nn.Module
    batches_per_epoch: int
    eval_group: ProcessGroup | None = None
    """The processes among which evaluation images are shared out; None for all."""

    @abstractmethod
    def __init__(self, recipe: Any, accelerator: Accelerator, run: Path | None) -> None:
        """``run`` is the directory of a run to resume, and None for a new one."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that a recipe with ``auto`` leaves open, from the data and the machine."""
        raise ValueError(f"{cls.recipe_type.task} has no recipes with auto")

    def files(self) -> dict[str, str]:
        """Texts that a new run directory keeps beside the recipe, by file name: the split, if the task made one."""
        return {}

    def summary(self) -> dict[str, str]:
        """What is about to be trained, and on what, for people to look at before the first step."""
        return {}

    def divide_images(self, mesh: DeviceMesh) -> None:
        """Let the processes along the dimension ``spatial`` of a mesh share each image."""
        raise ValueError(f"{self.recipe_type.task} cannot divide images over processes; leave out spatial")

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """This process's micro-batches of an epoch from number ``start`` on; the same whenever they are asked for."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, micro_batch_index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a micro-batch, and values to log; ``micro_batch_index`` counts those of the whole run."""

    @abstractmethod
    def evaluate(self, progress: Progress) -> dict[str, float]:
        """Results of the model as it is, the same in every process."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the model as it is, for use after training, in place of an earlier one."""

    @abstractmethod
    def draw(self, folder: Path) -> None:
        """Pictures of what the best model does, after the evaluation that made it the best; main process only."""

    @staticmethod
    @abstractmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        """Whether Performer features are drawn anew before a step; all three are counted from 0."""
