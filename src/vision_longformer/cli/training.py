"""What the training commands share: running to the end or to a signal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .output import log_lines

if TYPE_CHECKING:
    from ..training.runs import Kind, Trained

QUICK_START = "quickstart"


def run_training(
    kind: Kind[Any, Any],
    recipe: str | None,
    resume: str | None,
    output: str | None,
    changes: Mapping[str, Any],
    command: str,
    score: str,
) -> Trained | None:
    """Train or go on, told on the terminal; None in processes other than the first. ``score`` is what is shown."""
    from ..training.loop import Interrupted
    from .training_progress import TrainingProgress

    if resume is not None and (changes or output or recipe):
        raise ValueError("--resume goes on with a run as it was; it takes no recipe, settings or other options")
    first = int(os.environ.get("RANK", 0)) == 0
    observer = TrainingProgress(score)
    try:
        with log_lines():
            if resume is not None:
                trained = kind.resume(resume, observer)
            else:
                trained = kind.train(recipe or QUICK_START, output, observer, **changes)
    except Interrupted as interruption:
        if first:
            print(f"{interruption}; go on by: {command} --resume {interruption.run}", file=sys.stderr)
        raise SystemExit(128 + interruption.number) from None
    return trained if first else None
