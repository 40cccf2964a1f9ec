"""Starting and resuming runs of any task: what they all need set up is set up here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from torch import nn

from ..geometry import ceil_div
from ..models import VisionLongformer
from .callbacks import Callback, CallbackList, Pictures, TensorBoard, counted
from .checkpointer import Counters, latest_checkpoint, load_counters
from .distributed import (
    broadcast_from_main,
    check_alike,
    image_mesh,
    make_accelerator,
    set_timeout,
    start_processes,
    together,
)
from .loop import BackboneSchedule, TrainingLoop, total_steps
from .process_log import ProcessLog
from .recipe import BackboneSettings, load_recipe, override, resolve, to_yaml
from .run_directory import IDENTITY, RECIPE, Identity, RunDirectory, next_free, runs_named
from .task import TrainingTask

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    resume: bool = False,
    callback: Callback | None = None,
    **changes: Any,
) -> TrainedRun:
    """Train in a new run directory, ``runs/RECIPE-1`` (after the task's prefix) or the next free number by default.

    ``recipe`` is a name, a .yaml file or the settings themselves, of which ``changes`` replace some. With ``resume``, a
    run that was started by the same call before is resumed; so it is, without, if torchrun or Slurm started it again.
    """
    settings = _agreed_settings(lambda: resolve(task_type.recipe_type, recipe, task_type.derive, **changes))
    name = settings.run_prefix + (Path(recipe).stem if isinstance(recipe, str) else settings.task)
    identity = Identity.of_this_process(_given(task_type, recipe, changes))
    path, exists = _on_main(lambda: _find_run(output, name, identity, resume))
    if exists:
        return _resume(task_type, RunDirectory(path), callback, patience=LOCK_SECONDS)
    accelerator = together(lambda: make_accelerator(settings))
    task = together(lambda: task_type(settings, accelerator, None))
    files = {IDENTITY: identity.to_json(), **task.files()}
    main = accelerator.is_main_process
    run = together(lambda: RunDirectory.create(path, to_yaml(settings), files) if main else RunDirectory(path))
    if main and callback is not None:
        callback.on_summary({**task.summary(), **_machine(accelerator), "run directory": str(path)})
    with _process_log(run, settings, accelerator) as log:
        return _fit(task, settings, run, accelerator, callback, log)


LOCK_SECONDS = 30.0
"""How long a run that is started again waits for the processes it replaces."""


def _find_run(output: str | Path | None, name: str, identity: Identity, resume: bool) -> tuple[Path, bool]:
    """The run directory, and whether the run is there already: one that this command started, which it now resumes."""
    for path in runs_named(Path("runs"), name) if output is None else [Path(output)]:
        earlier = Identity.read(path)
        if earlier is None or not (resume or identity.restarts(earlier)):
            continue
        difference = identity.difference(earlier)
        if difference is None:
            return path, (path / RECIPE).is_file()
        if output is not None:
            raise ValueError(
                f"{path} was started by another command ({difference}); give another --output, or resume it "
                f"unchanged with --resume {path}"
            )
    return Path(output or next_free(Path("runs"), name)), False


def _given(task_type: type[TrainingTask], recipe: str | BackboneSettings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe and changes of it state, before anything is derived from data and machine."""
    stated = load_recipe(task_type.recipe_type, recipe) if isinstance(recipe, str) else asdict(recipe)
    return override(stated, changes)


def resume(
    task_type: type[TrainingTask], run: str | Path, *, epochs: int | None = None, callback: Callback | None = None
) -> TrainedRun:
    """Resume an interrupted run from its last checkpoint; it ends as if it had not been interrupted.

    With ``epochs``, a finished run is trained further, to that many epochs in all; its schedule starts anew.
    """
    return _resume(task_type, RunDirectory(Path(run)), callback, epochs=epochs)


def _resume(
    task_type: type[TrainingTask],
    run: RunDirectory,
    callback: Callback | None,
    *,
    epochs: int | None = None,
    patience: float = 0.0,
) -> TrainedRun:
    recipe_type = task_type.recipe_type
    settings = _agreed_settings(lambda: resolve(recipe_type, str(RunDirectory.reopen(run.path).path / RECIPE)))
    accelerator = together(lambda: make_accelerator(settings))
    together(lambda: run.lock(patience) if accelerator.is_main_process else None)
    with _process_log(run, settings, accelerator) as log:
        parts = _parts_now(settings, run.started_with(), accelerator)
        now = replace(settings, accumulate=parts)
        task = together(lambda: task_type(now, accelerator, run.path))
        if epochs is not None:
            now = together(lambda: _next_phase(now, run, epochs, task.batches_per_epoch))
            if accelerator.is_main_process and now.phase_start != settings.phase_start:
                run.write_recipe(to_yaml(replace(now, accumulate=settings.accumulate)))
                logger.info("a new phase, up to %d epochs: the learning rate warms up and decays anew", epochs)
        return _fit(task, now, run, accelerator, callback, log)


def _parts_now(settings: BackboneSettings, started_with: int, accelerator: Accelerator) -> int:
    """Parts of a process's share of the batch, so that none is larger than when the run was started, if possible."""
    count = accelerator.num_processes
    shares = count // settings.spatial
    most = max(1, settings.batch_size // settings.micro_batch_multiple // shares)
    parts = min(ceil_div(settings.accumulate * started_with, count), most)
    if count != started_with and accelerator.is_main_process:
        logger.info(
            "running with %s, but started with %d: the batch of %d is divided again, each share into %s",
            *(f"{count} process" + "es" * (count > 1), started_with, settings.batch_size, counted(parts, "part")),
        )
    return parts


def _next_phase(settings: BackboneSettings, run: RunDirectory, epochs: int, batches_per_epoch: int) -> BackboneSettings:
    """The settings of a finished run with more epochs; as they are if it has been given those already."""
    path = latest_checkpoint(run.checkpoints)
    done = Counters() if path is None else load_counters(path)
    if not done.at_end(settings, total_steps(settings, batches_per_epoch)) or done.evaluated < done.step:
        if settings.phase_start and settings.epochs == epochs:
            return settings
        raise ValueError(
            f"{run.path} is not finished (step {done.step} of {total_steps(settings, batches_per_epoch)}): resume it "
            "without --epochs, to its end, and then give it more; or use it as it is"
        )
    longer = resolve(type(settings), settings, epochs=epochs, phase_start=done.step)
    if total_steps(longer, batches_per_epoch) <= done.step:
        already = done.step * settings.accumulate / batches_per_epoch
        raise ValueError(f"{run.path} has {already:g} epochs already; --epochs is the total, so give more than that")
    return longer


def _fit(
    task: TrainingTask,
    settings: BackboneSettings,
    run: RunDirectory,
    accelerator: Accelerator,
    callback: Callback | None,
    log: ProcessLog,
) -> TrainedRun:
    """Set up shared images, gradient checkpointing, compilation, what changes in the backbone, and callbacks; then run
    the loop."""
    if settings.spatial > 1:
        task.divide_images(image_mesh(accelerator, settings))
    _set_grad_checkpointing(task.model, settings.grad_checkpointing)
    start, total = settings.phase_start, total_steps(settings, task.batches_per_epoch)
    shift_until = start + round(settings.shift_until * (total - start))
    schedule = BackboneSchedule(task.model, settings.seed, shift_until, task.redraws_features)
    if settings.compile:
        task.model.compile()
    callbacks: list[Callback] = [log]
    if accelerator.is_main_process:
        callbacks += [callback or Callback(), Pictures(run, task.curves, task.draw)]
        if TensorBoard.installed():
            callbacks.append(TensorBoard(run.path / "tensorboard"))
    set_timeout(settings.timeout_minutes)
    best, last = TrainingLoop(task, settings, run, accelerator, schedule, CallbackList(*callbacks)).train()
    accelerator.wait_for_everyone()
    return TrainedRun(run.path, best, last)


# Processes


def _agreed_settings(resolve_settings: Callable[[], BackboneSettings]) -> BackboneSettings:
    """The settings, which all processes must find alike; those that are derived from the machine, the main one's."""
    state = start_processes()
    settings = together(resolve_settings)
    packages = {name: version(name) for name in ("vision-longformer", "torch")}
    check_alike(packages if settings.auto else {**packages, **asdict(settings)})
    return broadcast_from_main(state, settings)


def _on_main(decide: Callable[[], T]) -> T:
    """What the main process decides, in all."""
    state = PartialState()
    decision = together(lambda: decide() if state.is_main_process else None)
    return cast(T, broadcast_from_main(state, decision))


def _process_log(run: RunDirectory, settings: BackboneSettings, accelerator: Accelerator) -> ProcessLog:
    return ProcessLog(
        run.logs,
        accelerator.process_index,
        accelerator.num_processes,
        60 * settings.timeout_minutes,
        announce=accelerator.num_processes > 1 and accelerator.device.type == "cuda",
    )


def _machine(accelerator: Accelerator) -> dict[str, str]:
    """Where a run takes place."""
    cuda = accelerator.device.type == "cuda"
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    device = torch.cuda.get_device_name(accelerator.device) if cuda else cpu
    return {"device": device if accelerator.num_processes == 1 else f"{accelerator.num_processes} × {device}"}


# Models


def _set_grad_checkpointing(model: nn.Module, setting: bool | str) -> None:
    if setting == "strips" and not any(isinstance(module, VisionLongformer) for module in model.modules()):
        raise ValueError("grad_checkpointing is strips, which only a Vision Longformer has; set it to true")
    if setting and not _enable_grad_checkpointing(model, setting):
        raise ValueError("grad_checkpointing is on, but nothing in this model supports it; turn it off")


def _enable_grad_checkpointing(module: nn.Module, setting: bool | str) -> bool:
    """By timm's method, of the model or of the backbone in it; returns whether any part supports it."""
    enable: Callable[[bool | str], None] | None = getattr(module, "set_grad_checkpointing", None)
    if enable is None:
        supported = [_enable_grad_checkpointing(child, setting) for child in module.children()]
        return any(supported)
    try:
        enable(setting)
    except AssertionError:  # models of timm that cannot
        return False
    return True
