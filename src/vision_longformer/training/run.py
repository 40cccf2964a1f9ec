"""Starting runs and going on with them, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from accelerate import Accelerator

from .backbone_schedule import BackboneSchedule, RedrawIsDue
from .callbacks import Observers, Pictures, TensorBoard
from .distributed import from_main, make_accelerator
from .loop import Training, total_steps
from .recipe import BackboneSettings, build, load_recipe, to_yaml
from .run_directory import RECIPE, RunDirectory, next_free
from .task import Observer, Task

R = TypeVar("R", bound=BackboneSettings)
T = TypeVar("T", bound=Task)


class Trained(NamedTuple):
    """A finished run: its directory and the last evaluation."""

    run: Path
    results: dict[str, float]

    @property
    def checkpoint(self) -> Path:
        return self.run / "best.safetensors"

    @property
    def pictures(self) -> list[Path]:
        return sorted(self.run.glob("*.png"))


@dataclass(frozen=True)
class Kind(Generic[R, T]):
    """A kind of training, such as "classification": what its recipes are, how they become tasks, when Performer
    features are drawn anew, the pictures of what the best model does, and the results that make curves."""

    name: str
    recipe: type[R]
    make_task: Callable[[R, Accelerator], T]
    redraw_is_due: RedrawIsDue
    draw: Callable[[T, Path], None]
    curves: tuple[str, ...]

    def resolve(self, recipe: str | R, **changes: Any) -> R:
        """A recipe by name or file, with single settings changed."""
        if isinstance(recipe, str):
            return build(self.recipe, {**load_recipe(self.name, recipe), **changes}, f"recipe {recipe}")
        return replace(recipe, **changes)

    def train(
        self, recipe: str | R, output: str | Path | None = None, observer: Observer | None = None, **changes: Any
    ) -> Trained:
        """Train in a new run directory, ``runs/NAME-1`` or the next free number by default."""
        resolved = self.resolve(recipe, **changes)
        accelerator = make_accelerator(resolved)
        task = self.make_task(resolved, accelerator)
        name = Path(recipe).stem if isinstance(recipe, str) else self.name
        path = Path(from_main(accelerator, str(output or next_free(Path("runs"), name))))
        run = RunDirectory.create(path, to_yaml(resolved)) if accelerator.is_main_process else RunDirectory(path)
        return self._run(task, resolved, run, accelerator, observer)

    def resume(self, run: str | Path, observer: Observer | None = None) -> Trained:
        """Go on with an interrupted run from its last checkpoint, as if it had not been interrupted."""
        directory = RunDirectory.reopen(Path(run))
        path = str(directory.path / RECIPE)
        recipe = build(self.recipe, load_recipe(self.name, path), path)
        accelerator = make_accelerator(recipe)
        if accelerator.is_main_process:
            directory.lock()
        return self._run(self.make_task(recipe, accelerator), recipe, directory, accelerator, observer)

    def _run(
        self, task: T, recipe: R, run: RunDirectory, accelerator: Accelerator, observer: Observer | None
    ) -> Trained:
        shift_until = round(recipe.shift_until * total_steps(recipe, task.batches_per_epoch))
        schedule = BackboneSchedule(task.model, recipe.seed, shift_until, self.redraw_is_due)
        if recipe.compile:
            task.model.compile()
        watching: list[Observer] = []
        if accelerator.is_main_process:
            watching = [observer or Observer(), Pictures(run, self.curves, partial(self.draw, task))]
            if TensorBoard.installed():
                watching.append(TensorBoard(run.path / "tensorboard"))
        results = Training(task, recipe, run, accelerator, schedule, Observers(*watching)).train()
        accelerator.wait_for_everyone()
        return Trained(run.path, results)
