"""``vil train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .output import print_line, print_table
from .parser import settings_from
from .recipes import recipe_settings
from .training import QUICK_START, run_training

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

    Without arguments, a small Vision Longformer learns the built-in Fashion-MNIST images in a few minutes. Change any
    setting of a recipe by --key value, as in 'vil train cifar10 --epochs 5 --lr 1e-3'; 'vil recipes' lists the recipes,
    'vil recipes NAME --all' all settings. With several processes: 'torchrun --nproc-per-node 4 -m vision_longformer
    train …'. Ctrl-C saves a checkpoint and stops.

    Args:
        recipe: a name from 'vil recipes' or a .yaml file of your own; quickstart by default.
        resume: resume the run in this directory; cannot be combined with other arguments.
        output: the run directory, runs/RECIPE-1 or the next free number by default.
        dry_run: print all settings, the schedule, and the estimated time and memory on this machine, without training.
    """
    from ..training.recipe import parse_values

    changes = parse_values(settings)
    if dry_run:
        _print_plan(recipe or QUICK_START, changes)
        return
    from ..classification.task import ClassificationTask

    trained = run_training(ClassificationTask, recipe, resume, output, changes, "vil train")
    if trained is not None:
        _print_end(trained)


def _print_end(trained: TrainedRun) -> None:
    results = trained.best
    line = f"{results['top1']:.2f}% top-1, {results['top5']:.2f}% top-5 on the evaluation set"
    print_line(f"{line}; best checkpoint: {trained.checkpoint}")
    if trained.pictures:
        print_line(f"look at {' and '.join(map(str, trained.pictures))}")
    print_line(f"next: vil predict {trained.checkpoint} IMAGE, or vil evaluate {trained.checkpoint} --data DATA")


def _print_plan(recipe: str, changes: Mapping[str, Any]) -> None:
    from ..classification.estimate import estimate
    from ..classification.recipe import ClassificationRecipe
    from ..training.recipe import resolve, to_yaml
    from .training import duration

    resolved = resolve(ClassificationRecipe, recipe, **changes)
    print_line(to_yaml(resolved).rstrip())
    plan = estimate(resolved)
    print_table("Schedule", ("epoch", "learning rate"), [(f"{at:g}", f"{rate:.3g}") for at, rate in plan.rates])
    rows = [
        ("data", plan.data),
        ("optimiser steps", f"{plan.steps:,}"),
        ("one image, forward and backward", f"{1000 * plan.seconds_per_image:.3g} ms"),
        ("whole training on this machine", duration(plan.seconds)),
        ("memory of weights, gradients and optimiser", f"{plan.fixed_bytes / 1e6:,.0f} MB"),
        ("memory of one image's activations", f"{plan.image_bytes / 1e6:,.1f} MB"),
        (f"memory of a process with {plan.images} images at a time", f"{plan.bytes / 1e9:,.2f} GB"),
    ]
    print_table("Estimated on this machine, loading and evaluation not counted", ("", ""), rows)
