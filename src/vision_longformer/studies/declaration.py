"""A study as data: rows that change a recipe, the paper's value of each, and at which scales it can be run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..errors import check_at_least, check_choice, unknown_name
from ..training.recipe import BackboneSettings, RecipeLoader, resolve, to_yaml

SCALES = ("small", "imagenet", "coco")
TASKS = ("classification", "detection")

RECIPE = "recipe"
"""The key beside the settings that names the recipe which they change."""

BUILT_IN = ("garments", "fashion-mnist")
"""How the names of built-in data start."""

NOT_COMPARED = ("about", "seed", "data", "workers", "checkpoint_minutes", "log_every")
"""Settings in which two runs of a row may differ, or that change nothing of its result."""


@dataclass(frozen=True)
class Row:
    """One of the things compared: ``paper`` is the paper's value, if it states one.

    ``settings`` are by scale, and change those of the study.
    """

    name: str
    paper: float | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Study:
    """A comparison.

    - ``task``: classification or detection.
    - ``scales``: by scale, the recipe that all rows change and what they all change of it.
    - ``baseline``: the row that others are compared with.
    - ``table``: where the paper has its values.
    - ``sizes``: classifiers are evaluated at so many times their image size, too.
    """

    name: str
    about: str
    task: str
    table: str
    baseline: str
    scales: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    sizes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        for scale in self.scales:
            check_choice("scale", scale, SCALES)
        for scale, settings in self.scales.items():
            if RECIPE not in settings:
                raise ValueError(f"study {self.name}: scale {scale} names no {RECIPE}")
        check_choice(f"baseline of study {self.name}", self.baseline, [row.name for row in self.rows])
        if self.sizes and self.task != "classification":
            raise ValueError(f"study {self.name}: sizes are for classification only")

    @property
    def measures(self) -> tuple[str, ...]:
        """The results that are compared, the main one first."""
        if self.task == "detection":
            return ("box_AP", "mask_AP")
        return ("top1", *(size_measure(factor) for factor in self.sizes))

    def settings(self, row: Row, scale: str, seed: int, data: str | None = None) -> BackboneSettings:
        """All settings of the run of a row with a seed; ``data`` takes the place of data that is not built in."""
        changes = {**self.scales[scale], **row.settings.get(scale, {}), "seed": seed}
        recipe = str(changes.pop(RECIPE))
        settings: Any = resolve(recipe_type(self.task), recipe, **changes)
        built_in = settings.data.startswith(BUILT_IN)
        return settings if data is None or built_in else replace(settings, data=data)

    def problem(self, row: Row, scale: str) -> str:
        """Why a row cannot be run; empty if it can."""
        same = [other for other in self.rows if other.slug == row.slug]
        if same[0] is not row:
            return f"there is another row {same[0].name!r}; give each its own name"
        try:
            self.settings(row, scale, 0)
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    def check_scale(self, scale: str) -> None:
        """Refuse a scale that is not there."""
        check_choice("scale", scale, SCALES)
        if scale not in self.scales:
            raise ValueError(f"study {self.name} has no scale {scale}, only {' and '.join(self.scales)}")


def size_measure(factor: float) -> str:
    """The name of the accuracy at ``factor`` times the image size."""
    return f"top1 at {factor:g}×"


def recipe_type(task: str) -> type[BackboneSettings]:
    """The recipes of a task."""
    if task == "detection":
        from ..detection.recipe import DetectionRecipe

        return DetectionRecipe
    from ..classification.recipe import ClassificationRecipe

    return ClassificationRecipe


def compared_settings(settings: BackboneSettings) -> dict[str, Any]:
    """What a run's result depends on beside its seed: settings other than the defaults, as JSON data."""
    changed = yaml.load(to_yaml(settings, changed_only=True), RecipeLoader) or {}
    return {key: value for key, value in changed.items() if key not in NOT_COMPARED}


def load_study(path: Path) -> Study:
    """A study of one's own from a YAML file: the fields of :class:`Study`, with rows as a list of their fields."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no study file {path}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ValueError(f"{path} is not a study; it needs rows, each with a name and settings by scale")
    rows = tuple(_from_data(Row, row, f"{path}, row {number}") for number, row in enumerate(data["rows"], 1))
    check_at_least(f"rows of {path}", len(rows), 1)
    defaults = {"name": path.stem, "about": "", "table": "", "task": "classification", "baseline": rows[0].name}
    sizes = tuple(data.get("sizes", ()))
    study: Study = _from_data(Study, {**defaults, **data, "rows": rows, "sizes": sizes}, str(path))
    return study


def _from_data(cls: type, data: Any, source: str) -> Any:
    """A dataclass from a mapping; messages name ``source``."""
    if not isinstance(data, dict):
        raise ValueError(f"{source} is {data!r}; write lines of 'key: value'")
    names = [item.name for item in fields(cls)]
    for key in data:
        if key not in names:
            raise ValueError(f"{source}: {unknown_name('key', key, names)}")
    try:
        return cls(**data)
    except TypeError as error:
        raise ValueError(f"{source}: {error}") from error
