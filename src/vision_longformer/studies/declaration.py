"""A study as data: rows that change a recipe, the paper's value of each, and at which scales it can be run."""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import check_at_least, check_choice, unknown_name
from ..training.recipe import BackboneSettings, RecipeLoader, resolve, to_yaml
from . import cifar10

SCALES = ("small", "imagenet", "coco")
TASKS = ("classification", "detection")

RECIPE = "recipe"
"""The key beside the settings that names the recipe which they change."""

BUILT_IN = ("garments", "fashion-mnist")
"""Names of built-in data, which a size may follow, as in garments:160."""

LIBRARIES = ("torch/", "hfds/", "wds/")
"""How the names of data start that are no paths."""

NOT_COMPARED = ("about", "seed", "workers", "checkpoint_minutes", "log_every")
"""Settings in which two runs of a row may differ, or that change nothing of its result."""


@dataclass(frozen=True)
class Row:
    """One of the things compared: ``paper`` is the paper's value, if it states one.

    ``settings`` are by scale, and change those of the study.
    """

    name: str
    paper: float | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name is {self.name!r}, not a text; write it in quotes")
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"settings of {self.name!r} is {self.settings!r}; write {{small: {{…}}}}, by scale")
        for scale, settings in self.settings.items():
            if scale in SCALES and not isinstance(settings, Mapping):
                raise ValueError(
                    f"settings of {self.name!r} for {scale} is {settings!r}; write keys with values, as in {{lr: 1e-3}}"
                )
        if self.paper is not None and not _is_number(self.paper):
            raise ValueError(f"paper of {self.name!r} is {self.paper!r}; write a number, as in 81.8")


@dataclass(frozen=True)
class Study:
    """A comparison.

    - ``task``: classification or detection.
    - ``scales``: by scale, the recipe that all rows change and what they all change of it.
    - ``baseline``: the row that others are compared with.
    - ``table``: where the paper has its values.
    - ``sizes``: classifiers are evaluated at so many times their image size, too.
    - ``data``: takes the place of data that is not built in; see :meth:`with_data`.
    - ``init``: what detectors start from whose settings do not say.
    """

    name: str
    about: str
    task: str
    table: str
    baseline: str
    scales: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    sizes: tuple[float, ...] = ()
    data: str | None = None
    init: str | None = None

    def __post_init__(self) -> None:
        self._check_texts()
        check_choice("task", self.task, TASKS)
        self._check_scales()
        check_choice(f"baseline of study {self.name}", self.baseline, [row.name for row in self.rows])
        self._check_sizes()
        if self.sizes and self.task != "classification":
            raise ValueError(f"study {self.name}: sizes are for classification only")
        if self.init is not None and self.task != "detection":
            raise ValueError(f"study {self.name}: a classifier to start from, init, is for detection only")

    def _check_texts(self) -> None:
        for name in ("name", "about", "table", "data", "init"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name not in ("data", "init")):
                raise ValueError(f"{name} is {value!r}, not a text; write it in quotes")
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(f"name is {self.name!r}; it names a folder, so write it without a path, as in rates")

    def _check_scales(self) -> None:
        if not isinstance(self.scales, Mapping) or not self.scales:
            raise ValueError(
                f"scales is {self.scales!r}; name a recipe for each, as in {{small: {{recipe: quickstart}}}}"
            )
        for scale, settings in self.scales.items():
            check_choice("scale", scale, SCALES)
            if not isinstance(settings, Mapping) or RECIPE not in settings:
                raise ValueError(f"study {self.name}: scale {scale} names no {RECIPE}")

    def _check_sizes(self) -> None:
        sizes = self.sizes
        if not isinstance(sizes, tuple) or not all(_is_number(size) and size > 0 for size in sizes):
            raise ValueError(f"sizes is {sizes!r}; write a list of factors, as in [1.5, 2]")
        if len({*map(size_measure, sizes)}) < len(sizes):
            raise ValueError(f"sizes is {[*sizes]}; write each factor once")

    @property
    def measures(self) -> tuple[str, ...]:
        """The results that are compared, the main one first."""
        if self.task == "detection":
            return ("box_AP", "mask_AP")
        return ("top1", *(size_measure(factor) for factor in self.sizes))

    def with_data(self, data: str | None) -> Study:
        """The study on other data; a path is that from the root, whatever folder its jobs run in."""
        if data is None:
            return self
        if Path(data).exists():
            return replace(self, data=str(Path(data).resolve()))
        if not is_built_in(data) and not data.startswith(LIBRARIES):
            raise FileNotFoundError(f"there is no data {data}; --data names a file, a folder or data of a library")
        return replace(self, data=data)

    def with_init(self, init: str | None) -> Study:
        """The study with a classifier that its detectors start from; a path is that from the root."""
        if init is None:
            return self
        return replace(self, init=str(Path(init).resolve()) if Path(init).exists() else init)

    def settings(self, row: Row, scale: str, seed: int) -> BackboneSettings:
        """All settings of the run of a row with a seed."""
        changes = {**self.scales[scale], **row.settings.get(scale, {}), "seed": seed}
        recipe = str(changes.pop(RECIPE))
        settings: Any = resolve(recipe_type(self.task), recipe, **changes)
        if self.init is not None and settings.init is None:
            settings = replace(settings, init=self.init)
        return settings if self.data is None or is_built_in(settings.data) else replace(settings, data=self.data)

    def is_on_built_in_data(self, scale: str) -> bool:
        """Whether all rows that can be run are, so that other data would change nothing."""
        able = [row for row in self.rows if not self.problem(row, scale)]
        settings: list[Any] = [self.settings(row, scale, 0) for row in able]
        return bool(settings) and all(is_built_in(own.data) for own in settings)

    def folder(self, row: Row) -> str:
        """The name of a row as part of a file name; its number, if nothing of it can be."""
        number = next(number for number, other in enumerate(self.rows, 1) if other is row)
        return re.sub(r"[\W_]+", "-", row.name.lower()).strip("-") or f"row-{number}"

    def problem(self, row: Row, scale: str) -> str:
        """Why a row cannot be run; empty if it can."""
        first = next(other for other in self.rows if self.folder(other) == self.folder(row))
        if first is not row:
            return f"there is another row {first.name!r}, whose folder would have the same name; rename one of them"
        for name in row.settings:
            if name not in self.scales:
                return f"settings are given by scale, and {name!r} is not one of this study's: {', '.join(self.scales)}"
        try:
            self.settings(row, scale, 0)
        except (ValueError, TypeError, OSError) as error:
            return str(error)
        return ""

    def check_scale(self, scale: str) -> None:
        """Refuse a scale that is not there."""
        check_choice("scale", scale, SCALES)
        if scale not in self.scales:
            raise ValueError(f"study {self.name} has no scale {scale}, only {' and '.join(self.scales)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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


def compared_settings(settings: Any) -> dict[str, Any]:
    """What a run's result depends on beside its seed: data, and settings other than the defaults, as JSON data."""
    changed = yaml.load(to_yaml(settings, changed_only=True), RecipeLoader) or {}
    compared = {key: value for key, value in changed.items() if key not in NOT_COMPARED}
    return {**compared, "data": data_identity(settings.data)}


def is_built_in(data: str) -> bool:
    """Whether the data comes with the package."""
    return data.partition(":")[0] in BUILT_IN


def data_identity(data: str) -> str:
    """What makes two data sets the same: the contents of .npz and .zip files, else the path from the root.

    CIFAR-10 as ``studies/cifar10.py`` writes it is called so whatever its file is; data that is no path, or not there,
    goes by its name.
    """
    path = Path(data)
    if not path.exists():
        return data
    if not path.is_file() or not zipfile.is_zipfile(path):
        return str(path.resolve())
    found = contents(path, path.stat().st_mtime_ns)
    return cifar10.CIFAR10 if found == cifar10.CONTENTS else found


@cache
def contents(path: Path, changed: int) -> str:
    """A number for the files in a .npz or .zip file, from the checksums that it lists; ``changed`` is when it was."""
    with zipfile.ZipFile(path) as archive:
        listed = sorted((item.filename, item.CRC, item.file_size) for item in archive.infolist())
    return f"contents {hashlib.sha256(repr(listed).encode()).hexdigest()[:16]}"


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
    defaults = {"name": path.stem, "about": "", "table": "", "task": "classification", "scales": {}}
    defaults["baseline"] = rows[0].name
    sizes = data.get("sizes", [])
    sizes = tuple(sizes) if isinstance(sizes, list) else sizes
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
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
