"""What a training loop sees of the data, whatever it is read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Normalised images (b, C, H, W), float32, and labels (b,), int64."""


class DataError(ValueError):
    """Data that is not as it should be, which is found out when it is read."""


@dataclass(frozen=True)
class Process:
    """One of the processes that train together."""

    rank: int = 0
    count: int = 1


class TrainData(Protocol):
    """Augmented images of a process, in an order that its seed decides.

    - ``batches_per_epoch``: micro-batches of the process in an epoch, the same for all; the incomplete last is dropped.
    - ``skipped``: images that could not be read so far, and were replaced.
    """

    classes: tuple[str, ...]
    batches_per_epoch: int
    skipped: int

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch from micro-batch ``start`` on; one such iteration at a time."""
        ...


class EvalData(Protocol):
    """A process's share of a set; over all processes every sample comes exactly once.

    - ``size``: samples over all processes; ``skipped``: those of this process that could not be read and were left out.

    The shares differ by a sample at most (of shards: by a shard), and so some processes may have a batch less.
    """

    classes: tuple[str, ...]
    skipped: int

    @property
    def size(self) -> int: ...

    def batches(self) -> Iterator[Batch]:
        """All batches of this process; the last may be smaller."""
        ...
