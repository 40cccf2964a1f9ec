"""``vil train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .output import log_lines, print_line, print_table

if TYPE_CHECKING:
    from ..training.runs import Trained

QUICK_START = "quickstart"


def train(
    recipe: str | None = None,
    /,
    resume: str | None = None,
    output: str | None = None,
    dry_run: bool = False,
    **settings: str,
) -> None:
    """Train a classifier.

    Without arguments, a small Vision Longformer learns the built-in Fashion-MNIST images in a few minutes. Any setting
    of a recipe is changed by --key value, as in 'vil train cifar10 --epochs 5 --lr 1e-3'; 'vil recipes' lists the
    recipes, 'vil recipes NAME --all' all settings. Over several processes: 'torchrun --nproc_per_node 4 -m
    vision_longformer train …'. Ctrl-C saves and ends.

    Args:
        recipe: a name from 'vil recipes' or a .yaml file of your own; quickstart by default.
        resume: a run directory to go on with; it takes no other arguments.
        output: the run directory, runs/RECIPE-1 or the next free number by default.
        dry_run: print the resolved settings, the schedule, and what it would take on this machine; train nothing.
    """
    from ..classification.train import CLASSIFICATION
    from ..training.loop import Interrupted
    from ..training.recipes import parse_values
    from .training_progress import TrainingProgress

    changes = parse_values(settings)
    if dry_run:
        _print_plan(recipe or QUICK_START, changes)
        return
    if resume is not None and (changes or output or recipe):
        raise ValueError("--resume goes on with a run as it was; it takes no recipe, settings or other options")
    observer = TrainingProgress("top1", "%")
    try:
        with log_lines():
            if resume is not None:
                trained = CLASSIFICATION.resume(resume, observer)
            else:
                trained = CLASSIFICATION.train(recipe or QUICK_START, output, observer, **changes)
    except Interrupted as interruption:
        if _is_first_process():
            print(f"{interruption}; go on by: vil train --resume {interruption.run}", file=sys.stderr)
        raise SystemExit(128 + interruption.number) from None
    if _is_first_process():
        _print_end(trained)


def _is_first_process() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def _print_end(trained: Trained) -> None:
    results = trained.results
    line = f"{results['top1']:.2f}% top-1, {results['top5']:.2f}% top-5 on the evaluation set"
    print_line(f"{line}; best checkpoint: {trained.checkpoint}")
    if trained.pictures:
        print_line(f"look at {' and '.join(map(str, trained.pictures))}")
    print_line(f"next: vil predict {trained.checkpoint} IMAGE, or vil evaluate {trained.checkpoint} --data DATA")


def _print_plan(recipe: str, changes: Mapping[str, Any]) -> None:
    from ..classification.estimate import estimate
    from ..classification.train import CLASSIFICATION
    from ..training.recipes import to_yaml
    from .training_progress import duration

    resolved = CLASSIFICATION.resolve(recipe, **changes)
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
