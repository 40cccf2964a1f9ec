"""Batches made by worker processes.

A worker's exception would arrive wrapped in a traceback; a user's mistake, such as a damaged image, arrives as itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ..errors import listed
from .images import ImageError

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with how many of how many samples are done."""

Batch = tuple[Tensor, Tensor]
"""Normalised images (b, C, H, W), float32, and labels (b,), int64."""


class DataError(ValueError):
    """Data that is not as it should be, which shows only when it is read."""


UNREADABLE = (ImageError, FileNotFoundError)
"""Errors of an image that may be skipped."""

USER_ERRORS = (DataError, ImageError, OSError)
"""Errors whose message is all that a user needs."""


NAMED_IMAGES = 3
"""Skipped images that a message names."""


def describe_skipped(names: Sequence[str]) -> str:
    """``1 image could not be read and was skipped: cat/1.png``; of several, the first few are named."""
    what = "image could not be read and was" if len(names) == 1 else "images could not be read and were"
    return f"{len(names)} {what} skipped: {listed(names, NAMED_IMAGES)}"


class LabelledBatch(NamedTuple):
    """A :data:`Batch`, and the names of the images that were skipped while it was made."""

    images: Tensor
    labels: Tensor
    skipped: tuple[str, ...]

    @classmethod
    def collate(cls, samples: Sequence[tuple[Tensor, int]], skipped: Iterable[str]) -> LabelledBatch:
        """Images (C, H, W) with their labels, stacked; there may be none."""
        images = [image for image, _ in samples]
        labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        return cls(torch.stack(images) if images else torch.empty(0), labels, tuple(skipped))


class BatchLoader(Generic[T]):
    """``make(request)`` for each of ``requests``, in their order.

    Workers live on from one iteration to the next, and ``requests`` may be changed in place in between.
    """

    def __init__(self, make: Callable[[Any], T], requests: Sequence[Any], workers: int) -> None:
        self._loader = _data_loader(_RequestDataset(make), workers, sampler=requests, persistent_workers=workers > 0)

    def __iter__(self) -> Iterator[T]:
        return _reraise_errors(self._loader)


class StreamLoader(Generic[T]):
    """Batches of ``stream(worker, workers)``, which each worker runs with its own number, taken from them in turn.

    Without worker processes, this one is worker 0 of 1.
    """

    def __init__(self, stream: Callable[[int, int], Iterator[T]], workers: int) -> None:
        self._loader = _data_loader(_StreamDataset(stream), workers)

    def __iter__(self) -> Iterator[T]:
        return _reraise_errors(self._loader)


class _RequestDataset(Dataset[Any]):
    """Users' mistakes are returned, not raised."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._make(request)
        except USER_ERRORS as error:
            return error


class _StreamDataset(IterableDataset[Any]):
    """Users' mistakes are yielded, not raised."""

    def __init__(self, stream: Callable[[int, int], Iterator[Any]]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        try:
            yield from self._stream(worker, workers)
        except USER_ERRORS as error:
            yield error


def _data_loader(dataset: Dataset[Any], workers: int, **options: Any) -> DataLoader[Any]:
    """Items of ``dataset`` as they are; a generator of its own keeps it from drawing from the global one."""
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
        **options,
    )


def _unchanged(item: T) -> T:
    return item


def _start_worker(worker: int) -> None:
    """One thread each. Signals to the whole group of processes are left to the main one, which then still has batches.

    Only the main process ends its workers, also by SIGTERM as it exits.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _reraise_errors(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's items; one that is an exception is raised."""
    for item in loader:
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # its traceback holds this frame: a cycle, in which workers would outlive the loader
        yield item
