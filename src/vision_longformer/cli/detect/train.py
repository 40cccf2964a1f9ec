"""``vil detect train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..output import print_line
from ..parser import settings_from
from ..recipes import recipe_settings
from ..training import print_plan, print_skipped, run_training

if TYPE_CHECKING:
    from ...training.run import TrainedRun


@settings_from(lambda: recipe_settings("detection"))
def detect_train(
    recipe: str | None = None,
    /,
    resume: str | None = None,
    output: str | None = None,
    dry_run: bool = False,
    **settings: str,
) -> None:
    """Train a detector.

    'vil detect train --data FOLDER' trains on your own annotated images: settings are derived from them and from this
    machine. Without arguments, a small Mask R-CNN learns to find garments in photos: the built-in data, real garments
    pasted onto real photos. Change any setting of a recipe by --key value; 'vil detect recipes' lists the recipes.
    Ctrl-C saves a checkpoint and stops.

    Args:
        recipe: a name from 'vil detect recipes' or a .yaml file; own_objects with --data, else quickstart by default.
        resume: resume the run in this directory; with --epochs, a finished run is trained further, to that many in
            total. With auto, resume the run that the same command started before, or start a new one.
        output: the run directory, runs/detect-RECIPE-1 or the next free number by default.
        dry_run: print all settings, the schedule, and the estimated time and memory on this machine, without training.
    """
    from ...detection.task import DetectionTask
    from ...training.recipe import parse_values

    changes = parse_values(settings)
    if dry_run:
        from ...detection.estimate import estimate

        print_plan(DetectionTask, recipe, changes, estimate)
        return
    trained = run_training(DetectionTask, recipe, resume, output, changes, "vil detect train")
    if trained is not None:
        _print_end(trained)


def _print_end(trained: TrainedRun) -> None:
    print_line(f"best: {_metrics(trained.best)}; {trained.checkpoint}")
    print_line(f"last: {_metrics(trained.last)}; {trained.run / 'last.safetensors'}")
    print_skipped(trained.last, "vil detect check")
    print_line(f"look at {' and '.join(map(str, trained.pictures))}")
    print_line(f"next: vil detect predict {trained.run} IMAGE --threshold 0.3 --output FOLDER")
    print_line(f"or:   vil detect evaluate {trained.run} --per-category")


def _metrics(results: Mapping[str, float]) -> str:
    shown = {name: value for name, value in results.items() if name.endswith(("_AP", "_AP50"))}
    return ", ".join(f"{name} {value:.2f}%" for name, value in shown.items())
