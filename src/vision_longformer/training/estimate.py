"""How long a run would take and in how much memory, scaled up from a trial step on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..geometry import ceil_div
from .loop import total_steps
from .optimizer import learning_rate
from .recipe import TrainSettings

EVALUATION_SHARE = 1 / 3
"""Time of an image in evaluation, which has no backward pass, as a part of that in training."""

REPEATED_BELOW = 2.0
"""Seconds of a step up to which a second one is measured: the first also pays for what happens once."""


class Trial(NamedTuple):
    """What an image takes in training: time of forward and backward, and of reading; activations that a process keeps
    in between."""

    seconds: float
    activation_bytes: float
    reading_seconds: float = 0.0


class Estimate(NamedTuple):
    """A run as planned; ``images`` are those a process holds at a time, ``rates`` are (epoch, learning rate)."""

    data: str
    epochs: float
    steps: int
    images: int
    trial: Trial
    seconds: float
    fixed_bytes: int
    rates: list[tuple[float, float]]

    @property
    def bytes(self) -> float:
        return self.fixed_bytes + self.images * self.trial.activation_bytes


def trial_step(model: nn.Module, step: Callable[[], Tensor], images: int = 1) -> Trial:
    """Measure ``step``, which returns the loss of so many images, forward and backward."""
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng():
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            seconds = _timed(step)
        if seconds < REPEATED_BELOW:
            seconds = _timed(step)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    activations = sum(size for pointer, size in saved.items() if pointer not in weights)
    return Trial(seconds / images, activations / images)


def _timed(step: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    step().backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def scale_up(
    settings: TrainSettings, model: nn.Module, data: str, batches_per_epoch: int, eval_images: int, trial: Trial
) -> Estimate:
    """The whole run from a trial; ``batches_per_epoch`` are a process's micro-batches."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    per_epoch, steps = batches_per_epoch // settings.accumulate, total_steps(settings, batches_per_epoch)
    evaluations = ceil_div(ceil_div(steps, per_epoch), settings.eval_every)
    loading = trial.reading_seconds / (min(settings.workers, os.cpu_count() or 1) or 1)
    overlaps = torch.cuda.is_available() and settings.workers  # a CPU does the one at the cost of the other
    training = max(trial.seconds, loading) if overlaps else trial.seconds + loading
    evaluating = EVALUATION_SHARE * trial.seconds + loading
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = 1 if settings.optimizer in ("sgd", "release_qhm") else 2
    warmup = settings.count_warmup(per_epoch)
    marks = sorted({0, min(warmup, steps - 1), steps // 4, steps // 2, 3 * steps // 4, steps - 1})
    return Estimate(
        data=data,
        epochs=steps / per_epoch,
        steps=steps,
        images=ceil_div(settings.batch_size * settings.spatial, settings.accumulate * processes),
        trial=trial._replace(activation_bytes=trial.activation_bytes / settings.spatial),
        seconds=(steps * settings.batch_size * training + evaluations * eval_images * evaluating) / processes,
        fixed_bytes=weights * (2 + moments + (settings.ema is not None)),
        rates=[(mark / per_epoch, learning_rate(settings, mark, steps, warmup)) for mark in marks],
    )
