"""Starting and resuming runs of any task: what they all need set up is set up here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from .callbacks import Callback, CallbackList, Pictures, TensorBoard
from .checkpointer import Counters, latest_checkpoint, load_counters
from .distributed import broadcast_from_main, make_accelerator
from .loop import BackboneSchedule, TrainingLoop, total_steps
from .recipe import BackboneSettings, resolve, to_yaml
from .run_directory import RECIPE, RunDirectory, next_free
from .task import TrainingTask

logger = logging.getLogger(__name__)


class TrainedRun(NamedTuple):
    """A finished run: its directory, and the evaluations of its best and of its last model."""

    run: Path
    best: dict[str, float]
    last: dict[str, float]

    @property
    def checkpoint(self) -> Path:
        return self.run / "best.safetensors"

    @property
    def pictures(self) -> list[Path]:
        return sorted(self.run.glob("*.png"))


def train(
    task_type: type[TrainingTask],
    recipe: str | BackboneSettings,
    *,
    output: str | Path | None = None,
    callback: Callback | None = None,
    **changes: Any,
) -> TrainedRun:
    """Train in a new run directory, ``runs/RECIPE-1`` (after the task's prefix) or the next free number by default.

    ``recipe`` is a name, a .yaml file or the settings themselves, of which ``changes`` replace some.
    """
    settings = resolve(task_type.recipe_type, recipe, task_type.derive, **changes)
    accelerator = make_accelerator(settings)
    task = task_type(settings, accelerator, None)
    name = settings.run_prefix + (Path(recipe).stem if isinstance(recipe, str) else settings.task)
    path = Path(broadcast_from_main(accelerator, str(output or next_free(Path("runs"), name))))
    if accelerator.is_main_process:
        run = RunDirectory.create(path, to_yaml(settings), task.files())
        if callback is not None:
            callback.on_summary({**task.summary(), **_machine(accelerator), "run directory": str(path)})
    else:
        run = RunDirectory(path)
    return _fit(task, settings, run, accelerator, callback)


def resume(
    task_type: type[TrainingTask], run: str | Path, *, epochs: int | None = None, callback: Callback | None = None
) -> TrainedRun:
    """Resume an interrupted run from its last checkpoint; it ends as if it had not been interrupted.

    With ``epochs``, a finished run is trained further, to that many epochs in all; its schedule starts anew.
    """
    directory = RunDirectory.reopen(Path(run))
    settings = resolve(task_type.recipe_type, str(directory.path / RECIPE))
    accelerator = make_accelerator(settings)
    if accelerator.is_main_process:
        directory.lock()
    task = task_type(settings, accelerator, directory.path)
    if epochs is not None:
        settings = _next_phase(settings, directory, epochs, task.batches_per_epoch)
        accelerator.wait_for_everyone()  # until all have read where the last phase ended
        if accelerator.is_main_process:
            directory.write_recipe(to_yaml(settings))
            logger.info("a new phase, up to %d epochs: the learning rate warms up and decays anew", epochs)
    return _fit(task, settings, directory, accelerator, callback)


def _next_phase(settings: BackboneSettings, run: RunDirectory, epochs: int, batches_per_epoch: int) -> BackboneSettings:
    """The settings of a finished run with more epochs."""
    path = latest_checkpoint(run.checkpoints)
    done = Counters() if path is None else load_counters(path)
    if not done.at_end(settings, total_steps(settings, batches_per_epoch)) or done.evaluated < done.step:
        raise ValueError(f"{run.path} is not finished (step {done.step}); resume it first, then give it more epochs")
    longer = resolve(type(settings), settings, epochs=epochs, phase_start=done.step)
    if total_steps(longer, batches_per_epoch) <= done.step:
        already = done.step * settings.accumulate / batches_per_epoch
        raise ValueError(f"{run.path} has {already:g} epochs already; --epochs counts those, so give more than that")
    return longer


def _fit(
    task: TrainingTask,
    settings: BackboneSettings,
    run: RunDirectory,
    accelerator: Accelerator,
    callback: Callback | None,
) -> TrainedRun:
    """Set up gradient checkpointing, compilation, what changes in the backbone, and callbacks; then run the loop."""
    if settings.grad_checkpointing and not _enable_grad_checkpointing(task.model):
        raise ValueError("grad_checkpointing is on, but nothing in this model supports it; turn it off")
    start, total = settings.phase_start, total_steps(settings, task.batches_per_epoch)
    shift_until = start + round(settings.shift_until * (total - start))
    schedule = BackboneSchedule(task.model, settings.seed, shift_until, task.redraws_features)
    if settings.compile:
        task.model.compile()
    callbacks: list[Callback] = []
    if accelerator.is_main_process:
        callbacks = [callback or Callback(), Pictures(run, task.curves, task.draw)]
        if TensorBoard.installed():
            callbacks.append(TensorBoard(run.path / "tensorboard"))
    best, last = TrainingLoop(task, settings, run, accelerator, schedule, CallbackList(*callbacks)).train()
    accelerator.wait_for_everyone()
    return TrainedRun(run.path, best, last)


def _machine(accelerator: Accelerator) -> dict[str, str]:
    """Where a run takes place."""
    cuda = accelerator.device.type == "cuda"
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    device = torch.cuda.get_device_name(accelerator.device) if cuda else cpu
    return {"device": device if accelerator.num_processes == 1 else f"{accelerator.num_processes} × {device}"}


def _enable_grad_checkpointing(module: nn.Module) -> bool:
    """By timm's method, of the model or of the backbone in it; returns whether any part supports it."""
    enable: Callable[[bool], None] | None = getattr(module, "set_grad_checkpointing", None)
    if enable is None:
        supported = [_enable_grad_checkpointing(child) for child in module.children()]
        return any(supported)
    try:
        enable(True)
    except AssertionError:  # models of timm that cannot
        return False
    return True
