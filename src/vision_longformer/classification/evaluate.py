"""How good predictions are: accuracy, loss and confusions, from sums that add up over batches and processes.

How good a classifier is on a data set, over any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.loading import Progress
from ..data.order import Process
from ..errors import check_at_least
from ..export.runtime import is_exported
from .dataset import EvalData, class_names, eval_data
from .model import open_classifier
from .recipe import ClassificationRecipe

MOST_CONFUSABLE = 4096
"""Classes up to which confusions are counted; the matrix of ImageNet-21K would take 3.8 GB."""


class Result(NamedTuple):
    """An evaluation of ``samples`` images.

    Accuracies are in percent, the loss is the mean cross-entropy; without samples they are NaN. ``right`` and ``seen``
    count by true class, (classes,). ``confusion`` counts true × predicted classes, (classes, classes), and is None
    beyond ``MOST_CONFUSABLE`` classes. ``skipped`` images could not be read. ``classes`` are names, if known.
    """

    samples: int
    top1: float
    top5: float
    loss: float
    right: Tensor
    seen: Tensor
    confusion: Tensor | None
    skipped: int = 0
    classes: tuple[str, ...] = ()

    def per_class(self) -> list[tuple[float, int]]:
        """Accuracy in percent and number of samples of each class."""
        counts = zip(self.right.tolist(), self.seen.tolist(), strict=True)
        return [(_percent(right, seen), seen) for right, seen in counts]


class Score:
    """Sums over samples from which a :class:`Result` follows; they stay on ``device``, so that nothing waits for it."""

    def __init__(self, classes: int, device: torch.device | str) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.in_top5 = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros_like(self.in_top5)
        self.right = torch.zeros(classes, dtype=torch.int64, device=device)
        self.seen = torch.zeros_like(self.right)
        self.confusion = self.right.new_zeros(classes, classes) if classes <= MOST_CONFUSABLE else None

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (b, classes) and true classes (b,). Of equal logits, the first class wins."""
        best = logits.sort(dim=1, descending=True, stable=True).indices[:, :5]
        hits = best == labels[:, None]
        self.loss += F.cross_entropy(logits.double(), labels, reduction="sum")
        self.in_top5 += hits.sum()
        self.right.index_add_(0, labels, hits[:, 0].long())
        self.seen.index_add_(0, labels, torch.ones_like(labels))
        if self.confusion is not None:
            pairs = labels * len(self.seen) + best[:, 0]
            self.confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))

    def reduce(self) -> None:
        """Make the sums those over all processes."""
        if not distributed.is_initialized():
            return
        for part in (self.loss, self.in_top5, self.skipped, self.right, self.seen, self.confusion):
            if part is not None:
                distributed.all_reduce(part)

    def result(self) -> Result:
        """What the sums amount to."""
        samples = int(self.seen.sum())
        return Result(
            samples,
            top1=_percent(int(self.right.sum()), samples),
            top5=_percent(int(self.in_top5), samples),
            loss=float(self.loss) / samples if samples else nan,
            right=self.right.cpu(),
            seen=self.seen.cpu(),
            confusion=None if self.confusion is None else self.confusion.cpu(),
            skipped=int(self.skipped),
        )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else nan


AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By precision, the dtype that matrix products run in, or None for the model's own."""


def evaluate(
    checkpoint: str | Path,
    data: str = "fashion-mnist",
    split: str = "validation",
    *,
    size: int | None = None,
    batch_size: int = 64,
    workers: int = 2,
    precision: str = "fp32",
    skip_bad_images: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Accuracy and loss of a checkpoint on the ``split`` of ``data``, with its own preprocessing.

    Under ``torchrun``, each process takes a share, every image is counted once, and all return the whole result.

    Args:
        checkpoint: a .safetensors file of ours, or a .onnx or .pt2 file that was exported from one.
        data: as in recipes: a folder, .npz, .tar or .zip file, shards, or the built-in fashion-mnist.
        split: which part of it.
        size: side of the square that the model sees of each image; as in training if None.
        batch_size: images at a time in each process.
        workers: data-loading processes.
        precision: fp32, bf16 or fp16.
        skip_bad_images: leave out images that cannot be read, instead of stopping.
        progress: called with what is done and what there is in all.
    """
    if is_exported(checkpoint) and precision != "fp32":
        raise ValueError(f"{checkpoint} computes in the precision that it was exported with; leave out {precision}")
    model, preprocessing, named = open_classifier(checkpoint, size)
    check_at_least("batch_size", batch_size, 1)
    recipe = ClassificationRecipe(
        data=data,
        eval_split=split,
        eval_batch_size=batch_size,
        workers=workers,
        precision=precision,
        skip_bad_images=skip_bad_images,
    )
    if not named:
        preprocessing = replace(preprocessing, classes=_names_in_data(recipe, len(preprocessing.classes)))
    state = PartialState(cpu=not torch.cuda.is_available())
    share = eval_data(recipe, preprocessing, Process(state.process_index, state.num_processes))
    result = evaluate_model(model.to(state.device), share, state.device, AUTOCAST[precision], progress)
    if not result.samples:
        raise ValueError(f"none of the {result.skipped} images of {data} could be read")
    return result


def _names_in_data(recipe: ClassificationRecipe, count: int) -> tuple[str, ...]:
    """Names for a model that has learned none: those of the data, which must have as many classes."""
    return class_names(replace(recipe, train_split=recipe.eval_split, num_classes=count))


def evaluate_model(
    model: nn.Module,
    data: EvalData,
    device: torch.device,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Result:
    """Accuracy and loss of a model, over all processes; the model is left in the mode it was in.

    Without gradients, but not in inference mode: what the attention caches there could not be trained with later.
    """
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    training = plain.training
    score = Score(len(data.classes), device)
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    batches = data.batches() if processes == 1 else in_step(data.batches(), plain.config, device)
    plain.eval()
    done = 0
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            for images, labels in batches:
                logits = plain(images.to(device, non_blocking=True))
                score.add(logits[: len(labels)], labels.to(device, non_blocking=True))
                done += len(labels)
                if progress is not None:
                    progress(min(done * processes, data.size), data.size)
    finally:
        plain.train(training)
    score.skipped += data.skipped
    score.reduce()
    return score.result()._replace(classes=data.classes)


def in_step(
    batches: Iterable[tuple[Tensor, Tensor]], config: Any, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """As many batches in each process as in the one with the most, for running a sharded model is a joint effort.

    Those to spare are one image and no labels, to be run and not counted.
    """
    own = iter(batches)
    spare = torch.zeros(1, config.in_chans, *config.img_size), torch.zeros(0, dtype=torch.int64)
    while True:
        batch = next(own, None)
        left = torch.tensor(int(batch is not None), device=device)
        distributed.all_reduce(left)
        if not left:
            return
        yield spare if batch is None else batch
