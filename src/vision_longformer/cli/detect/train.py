"""``vil detect train``."""

from __future__ import annotations

from ..output import print_line
from ..parser import settings_from
from ..recipes import recipe_settings
from ..training import run_training


@settings_from(lambda: recipe_settings("detection"))
def detect_train(
    recipe: str | None = None, /, resume: str | None = None, output: str | None = None, **settings: str
) -> None:
    """Train a detector.

    Without arguments, a small Mask R-CNN learns to find garments in photos: the built-in data, real garments pasted
    onto real photos. Change any setting of a recipe by --key value; 'vil detect recipes' lists the recipes. Ctrl-C
    saves a checkpoint and stops.

    Args:
        recipe: a name from 'vil detect recipes' or a .yaml file of your own; quickstart by default.
        resume: resume the run in this directory; cannot be combined with other arguments.
        output: the run directory, runs/detect-RECIPE-1 or the next free number by default.
    """
    from ...detection.task import DetectionTask
    from ...training.recipe import parse_values

    trained = run_training(DetectionTask, recipe, resume, output, parse_values(settings), "vil detect train")
    if trained is None:
        return
    results = {name: f"{value:.1f}" for name, value in trained.best.items() if name.endswith(("_AP", "_AP50"))}
    print_line(f"{', '.join(f'{name} {value}' for name, value in results.items())}; {trained.checkpoint}")
    print_line(f"look at {' and '.join(map(str, trained.pictures))}")
    print_line(f"next: vil detect predict {trained.checkpoint} IMAGE --output FOLDER")
