"""``vil train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .output import print_line
from .parser import settings_from
from .recipes import recipe_settings
from .training import print_plan, print_skipped, run_training

if TYPE_CHECKING:
    from ..training.run import TrainedRun


@settings_from(lambda: recipe_settings("classification"))
def train(
    recipe: str | None = None,
    /,
    resume: str | None = None,
    output: str | None = None,
    dry_run: bool = False,
    **settings: str,
) -> None:
    """Train a classifier.

    Without arguments, a small Vision Longformer learns the built-in Fashion-MNIST images in a few minutes. To train on
    your own images, use 'vil train --data FOLDER', with a subfolder per class; model and settings are derived from the
    images. Change any setting of a recipe with --key value, as in 'vil train cifar10 --epochs 5 --lr 1e-3'; 'vil
    recipes' lists the recipes, 'vil recipes NAME --all' all settings. With several processes: 'torchrun
    --nproc-per-node 4 -m vision_longformer train …'. Ctrl-C saves a checkpoint and stops.

    Args:
        recipe: a name from 'vil recipes' or a .yaml file of your own; by default own_images with --data, else
            quickstart.
        resume: resume the run in this directory; only --epochs may be combined with it, to train a finished run
            further. With auto, resume the run that the same command started before, or start a new one.
        output: the run directory, runs/RECIPE-1 or the next free number by default.
        dry_run: print all settings, the schedule, and the estimated time and memory on this machine, without training.
    """
    from ..classification.task import ClassificationTask
    from ..training.recipe import parse_values

    changes = parse_values(settings)
    if dry_run:
        from ..classification.estimate import estimate

        print_plan(ClassificationTask, recipe, changes, estimate)
        return
    trained = run_training(ClassificationTask, recipe, resume, output, changes, "vil train")
    if trained is not None:
        _print_end(trained)


def _print_end(trained: TrainedRun) -> None:
    print_line(f"best: {_accuracy(trained.best)} on the evaluation set, {trained.checkpoint}")
    if trained.last != trained.best:
        print_line(f"last: {_accuracy(trained.last)}")
    print_skipped(trained.last, "vil check")
    if trained.pictures:
        print_line(f"look at {' and '.join(map(str, trained.pictures))}")
    print_line(f"next: vil predict {trained.run} IMAGE, or vil evaluate {trained.run} --per-class")


def _accuracy(results: Mapping[str, float]) -> str:
    names = {"top1": "top-1", "top5": "top-5"}
    return ", ".join(f"{results[name]:.2f}% {words}" for name, words in names.items() if name in results)
