"""What a run directory says about a checkpoint in it: recipe, software, and the evaluation that belongs to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.container import DETECTOR
from ..training.recipes import to_yaml
from ..training.run_directory import ENVIRONMENT, RECIPE, RunDirectory


@dataclass(frozen=True)
class RunFacts:
    """``recipe`` is the YAML of what differs from the defaults; ``evaluation`` is empty if none is known to belong."""

    data: str
    train_split: str
    eval_split: str
    recipe: str
    packages: dict[str, str]
    evaluation: dict[str, float]


def run_facts(checkpoint: Path, format: str) -> RunFacts | None:
    """The facts of the run that ``checkpoint`` lies in; None if it lies in none."""
    folder = checkpoint.parent
    if not (folder / RECIPE).is_file():
        return None
    kind, score = _kind(format)
    recipe = kind.resolve(str(folder / RECIPE))
    data = _public(recipe.data)
    shown = replace(recipe, data=data, init=recipe.init and _public(recipe.init))
    packages = json.loads((folder / ENVIRONMENT).read_text())["packages"]
    evaluation = _evaluation(RunDirectory(folder), checkpoint.stem, score)
    yaml = to_yaml(shown, changed_only=True)
    return RunFacts(data, recipe.train_split, recipe.eval_split, yaml, packages, evaluation)


def _kind(format: str) -> tuple[Any, str]:
    """The kind of training and the measure that its best checkpoint is chosen by."""
    if format == DETECTOR:
        from ..detection.task import DetectionTask
        from ..detection.train import DETECTION

        return DETECTION, DetectionTask.score
    from ..classification.task import ClassificationTask
    from ..classification.train import CLASSIFICATION

    return CLASSIFICATION, ClassificationTask.score


def _public(path: str) -> str:
    """A path or a data set such as ``torch/cifar10:/data`` without the folders of this machine; other names as is."""
    return Path(path).name if Path(path).is_absolute() else path.partition(":/")[0]


def _evaluation(run: RunDirectory, name: str, score: str) -> dict[str, float]:
    """The evaluation of the ``best`` or the ``last`` checkpoint; of others it is not known."""
    found = [record["evaluation"] for record in run.records() if "evaluation" in record]
    if not found or name not in ("best", "last"):
        return {}
    return max(found, key=lambda one: one[score]) if name == "best" else found[-1]
