"""What a study is about to run and what it will cost, before it starts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from ..errors import check_at_least
from ..models.zoo import MODELS
from .cifar10 import CIFAR10, HOW_TO_GET
from .declaration import Row, Study, is_built_in
from .job import count_classes, model_costs
from .results import ResultStore, RunResult

TRIAL_MACS = 1e9
"""MACs of an image up to which a step is tried on a CPU, to estimate the time of a run."""

MAX_REASON = 240
"""Characters of why a classifier does not fit; the whole would list hundreds of tensors."""

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
    """Of one run of a row: parameters, MACs of an image, images in all and seconds, both if they can be told.

    ``how`` says where the seconds come from.
    """

    parameters: int
    macs: int
    images: int | None
    seconds: float | None
    how: str

    @property
    def flops(self) -> float | None:
        """Of training, computed from the MACs."""
        return None if self.images is None else float(FLOPS_PER_MAC * self.macs * self.images)


def study_costs(study: Study, scale: str, store: ResultStore, threads: int = 1) -> dict[str, RowCost]:
    """What a run of each row with so many ``threads`` costs, by name, of the rows that can be run.

    Times are those of finished runs; of rows without one they are in proportion to MACs, from the finished runs of
    others or else from a trial step of the first row.
    """
    rows = [row for row in study.rows if not study.problem(row, scale)]
    settings: dict[str, Any] = {row.name: study.settings(row, scale, 0) for row in rows}
    images = {name: _count_images(own, scale) for name, own in settings.items()}
    classes = _once_per_data(count_classes)
    models = {name: model_costs(own, classes(own)) for name, own in settings.items()}
    done = {row.name: store.of_row(study, row, scale) for row in rows}
    seconds = {name: fmean(run.train_seconds for run in runs.values()) for name, runs in done.items() if runs}
    how = "by its MACs"
    if rows and not seconds:
        first = rows[0].name
        if models[first]["macs"] > TRIAL_MACS and not _has_gpu():
            how = "too large to try on this machine"
        elif images[first] is None:
            how = "the number of images is not known"
        else:
            try:
                seconds[first] = _estimate(settings[first], threads)
            except (OSError, ValueError):  # told when the run is due
                how = "its data cannot be read"
    pace = fmean(value / models[name]["macs"] for name, value in seconds.items()) if seconds else None
    costs = {}
    for name in settings:
        measured = "measured" if done[name] else "from a trial step" if name in seconds else how
        time = seconds.get(name, None if pace is None else pace * models[name]["macs"])
        costs[name] = RowCost(images=images[name], seconds=time, how=measured, **models[name])
    return costs


def _count_images(settings: Any, scale: str) -> int | None:
    """Images of a run with repetitions; None if it is stated in epochs of a data set whose size is not known."""
    from ..classification.estimate import IMAGENET_IMAGES
    from ..detection.estimate import COCO_IMAGES

    if settings.steps:
        return int(settings.steps * settings.batch_size)
    if is_built_in(settings.data):
        known = None if _data_problem(settings) else len(_open_training_data(settings))
    else:
        stated = getattr(settings, "num_images", None)
        known = stated or {"imagenet": IMAGENET_IMAGES, "coco": COCO_IMAGES}.get(scale)
    return None if known is None else int(settings.epochs * known)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _estimate(settings: Any, threads: int) -> float:
    import torch

    from ..classification.estimate import estimate
    from ..detection.estimate import estimate as estimate_detector

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return (estimate_detector if settings.task == "detection" else estimate)(settings).seconds
    finally:
        torch.set_num_threads(before)


T = TypeVar("T")


def _once_per_data(ask: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function of settings whose answer depends on their data only, which may be slow to open."""
    answers: dict[tuple[Any, ...], T] = {}

    def answer(settings: Any) -> T:
        data = (settings.data, settings.train_split, settings.eval_split, getattr(settings, "num_classes", None))
        if data not in answers:
            answers[data] = ask(settings)
        return answers[data]

    return answer


def missing_inputs(study: Study, scale: str) -> dict[str, str]:
    """Why data or a starting classifier cannot be read, by the name of each row that could be run if it were there."""
    problem = _once_per_data(_data_problem)
    able = [row for row in study.rows if not study.problem(row, scale)]
    settings = {row.name: study.settings(row, scale, 0) for row in able}
    problems = {name: [problem(own), _init_problem(own)] for name, own in settings.items()}
    return {name: "; ".join(filter(None, texts)) for name, texts in problems.items() if any(texts)}


def random_starts(study: Study, scale: str) -> list[str]:
    """Rows whose detectors start from random weights, where the paper's start from a classifier."""
    if scale != "coco" or study.task != "detection":
        return []
    able = [row for row in study.rows if not study.problem(row, scale)]
    settings: dict[str, Any] = {row.name: study.settings(row, scale, 0) for row in able}
    return [name for name, own in settings.items() if own.init is None and own.model in MODELS]


def _data_problem(settings: Any) -> str:
    """Why the training data cannot be read; empty if it can."""
    try:
        _open_training_data(settings)
    except (OSError, ValueError) as error:
        if settings.data == CIFAR10:
            return f"{error}; get CIFAR-10 by: {HOW_TO_GET}"
        return f"{error}; name it by --data" if isinstance(error, FileNotFoundError) else str(error)
    return ""


def _init_problem(settings: Any) -> str:
    """Why a detector cannot start from its classifier; empty if it can, or if it has none."""
    if settings.task != "detection" or settings.init is None:
        return ""
    from ..detection.checkpoint import load_backbone
    from ..detection.detectors import build_detector

    try:
        detector = build_detector(settings.detector_config(num_classes=1).without_pretrained())
        load_backbone(detector, settings.init, settings.table_resize)
    except (OSError, ValueError) as error:
        return f"it cannot start from {settings.init}: {textwrap.shorten(str(error), MAX_REASON, placeholder=' …')}"
    return ""


def _open_training_data(settings: Any) -> Any:
    if settings.task == "detection":
        from ..detection.dataset import open_detection

        return open_detection(settings.data, settings.train_split)
    from ..classification.dataset import open_images

    return open_images(settings.data, settings.train_split, num_classes=settings.num_classes)
