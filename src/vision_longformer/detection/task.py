"""Detection as the training loop sees it: batches, losses, COCO's measures, the saved detector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..training.task import Tell
from .checkpoint import save_detector
from .evaluate import DetectionResult, evaluate_detector
from .loader import Batch, DetectionLoader, DetectionShare
from .models import build_detector
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
