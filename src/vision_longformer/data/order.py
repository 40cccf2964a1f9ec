"""Which samples an epoch shows, in which order, and which of them belong to which process.

Only arithmetic and the seed: a place in a run can be returned to without going through what came before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import derive


@dataclass(frozen=True)
class Process:
    """One of the processes that train together."""

    rank: int = 0
    count: int = 1


@dataclass(frozen=True)
class Batching:
    """How an epoch is cut: global batch ``k`` is positions ``[k * batch, (k + 1) * batch)``.

    Processes take consecutive parts of it, and each cuts its part into ``accumulate`` micro-batches; an optimiser
    step therefore sees the same samples however many processes there are.
    """

    batch: int
    accumulate: int
    process: Process

    def __post_init__(self) -> None:
        parts = self.process.count * self.accumulate
        if self.batch % parts:
            raise ValueError(
                f"batch_size is {self.batch}; it must be divisible by {parts} "
                f"(processes: {self.process.count}, accumulate: {self.accumulate})"
            )

    @property
    def micro_batch(self) -> int:
        """Samples that a process takes at once."""
        return self.batch // self.process.count // self.accumulate

    def micro_batches(self, samples: int) -> int:
        """Micro-batches of a process in an epoch of so many samples; refuses less than a whole global batch."""
        if samples < self.batch:
            raise ValueError(f"batch_size is {self.batch}, but there are only {samples} images to train on")
        return samples // self.batch * self.accumulate

    def positions(self, number: int) -> range:
        """Positions in the epoch of this process's micro-batch ``number``."""
        step, part = divmod(number, self.accumulate)
        start = step * self.batch + (self.process.rank * self.accumulate + part) * self.micro_batch
        return range(start, start + self.micro_batch)


def epoch_order(samples: int, seed: int, epoch: int, batch: int, repeats: int = 1) -> Tensor:
    """Indices of samples by position in the epoch, (samples,).

    With ``repeats``, that many positions of a global batch show the same image, and as many images less are shown in
    the epoch. Copies are ``batch / repeats`` apart, so that processes, if there are enough, have one each.
    """
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    order = torch.randperm(samples, generator=generator)
    if repeats == 1:
        return order
    copies = order[: -(-samples // repeats)].repeat_interleave(repeats)[:samples]
    dealt = [part[copy::repeats] for part in copies.split(batch) for copy in range(repeats)]
    return torch.cat(dealt)
