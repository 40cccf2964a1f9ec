"""How good predictions are: accuracy, loss and confusions, from sums that add up over batches and processes."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

MAX_CONFUSION_CLASSES = 4096
"""Classes up to which confusions are counted; the matrix of ImageNet-21K would take 3.8 GB."""


class Result(NamedTuple):
    """An evaluation of ``samples`` images.

    Accuracies are in percent, the loss is the mean cross-entropy; without samples they are NaN. ``right`` and ``seen``
    count by true class, (classes,). ``confusion`` counts true × predicted classes, (classes, classes), and is None
    beyond ``MAX_CONFUSION_CLASSES`` classes. ``skipped`` names the images that could not be read, ``classes`` the
    classes, if known.
    """

    samples: int
    top1: float
    top5: float
    loss: float
    right: Tensor
    seen: Tensor
    confusion: Tensor | None
    skipped: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def accuracies(self) -> dict[str, float]:
        """By name; top-5 says nothing about five classes or fewer, and is left out."""
        return {"top1": self.top1} if len(self.seen) <= 5 else {"top1": self.top1, "top5": self.top5}

    def per_class(self) -> list[tuple[float, int]]:
        """Accuracy in percent and number of samples of each class."""
        counts = zip(self.right.tolist(), self.seen.tolist(), strict=True)
        return [(_percent(right, seen), seen) for right, seen in counts]


class Meter:
    """Sums over samples from which a :class:`Result` follows; they stay on ``device``, so that nothing waits for it."""

    def __init__(self, classes: int, device: torch.device | str) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.in_top5 = torch.zeros((), dtype=torch.int64, device=device)
        self.right = torch.zeros(classes, dtype=torch.int64, device=device)
        self.seen = torch.zeros_like(self.right)
        self.confusion = self.right.new_zeros(classes, classes) if classes <= MAX_CONFUSION_CLASSES else None

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

    def reduce(self, group: distributed.ProcessGroup | None = None) -> None:
        """Make the sums those over all processes, or those of a group."""
        if not distributed.is_initialized():
            return
        for part in (self.loss, self.in_top5, self.right, self.seen, self.confusion):
            if part is not None:
                distributed.all_reduce(part, group=group)

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
        )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else nan
