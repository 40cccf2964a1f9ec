"""Batches made by worker processes.

Batches made by worker processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .images import ImageError

Progress = Callable[[int, int], None]
"""Called with how many of how many samples are done."""


class DataError(ValueError):
    """Data that is not as it should be, which is found out when it is read."""


UNREADABLE = (ImageError, FileNotFoundError)
"""Errors of an image that ``skip_bad_images`` passes over."""

USERS_MISTAKES = (DataError, ImageError, OSError)
"""Errors that are sentences, to be passed on as they are."""


Batch = tuple[Tensor, Tensor]
"""Normalised images (b, C, H, W), float32, and labels (b,), int64."""


class Loaded(NamedTuple):
    """Images (b, C, H, W), labels (b,), and how many images had to be passed over for them."""

    images: Tensor
    labels: Tensor
    skipped: int

    @classmethod
    def of(cls, samples: Sequence[tuple[Tensor, int]], skipped: int) -> Loaded:
        images = [image for image, _ in samples]
        labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        return cls(torch.stack(images) if images else torch.empty(0), labels, skipped)


class BatchDataset(Dataset[Any]):
    """Makes whole batches of what its sampler asks for.

    Users' mistakes are returned, not raised: a worker's exception would arrive wrapped in a traceback.
    """

    def __init__(self, make: Callable[[Any], Loaded]) -> None:
        self._make = make

    def __getitem__(self, wanted: Any) -> Loaded | Exception:
        try:
            return self._make(wanted)
        except USERS_MISTAKES as error:
            return error


def batch_loader(dataset: Dataset[Any], sampler: Iterable[Any] | None, workers: int) -> DataLoader[Any]:
    """Items of ``dataset`` as they are, in order; worker processes live on from one iteration to the next.

    Its own generator keeps it from drawing from, and so moving on, the global one.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0 and sampler is not None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
    )


def loaded(loader: Iterable[Loaded | Exception]) -> Iterator[Loaded]:
    """The loader's batches; what went wrong in a worker is raised here."""
    for item in loader:
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # its traceback holds this frame: a cycle, in which workers would outlive the loader
        yield item


def _start_worker(worker: int) -> None:
    """One thread each, and an interrupt from the keyboard is left to the main process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
