"""Batches from worker processes: in order, changed requests heeded, and users' mistakes as they were raised."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import weakref
from collections.abc import Iterator

import pytest
import torch

from vision_longformer.data.images import ImageError
from vision_longformer.data.loading import BatchLoader, DataError, LabelledBatch, StreamLoader, describe_skipped


def _square(number: int) -> tuple[int, int]:
    """The square, and the process that made it."""
    if number < 0:
        raise DataError(f"{number} is negative")
    return number * number, os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_requests_are_made_in_order(workers: int) -> None:
    requests = [3, 1, 2, 5]
    loader = BatchLoader(_square, requests, workers)
    first = list(loader)
    assert [square for square, _ in first] == [9, 1, 4, 25]
    requests[:] = [7, 6]
    second = list(loader)
    assert [square for square, _ in second] == [49, 36]
    processes = {process for _, process in first}
    assert processes >= {process for _, process in second}, "workers live on"
    assert len(processes) == max(1, workers)
    assert (os.getpid() in processes) == (workers == 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_users_mistakes_arrive_as_they_were_raised(workers: int) -> None:
    batches = iter(BatchLoader(_square, [2, -3, 4], workers))
    assert next(batches)[0] == 4
    with pytest.raises(DataError, match=r"^-3 is negative$"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_other_mistakes_are_not_hidden(workers: int) -> None:
    with pytest.raises(TypeError):
        list(BatchLoader(_square, [2, "three"], workers))


def test_workers_leave_signals_to_the_main_process() -> None:
    """A SIGTERM of another process, such as ``timeout``, does not end them; that of the main process does."""
    loader = BatchLoader(_square, range(100), 1)
    batches = iter(loader)
    (worker,) = {next(batches)[1]}
    subprocess.run(["kill", str(worker)], check=True)
    assert [square for square, _ in batches] == [number**2 for number in range(1, 100)]
    (process,) = (process for process in multiprocessing.active_children() if process.pid == worker)
    process.terminate()
    process.join(10)
    assert process.exitcode == 0


def _numbers(worker: int, workers: int) -> Iterator[int]:
    """Multiples of ten of each worker's own hundred; the third is unreadable."""
    for index in range(3):
        if worker == 1 and index == 2:
            raise ImageError("no number 120")
        yield 100 * worker + 10 * index + workers


def test_streams_of_workers_are_taken_in_turn() -> None:
    assert list(StreamLoader(_numbers, 0)) == [1, 11, 21]
    batches = iter(StreamLoader(_numbers, 2))
    assert [next(batches) for _ in range(5)] == [2, 102, 12, 112, 22]
    with pytest.raises(ImageError, match=r"^no number 120$"):
        next(batches)


def _threads(request: int) -> int:
    return torch.get_num_threads()


def test_workers_have_one_thread_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    assert list(BatchLoader(_threads, [0, 1], 2)) == [1, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_end_with_their_loader() -> None:
    """At once, not when cycles of references are collected; a mistake that was raised makes none."""
    loader = BatchLoader(_square, [1, -2], 1)
    with pytest.raises(DataError):
        list(loader)
    gc.disable()
    try:
        gone = weakref.ref(loader._loader)
        del loader
        assert gone() is None
    finally:
        gc.enable()


def test_collate() -> None:
    images, labels, skipped = LabelledBatch.collate([(torch.zeros(3, 2, 2), 4), (torch.ones(3, 2, 2), 1)], ["a", "b"])
    assert (images.shape, images[1].min(), labels.tolist(), skipped) == ((2, 3, 2, 2), 1, [4, 1], ("a", "b"))
    assert labels.dtype == LabelledBatch.collate([], ["a"]).labels.dtype == torch.int64
    assert len(LabelledBatch.collate([], ["a"]).labels) == 0


def test_skipped_images_in_words() -> None:
    assert describe_skipped(["cat/1.png"]) == "1 image could not be read and was skipped: cat/1.png"
    assert describe_skipped(["a", "b"]) == "2 images could not be read and were skipped: a, b"
    assert describe_skipped([*"abcde"]) == "5 images could not be read and were skipped: a, b, c and 2 more"
