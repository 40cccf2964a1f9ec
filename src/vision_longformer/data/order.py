"""Which samples an epoch has, in which order, and which of them belong to which process.

Only arithmetic and the seed: any micro-batch of a run can be named without going through those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import ceil_div
from .randomness import derive_seed


@dataclass(frozen=True)
class Process:
    """One of the processes that work together."""

    rank: int = 0
    count: int = 1


SINGLE_PROCESS = Process()


class MicroBatch(NamedTuple):
    """What a process takes at once: an epoch, and positions in its order."""

    epoch: int
    positions: range


@dataclass(frozen=True)
class Batching:
    """How an epoch is cut: global batch ``k`` is positions ``[k * batch_size, (k + 1) * batch_size)``.

    Processes take consecutive parts of it, and each cuts its part into ``accumulate`` micro-batches; an optimiser
    step therefore sees the same samples however many processes there are. Where the batch cannot be divided evenly,
    micro-batches differ by ``multiple_of`` samples, of which each has a multiple.
    """

    batch_size: int
    accumulate: int
    process: Process
    multiple_of: int = 1

    def __post_init__(self) -> None:
        least = self._parts * self.multiple_of
        if self.batch_size < least:
            processes = f"{self.process.count} process{'es' if self.process.count > 1 else ''}"
            raise ValueError(
                f"batch_size {self.batch_size} cannot be shared by {processes} × accumulate {self.accumulate}; use "
                f"{least} or more"
            )

    @property
    def _parts(self) -> int:
        """Micro-batches of a global batch, over all processes."""
        return self.process.count * self.accumulate

    @property
    def micro_batch_size(self) -> int:
        """Samples that a process takes at once, at most."""
        return ceil_div(self.batch_size // self.multiple_of, self._parts) * self.multiple_of

    def micro_batches(self, samples: int) -> int:
        """Micro-batches of a process in an epoch of so many samples; refuses less than a whole global batch."""
        if samples < self.batch_size:
            raise ValueError(f"batch_size is {self.batch_size}, but there are only {samples} images to train on")
        return samples // self.batch_size * self.accumulate

    def part(self, micro_batch_index: int) -> tuple[int, int]:
        """Which global batch one of this process's micro-batches belongs to, and which part of it that is."""
        step, part = divmod(micro_batch_index, self.accumulate)
        return step, self.process.rank * self.accumulate + part

    def positions(self, micro_batch_index: int) -> range:
        """Positions in the epoch of one of this process's micro-batches, counted from 0 in the epoch."""
        step, part = self.part(micro_batch_index)
        units = self.batch_size // self.multiple_of
        start, stop = (self.multiple_of * (units * k // self._parts) for k in (part, part + 1))
        return range(step * self.batch_size + start, step * self.batch_size + stop)

    def weight(self, micro_batch_index: int) -> float:
        """Samples of a micro-batch relative to the mean over all: 1 where the batch is divided evenly."""
        return len(self.positions(micro_batch_index)) * self._parts / self.batch_size


def epoch_order(
    samples: int, seed: int, epoch: int, batch_size: int, repeats: int = 1, balanced: Sequence[int] | None = None
) -> Tensor:
    """Indices of samples by position in the epoch, (samples,).

    With the labels of all samples as ``balanced``, every class has as many positions, or one more: images of rare
    classes come several times, and of frequent ones a part in each epoch.

    With ``repeats``, that many positions of a global batch have the same image, and the epoch has accordingly fewer
    images. Copies are ``batch_size / repeats`` apart, so that processes, if there are enough, have one each.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    order = torch.randperm(samples, generator=generator)
    if balanced is not None:
        order = _balance(order, torch.as_tensor(balanced), generator)
    if repeats == 1:
        return order
    copies = order[: ceil_div(samples, repeats)].repeat_interleave(repeats)[:samples]
    dealt = [part[copy::repeats] for part in copies.split(batch_size) for copy in range(repeats)]
    return torch.cat(dealt)


def _balance(order: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """``order``, (samples,), with each class's part cut, or repeated, to an equal share of the positions."""
    classes = labels.unique()
    shares = torch.full((len(classes),), len(order) // len(classes))
    shares[torch.randperm(len(classes), generator=generator)[: len(order) % len(classes)]] += 1
    parts = []
    for label, share in zip(classes.tolist(), shares.tolist(), strict=True):
        own = order[labels[order] == label]
        parts.append(own.repeat(ceil_div(share, len(own)))[:share])
    balanced = torch.cat(parts)
    return balanced[torch.randperm(len(balanced), generator=generator)]
