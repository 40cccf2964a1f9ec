"""One run of a study in a process of its own: train or resume, measure, write ``result.json`` into its directory.

``python -m vision_longformer.studies.job JOB.json``; see :class:`Job`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..files import write_json
from ..training.callbacks import Callback, CallbackList
from ..training.recipe import BackboneSettings, resolve
from .declaration import compared_settings, recipe_type, size_measure
from .results import RunResult

RESULT = "result.json"


@dataclass(frozen=True)
class Job:
    """What a process is told: paths are absolute.

    - ``directory``: of the run; the recipe is beside it, as ``directory.yaml``.
    - ``measures``: results that must be numbers, or the run has failed.
    - ``parent``: the process without which this one ends; None to go on alone.
    """

    task: str
    seed: int
    directory: str
    measures: tuple[str, ...]
    sizes: tuple[float, ...] = ()
    parent: int | None = None

    @property
    def recipe_file(self) -> Path:
        return Path(f"{self.directory}.yaml")

    @property
    def result_file(self) -> Path:
        return Path(self.directory) / RESULT

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "measures": tuple(values["measures"]), "sizes": tuple(values["sizes"])})


class Watch(Callback):
    """Ends the process, as a crash would, when the study that started it is gone."""

    def __init__(self, parent: int | None) -> None:
        self._parent = parent

    def on_step(self, step: int) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            os._exit(1)

    def on_eval_progress(self, done: int, total: int) -> None:
        self.on_step(0)


def run_job(job: Job) -> None:
    """Train, or resume what an earlier process has begun, and write the result.

    Of a run that has a result already, only what the job measures beyond it is evaluated.
    """
    with _only_one(Path(job.directory)):
        settings = resolve(recipe_type(job.task), str(job.recipe_file))
        before = read_result(job)._asdict() if job.result_file.exists() else {}
        _check_same(job, settings, before)
        if before and before["metrics"].keys() >= set(job.measures):
            return
        result = before or _train(job, settings)
        metrics = {**result["metrics"], **_at_other_sizes(job, settings)}
        missing = [name for name in job.measures if not math.isfinite(metrics.get(name, math.nan))]
        if missing:
            raise ValueError(f"the evaluation gave no number for {' and '.join(missing)}")
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if int(os.environ.get("RANK", 0)) == 0:
            write_json(job.result_file, {**result, "metrics": metrics, "settings": compared_settings(settings)})


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Wait until no other process is at this run: one whose study was killed ends within a step or a batch."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    if int(os.environ.get("RANK", 0)) > 0:  # of several processes of one run the first holds the lock
        yield
        return
    with Path(f"{directory}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _train(job: Job, settings: BackboneSettings) -> dict[str, Any]:
    """The result but for its settings: the last evaluation, what training has cost, and circumstances."""
    from ..training import run
    from ..training.meter import CostMeter, read_cost
    from ..training.run_directory import RECIPE

    directory = Path(job.directory)
    callback = CallbackList(Watch(job.parent), CostMeter(directory))
    if (directory / RECIPE).exists():
        trained = run.resume(task_type(job.task), directory, callback=callback)
    else:
        shutil.rmtree(directory, ignore_errors=True)  # what a crash left before the first step
        trained = run.train(task_type(job.task), settings, output=directory, callback=callback)
    cost = {**read_cost(directory)._asdict(), **model_costs(settings, count_classes(settings))}
    return {"seed": job.seed, "metrics": trained.last, **cost, **_circumstances()}


def _check_same(job: Job, settings: BackboneSettings, result: Mapping[str, Any]) -> None:
    """Refuse a directory whose run was started with other settings, whether it has a ``result`` yet or not."""
    from ..training.run_directory import RECIPE

    recipe = Path(job.directory) / RECIPE
    started = compared_settings(resolve(type(settings), str(recipe))) if recipe.exists() else {}
    before, now = {**started, **result.get("settings", {})}, compared_settings(settings)
    for key in sorted({*before, *now} if before else ()):
        if before.get(key) != now.get(key):
            change = f"{key} {before.get(key)!r}, and now it is {now.get(key)!r}"
            raise ValueError(
                f"{job.directory} was started with {'other data' if key == 'data' else change}; "
                "delete it, or give another --output"
            )


def task_type(task: str) -> Any:
    """The training task by its name."""
    if task == "detection":
        from ..detection.task import DetectionTask

        return DetectionTask
    from ..classification.task import ClassificationTask

    return ClassificationTask


def _at_other_sizes(job: Job, settings: Any) -> dict[str, float]:
    """Accuracies of the last model on images of other sizes."""
    if not job.sizes:
        return {}
    from ..classification.evaluate import evaluate
    from ..models.config import size_pair

    height, width = size_pair(settings.image_size)
    checkpoint = Path(job.directory) / "last.safetensors"
    accuracies = {}
    for factor in job.sizes:
        size = (round(factor * height), round(factor * width))
        accuracies[size_measure(factor)] = evaluate(checkpoint, size=size, workers=0).accuracies["top1"]
    return accuracies


def model_costs(settings: Any, classes: int) -> dict[str, int]:
    """Trainable parameters of the model, and MACs of one image; of a detector those of its backbone."""
    from ..costs import count_parameters, executed_macs

    if settings.task == "classification":
        config = settings.model_config(classes)
        return {"parameters": count_parameters(config).trainable, "macs": executed_macs(config).total}
    import torch

    from ..detection.detectors import build_detector

    detector = settings.detector_config(classes)
    with torch.device("meta"):
        model = build_detector(detector.without_pretrained())
    size = (min(detector.min_sizes[-1], detector.max_size), detector.max_size)
    macs = executed_macs(detector.backbone_config, size).total
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "macs": macs}


def count_classes(settings: Any) -> int:
    """Classes or categories of the data; where it is not here, those of ImageNet-1K or COCO."""
    if settings.task == "classification":
        from ..classification.dataset import open_images
        from ..classification.estimate import IMAGENET_CLASSES

        try:
            return settings.num_classes or len(open_images(settings.data, settings.train_split).classes)
        except (OSError, ValueError):
            return IMAGENET_CLASSES
    from ..detection.dataset import open_detection
    from ..detection.estimate import COCO_CATEGORIES

    try:
        return len(open_detection(settings.data, settings.eval_split).categories)
    except (OSError, ValueError):
        return COCO_CATEGORIES


def _circumstances() -> dict[str, Any]:
    from ..training.run_directory import environment

    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"environment": environment(), "finished": finished}


def read_result(job: Job) -> RunResult:
    """What :func:`run_job` has written."""
    return RunResult(**json.loads(job.result_file.read_text(encoding="utf-8")))


def main(path: str) -> None:
    """Run the job of a file; what went wrong is the last line on stderr."""
    from ..training.loop import Interrupted

    try:
        run_job(Job.from_json(Path(path).read_text(encoding="utf-8")))
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        raise SystemExit(128 + interruption.number) from None
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(sys.argv[1])
