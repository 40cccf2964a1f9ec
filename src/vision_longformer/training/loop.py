"""The training loop of all tasks: steps, logs, evaluations, checkpoints, and a graceful exit on a signal.

Beside it, what changes inside a Vision Longformer from step to step: random shift and Performer features.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..data.randomness import derive_seed
from ..models import VisionLongformer
from ..models.attention import PerformerAttention
from .callbacks import Callback, duration
from .checkpointer import Checkpointer, Counters
from .distributed import agree, broadcast_from_main, distribute, mean_over_processes, replica, together, without_sync
from .ema import WeightAverage
from .optimizer import learning_rate
from .process_log import describe_silent
from .recipe import TrainSettings
from .run_directory import RunDirectory
from .task import TrainingError, TrainingTask

Results = dict[str, float]
"""Of an evaluation, by name."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A run was stopped by signal ``number`` and has saved its state."""

    def __init__(self, number: int, step: int, run: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number, self.run = number, run


class TrainingLoop:
    """One run of a task.

    Everything random in it is a function of the seed and the step, so a run that resumes from a checkpoint ends as if
    it had never stopped.
    """

    def __init__(
        self,
        task: TrainingTask,
        settings: TrainSettings,
        run: RunDirectory,
        accelerator: Accelerator,
        schedule: BackboneSchedule,
        callback: Callback,
    ) -> None:
        self.task, self.settings, self.run, self.accelerator = task, settings, run, accelerator
        self.schedule, self.callback = schedule, callback
        self.batching = settings.batching(replica(accelerator, settings))
        self.steps_per_epoch = task.batches_per_epoch // settings.accumulate
        self.total = total_steps(settings, task.batches_per_epoch)
        self.warmup = settings.count_warmup(self.steps_per_epoch)
        self.model, self.optimizer = distribute(accelerator, task.model, settings)
        self.average = None if settings.ema is None else WeightAverage(task.model, settings.ema)
        self.checkpointer = Checkpointer(
            run.checkpoints, task.model, self.optimizer.optimizer, self.average, accelerator
        )
        self.counters = Counters()
        self._sums: dict[str, Tensor] = {}
        self._saved_at = self._logged_at = time.monotonic()
        self._logged_step = 0

    def train(self) -> tuple[Results, Results]:
        """Run to the end, or until a signal, and return the evaluations of the best and of the last model."""
        with GracefulExit() as graceful_exit, self._explaining_errors():
            self._restore()
            self.callback.on_start(self.counters.step, self.total, self.steps_per_epoch)
            try:
                if self._evaluation_is_due():  # a run that was stopped between a step and its evaluation
                    self._evaluate()
                    self._save()
                while not self._at_end():
                    self._epoch(graceful_exit)
                    if self._evaluation_is_due():
                        self._evaluate()
                    self._save()
                return self.run.evaluation(self.counters.best_step), self.run.evaluation(self.counters.evaluated)
            finally:
                self.callback.on_end()

    def _restore(self) -> None:
        """Load the latest checkpoint that is intact, if any, and drop metrics of what is repeated."""
        main = self.accelerator.is_main_process
        path = broadcast_from_main(
            self.accelerator, together(lambda: self.checkpointer.latest_intact() if main else None)
        )
        if path is not None:
            self.counters = self.checkpointer.restore(path)
            if self.counters.step < self.settings.phase_start:
                raise TrainingError(
                    f"the run was given more epochs after step {self.settings.phase_start}, and no checkpoint since "
                    f"then is intact; {path} is from before"
                )
            self._sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.counters.sums.items()}
            self._logged_at, self._logged_step = time.monotonic(), self.counters.step
            if self.counters.step == self.settings.phase_start:
                self.counters.stale = 0
        if self.accelerator.is_main_process:
            self.run.drop_metrics_after(self.counters.step, self.counters.evaluated)

    # Steps

    def _epoch(self, graceful_exit: GracefulExit) -> None:
        """From the current step to the end of its epoch or of the run."""
        epoch, done = divmod(self.counters.step, self.steps_per_epoch)
        batches = self.task.batches(epoch, done * self.settings.accumulate)
        for step_of_epoch in range(done, min(self.steps_per_epoch, done + self.total - self.counters.step)):
            self._step(epoch, step_of_epoch, batches)
            signal_number, due = agree(self.accelerator, graceful_exit.signal_number, self._save_is_due())
            if signal_number:
                self._save()
                raise Interrupted(signal_number, self.counters.step, self.run.path)
            if due and step_of_epoch + 1 < self.steps_per_epoch:
                self._save()

    def _step(self, epoch: int, step_of_epoch: int, batches: Iterator[Any]) -> None:
        """One optimiser step, on the next ``accumulate`` of ``batches``."""
        settings, step = self.settings, self.counters.step
        self.schedule.before_step(step, epoch, step_of_epoch)
        start = settings.phase_start
        lr = learning_rate(settings, step - start, self.total - start, self.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        for part, batch in enumerate(islice(batches, settings.accumulate)):
            self.schedule.before_forward(step)
            self._backward(batch, step * settings.accumulate + part, last=part + 1 == settings.accumulate)
        if settings.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.counters.step += 1
        if self.average is not None:
            self.average.update(self.counters.step)
        self.callback.on_step(self.counters.step)
        if self._log_is_due(step_of_epoch + 1) or self.counters.step == self.total:
            self._log(epoch)

    def _log_is_due(self, done: int) -> bool:
        """At the end of an epoch, of which ``done`` steps are done, and within it unless the end is near."""
        left, every = self.steps_per_epoch - done, self.settings.log_every
        return left == 0 or (done % every == 0 and left >= every // 2)

    def _backward(self, batch: Any, micro_batch_index: int, *, last: bool) -> None:
        """Add the gradient of a micro-batch, weighted by its share of the samples."""
        torch.manual_seed(derive_seed(self.settings.seed, "step", *self.batching.part(micro_batch_index)))
        weight = self.batching.weight(micro_batch_index)
        with nullcontext() if last else without_sync(self.accelerator, self.model):
            with self.accelerator.autocast():
                loss, values = self.task.loss(self.model, batch, micro_batch_index)
            self.accelerator.backward(weight * loss / self.settings.accumulate)
        for name, value in {"loss": loss, **values}.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value.detach().double()
        self._sums["parts"] = self._sums.get("parts", torch.zeros((), dtype=torch.float64)) + weight

    # Logs, evaluations, checkpoints

    def _log(self, epoch: int) -> None:
        """Means since the last line: over steps, their micro-batches and processes."""
        sums = mean_over_processes(self.accelerator, self._sums)
        parts = sums.pop("parts")
        means = {name: value / parts for name, value in sums.items()}
        self._check_finite(means["loss"])
        step, now = self.counters.step, time.monotonic()
        pace = max(now - self._logged_at, 1e-9) / (step - self._logged_step)
        speed = {"images_per_second": round(self.settings.batch_size / pace, 1), "seconds_per_step": round(pace, 3)}
        lr = self.optimizer.param_groups[0]["lr"]
        record = {"step": step, "epoch": epoch, "lr": lr, **means, **speed}
        if self.accelerator.is_main_process:
            self.run.record(record)
        self.callback.on_log(record)
        self._sums, self._logged_at, self._logged_step = {}, now, step

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} around step {self.counters.step}; {self._checkpoint_note()}; start a new run with "
                "a lower lr, a longer warmup or clip_norm"
            )

    def _at_end(self) -> bool:
        return self.counters.at_end(self.settings, self.total)

    def _evaluation_is_due(self) -> bool:
        """After every ``eval_every`` epochs and at the end of the run, unless this step has been evaluated."""
        epoch, step_of_epoch = divmod(self.counters.step, self.steps_per_epoch)
        due = self.counters.step == self.total or (step_of_epoch == 0 and epoch % self.settings.eval_every == 0)
        return due and self.counters.evaluated < self.counters.step

    def _evaluate(self) -> None:
        """Evaluate the model, averaged if there is an average, and save it if it is the best or the last."""
        with nullcontext() if self.average is None else self.average.applied():
            results = self.task.evaluate(self.callback.on_eval_progress)
            best = self._is_best(results[self.task.best_metric])
            if best:
                self.counters.best, self.counters.best_step = results[self.task.best_metric], self.counters.step
                self._save_model("best")
            self.counters.stale = 0 if best else self.counters.stale + 1
            if self._at_end():
                self._save_model("last")
        self.counters.evaluated = self.counters.step
        epoch = self.counters.step // self.steps_per_epoch
        record = {"step": self.counters.step, "epoch": epoch, "evaluation": results}
        if self.accelerator.is_main_process:
            self.run.record(record)
        self.callback.on_evaluate(record, best)
        self._logged_at, self._logged_step = time.monotonic(), self.counters.step

    def _is_best(self, score: float) -> bool:
        """Any score is better than none or NaN."""
        best = self.counters.best
        return best is None or math.isnan(best) or score > best

    def _save_model(self, name: str) -> None:
        self.task.save(self.run.path / f"{name}.safetensors")

    def _save_is_due(self) -> bool:
        return time.monotonic() - self._saved_at > 60 * self.settings.checkpoint_minutes

    def _save(self) -> None:
        """Write a checkpoint, in all processes together. Each resumes from the mean of their sums."""
        if self._sums:
            self.counters.sums = mean_over_processes(self.accelerator, self._sums)
            self._check_finite(self.counters.sums["loss"])
        else:
            self.counters.sums = {}
        self.checkpointer.save(self.counters)
        self._saved_at = time.monotonic()

    # Errors

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            explained = self._as_training_error(error)
            if explained is error:
                raise
            raise explained from error

    def _as_training_error(self, error: Exception) -> Exception:
        resume = f"continue with --resume {self.run.path}" if self.checkpointer.latest() else ""
        if _is_full_disk(error):
            return TrainingError(
                f"the disk is full; {self._checkpoint_note()}: free some space, then {resume or 'start again'}"
            )
        if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
            return TrainingError(
                f"a data-loading process died (often because memory ran out); {self._checkpoint_note()}: "
                f"{resume + ', or ' if resume else ''}start again with fewer workers"
            )
        if self.accelerator.num_processes > 1 and isinstance(error, RuntimeError) and LOST.search(str(error)):
            return TrainingError(
                f"{self._lost_process(str(error))}; {self._checkpoint_note()}: {resume or 'start again'}"
            )
        return error

    def _lost_process(self, error: str) -> str:
        """What happened to the other processes, as far as one of them can know."""
        waited = duration(60 * self.settings.timeout_minutes)
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        if TIMED_OUT.search(error):
            silent = describe_silent(self.run.logs, count, 60 * self.settings.timeout_minutes)
            return f"process {rank} waited {waited} for the others after step {self.counters.step}: {silent}"
        return f"another of the {count} processes ended after step {self.counters.step}, as process {rank} noticed"

    def _checkpoint_note(self) -> str:
        path = self.checkpointer.latest()
        return "there is no checkpoint yet" if path is None else f"the checkpoint {path} is intact"


TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
LOST = re.compile(f"{TIMED_OUT.pattern}|gloo|nccl|connection|socket|broken pipe", re.IGNORECASE)
"""What torch's errors say when another process does not answer, or is gone."""


def _is_full_disk(error: BaseException | None) -> bool:
    """Whether that is the reason of an error, or of one that it hides, as those of torch.save and safetensors do."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def total_steps(settings: TrainSettings, batches_per_epoch: int) -> int:
    """Optimiser steps of a run."""
    steps_per_epoch = batches_per_epoch // settings.accumulate
    if steps_per_epoch == 0:
        raise ValueError(
            f"an epoch has {batches_per_epoch} batches per process, fewer than accumulate={settings.accumulate}; use a "
            "smaller batch_size"
        )
    return settings.steps or settings.epochs * steps_per_epoch


class GracefulExit:
    """A context in which the first SIGINT or SIGTERM sets ``signal_number`` instead of ending the process.

    The loop then saves and ends. Meanwhile signals act as they did before, so a second one ends the process at once.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> GracefulExit:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore_handlers()

    def __exit__(self, *exception: object) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


RedrawsFeatures = Callable[[int, int, int], bool]
"""(step of the run, epoch, step of the epoch), all counted from 0, to whether features are redrawn before it."""


class BackboneSchedule:
    """Sets every Vision Longformer inside ``model`` before each step, as a function of the step alone.

    From step ``shift_until`` on, all neighbours take the place of random shift.
    """

    def __init__(self, model: nn.Module, seed: int, shift_until: int, redraws_features: RedrawsFeatures) -> None:
        self._backbones = [module for module in model.modules() if isinstance(module, VisionLongformer)]
        self._seed, self._shift_until, self._redraws_features = seed, shift_until, redraws_features
        self._has_features = any(isinstance(module, PerformerAttention) for module in model.modules())

    def before_step(self, step: int, epoch: int, step_of_epoch: int) -> None:
        """Before an optimiser step, counted from 0 in the run (``step``) and in its epoch."""
        for model in self._backbones:
            if model.config.neighbours == "random" and step >= self._shift_until:
                model.set_neighbours("all")
        if self._has_features and self._redraws_features(step, epoch, step_of_epoch):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "features", step))
            for model in self._backbones:
                model.redraw_features(generator)

    def before_forward(self, step: int) -> None:
        """Before each forward pass of a step: all of them see the same neighbours, however the batch is split."""
        for model in self._backbones:
            if model.config.neighbours == "random":
                model.random_shift.seed(derive_seed(self._seed, "shift") % 2**32, step)
