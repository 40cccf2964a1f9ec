"""Starting and resuming runs of any task: what they all need set up is set up here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn

from .callbacks import Callback, CallbackList, Pictures, TensorBoard
from .distributed import broadcast_from_main, make_accelerator
from .loop import BackboneSchedule, TrainingLoop, total_steps
from .recipe import BackboneSettings, resolve, to_yaml
from .run_directory import RECIPE, RunDirectory, next_free
from .task import TrainingTask


class TrainedRun(NamedTuple):
    """A finished run: its directory and the last evaluation."""

    run: Path
    results: dict[str, float]

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
    settings = resolve(task_type.recipe_type, recipe, **changes)
    accelerator = make_accelerator(settings)
    task = task_type(settings, accelerator)
    name = settings.run_prefix + (Path(recipe).stem if isinstance(recipe, str) else settings.task)
    path = Path(broadcast_from_main(accelerator, str(output or next_free(Path("runs"), name))))
    run = RunDirectory.create(path, to_yaml(settings)) if accelerator.is_main_process else RunDirectory(path)
    return _fit(task, settings, run, accelerator, callback)


def resume(task_type: type[TrainingTask], run: str | Path, *, callback: Callback | None = None) -> TrainedRun:
    """Resume an interrupted run from its last checkpoint; it ends as if it had not been interrupted."""
    directory = RunDirectory.reopen(Path(run))
    settings = resolve(task_type.recipe_type, str(directory.path / RECIPE))
    accelerator = make_accelerator(settings)
    if accelerator.is_main_process:
        directory.lock()
    return _fit(task_type(settings, accelerator), settings, directory, accelerator, callback)


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
    shift_until = round(settings.shift_until * total_steps(settings, task.batches_per_epoch))
    schedule = BackboneSchedule(task.model, settings.seed, shift_until, task.redraws_features)
    if settings.compile:
        task.model.compile()
    callbacks: list[Callback] = []
    if accelerator.is_main_process:
        callbacks = [callback or Callback(), Pictures(run, task.curves, task.draw)]
        if TensorBoard.installed():
            callbacks.append(TensorBoard(run.path / "tensorboard"))
    results = TrainingLoop(task, settings, run, accelerator, schedule, CallbackList(*callbacks)).train()
    accelerator.wait_for_everyone()
    return TrainedRun(run.path, results)


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
