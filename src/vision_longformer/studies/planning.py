"""What a study is about to run and what it will cost, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import check_at_least
from .catalogue import CIFAR10
from .cifar10 import HOW_TO_GET
from .declaration import Row, Study
from .job import model_costs
from .results import ResultStore, RunResult

TRIAL_MACS = 1e9
"""MACs of an image up to which a step is tried on a CPU, to estimate the time of a run."""

FLOPS_PER_MAC = 6
"""In training: two for a multiply-accumulate of the forward pass, and twice that for the backward pass."""


class PlannedRun(NamedTuple):
    """A row with a seed: its result if there is one, or the problem that keeps it from being run."""

    row: Row
    seed: int
    result: RunResult | None
    problem: str

    @property
    def is_due(self) -> bool:
        return self.result is None and not self.problem

    @property
    def title(self) -> str:
        return f"{self.row.name}, seed {self.seed}"


def plan(study: Study, scale: str, seeds: int, store: ResultStore) -> list[PlannedRun]:
    """All runs of a study, every row with the first seed before any with the second."""
    study.check_scale(scale)
    check_at_least("seeds", seeds, 1)
    planned = []
    for seed in range(seeds):
        for row in study.rows:
            problem = study.problem(row, scale)
            result = None if problem else store.find(study, row, scale, seed)
            planned.append(PlannedRun(row, seed, result, problem))
    return planned


class RowCost(NamedTuple):
    """Of one run of a row: parameters, MACs of an image, images in all, and seconds if they can be told.

    ``how`` says where the seconds come from.
    """

    parameters: int
    macs: int
    images: int
    seconds: float | None
    how: str

    @property
    def flops(self) -> float:
        """Of training, computed from the MACs."""
        return float(FLOPS_PER_MAC * self.macs * self.images)


def study_costs(study: Study, scale: str, store: ResultStore, data: str | None = None) -> dict[str, RowCost]:
    """What a run of each row costs, by name, of the rows that can be run.

    Times are those of finished runs; of rows without one they are in proportion to MACs, from the finished runs of
    others or else from a trial step of the first row.
    """
    rows = [row for row in study.rows if not study.problem(row, scale)]
    settings: dict[str, Any] = {row.name: study.settings(row, scale, 0, data) for row in rows}
    models = {name: model_costs(own) for name, own in settings.items()}
    done = {row.name: store.of_row(study, row, scale) for row in rows}
    seconds = {name: fmean(run.train_seconds for run in runs.values()) for name, runs in done.items() if runs}
    how = "by its MACs"
    if rows and not seconds:
        first = rows[0].name
        if models[first]["macs"] > TRIAL_MACS and not _has_gpu():
            how = "too large to try on this machine"
        else:
            seconds[first] = _estimate(settings[first])
    pace = fmean(value / models[name]["macs"] for name, value in seconds.items()) if seconds else None
    costs = {}
    for name, own in settings.items():
        measured = "measured" if done[name] else "from a trial step" if name in seconds else how
        time = seconds.get(name, None if pace is None else pace * models[name]["macs"])
        costs[name] = RowCost(images=_count_images(own), seconds=time, how=measured, **models[name])
    return costs


def _count_images(settings: Any) -> int:
    """Images of a run with repetitions; of data that an epoch passes over, as many as ImageNet-1K has."""
    from ..classification.estimate import IMAGENET_IMAGES

    return int(settings.steps * settings.batch_size if settings.steps else settings.epochs * IMAGENET_IMAGES)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _estimate(settings: Any) -> float:
    if settings.task == "detection":
        from ..detection.estimate import estimate as estimate_detector

        return estimate_detector(settings).seconds
    from ..classification.estimate import estimate

    return estimate(settings).seconds


def missing_data(study: Study, scale: str, data: str | None) -> str:
    """Why a study's data cannot be read; empty if it can."""
    runnable: Sequence[Row] = [row for row in study.rows if not study.problem(row, scale)]
    if not runnable:
        return ""
    settings: Any = study.settings(runnable[0], scale, 0, data)
    try:
        if study.task == "detection":
            from ..detection.dataset import open_detection

            open_detection(settings.data, settings.train_split)
        else:
            from ..classification.dataset import open_images

            open_images(settings.data, settings.train_split, num_classes=settings.num_classes)
    except (OSError, ValueError) as error:
        get = f"; get CIFAR-10 by: {HOW_TO_GET}" if settings.data == CIFAR10 else ""
        return f"{error}{get}"
    return ""
