"""``vil train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .output import print_line, print_table
from .parser import settings_from
from .recipes import recipe_settings
from .training import run_training

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

    Without arguments, a small Vision Longformer learns the built-in Fashion-MNIST images in a few minutes. With your
    own images, 'vil train --data FOLDER': a folder per class in it, model and settings chosen by what is found. Change
    any setting of a recipe by --key value, as in 'vil train cifar10 --epochs 5 --lr 1e-3'; 'vil recipes' lists the
    recipes, 'vil recipes NAME --all' all settings. With several processes: 'torchrun --nproc-per-node 4 -m
    vision_longformer train …'. Ctrl-C saves a checkpoint and stops.

    Args:
        recipe: a name from 'vil recipes' or a .yaml file of your own; by default own_images with --data, else
            quickstart.
        resume: resume the run in this directory; only --epochs may go with it, to train a finished run further.
        output: the run directory, runs/RECIPE-1 or the next free number by default.
        dry_run: print all settings, the schedule, and the estimated time and memory on this machine, without training.
    """
    from ..training.recipe import parse_values

    changes = parse_values(settings)
    if dry_run:
        _print_plan(recipe, changes)
        return
    from ..classification.task import ClassificationTask

    trained = run_training(ClassificationTask, recipe, resume, output, changes, "vil train")
    if trained is not None:
        _print_end(trained)


def _print_end(trained: TrainedRun) -> None:
    print_line(f"best: {_accuracy(trained.best)} on the evaluation set, {trained.checkpoint}")
    if trained.last != trained.best:
        print_line(f"last: {_accuracy(trained.last)}")
    if trained.pictures:
        print_line(f"look at {' and '.join(map(str, trained.pictures))}")
    print_line(f"next: vil predict {trained.run} IMAGE, or vil evaluate {trained.run} --per-class")


def _accuracy(results: Mapping[str, float]) -> str:
    names = {"top1": "top-1", "top5": "top-5"}
    return ", ".join(f"{results[name]:.2f}% {words}" for name, words in names.items() if name in results)


def _print_plan(recipe: str | None, changes: Mapping[str, Any]) -> None:
    from ..classification.estimate import estimate
    from ..classification.recipe import ClassificationRecipe
    from ..classification.task import ClassificationTask
    from ..training.callbacks import duration
    from ..training.recipe import resolve, to_yaml

    name = recipe or ClassificationRecipe.default_name(changes)
    resolved = resolve(ClassificationRecipe, name, ClassificationTask.derive, **changes)
    print_line(to_yaml(resolved).rstrip())
    plan = estimate(resolved)
    print_table("Schedule", ("epoch", "learning rate"), [(f"{at:g}", f"{rate:.3g}") for at, rate in plan.rates])
    rows = [
        ("data", plan.data),
        ("optimiser steps", f"{plan.steps:,}"),
        ("one image, forward and backward", f"{1000 * plan.seconds_per_image:.3g} ms"),
        ("one image, reading and augmenting", f"{1000 * plan.seconds_per_read:.3g} ms"),
        ("whole run with its evaluations", duration(plan.seconds)),
        ("memory of weights, gradients and optimiser", f"{plan.fixed_bytes / 1e6:,.0f} MB"),
        ("memory of one image's activations", f"{plan.image_bytes / 1e6:,.1f} MB"),
        (f"memory of a process with {plan.images} images at a time", f"{plan.bytes / 1e9:,.2f} GB"),
    ]
    print_table("Estimated from a trial step on this machine", ("", ""), rows)
