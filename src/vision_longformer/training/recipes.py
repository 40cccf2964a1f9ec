"""Recipes as files: small YAML deltas on a dataclass's defaults, shipped with the package or written by the user."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from ..errors import unknown_name
from .yaml_values import RecipeDumper, RecipeLoader, as_type, in_words

T = TypeVar("T")

SHIPPED = Path(__file__).parents[1] / "recipes"
"""One folder of files per kind of recipe."""

BASE = "base"
"""The key that names the recipe of which a file states the differences."""


def recipe_names(kind: str) -> list[str]:
    """The shipped recipes of a ``kind``, such as "classification"."""
    return sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))


def load_recipe(kind: str, name_or_path: str) -> dict[str, Any]:
    """What a recipe changes of the defaults, by key: a shipped one by name, or a ``.yaml`` file.

    A file may start from another by ``base: NAME``, or by a path as seen from its own folder. A key of the file
    replaces that of its base as a whole, ``model_options`` too.
    """
    values: dict[str, Any] = {}
    chain: list[str] = []
    following: str | None = name_or_path
    while following is not None:
        chain.append(following)
        if following in chain[:-1]:
            raise ValueError(f"recipe {' → '.join(chain)} has itself for its base; a chain of bases must end")
        delta = _parse(following, _read(kind, following))
        base = delta.pop(BASE, None)
        values = {**delta, **values}
        following = None if base is None else _beside(following, base)
    return values


def _read(kind: str, name_or_path: str) -> str:
    if not _is_path(name_or_path):
        names = recipe_names(kind)
        if name_or_path not in names:
            raise unknown_name("recipe", name_or_path, names)
        return (SHIPPED / kind / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _beside(recipe: str, base: object) -> str:
    """The base that ``recipe`` names, a path taken from its folder."""
    if not isinstance(base, str):
        raise ValueError(f"{recipe}: {BASE} is {base!r}; it must be the name of a recipe or a .yaml file")
    return os.path.normpath(Path(recipe).parent / base) if _is_path(base) else base


def _parse(recipe: str, text: str) -> dict[str, Any]:
    try:
        data = yaml.load(text, RecipeLoader)
    except yaml.MarkedYAMLError as error:
        line = 1 + (error.problem_mark.line if error.problem_mark else 0)
        raise ValueError(f"{recipe}, line {line}: {error.problem}; write lines of 'key: value'") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{recipe} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ValueError(f"{recipe} is not a recipe; write lines of 'key: value'")
    return data


def parse_values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Values of a command line, each read as it would be in a file; what is not YAML is taken for text."""
    values: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            values[key] = yaml.load(text, RecipeLoader)
        except yaml.YAMLError:
            values[key] = text
    return values


def build(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """The dataclass ``cls`` with ``values`` for some of its fields, as YAML gives them; messages name ``source``."""
    types = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    converted = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"{source}: {unknown_name('key', key, names)}")
        try:
            converted[key] = as_type(value, types[key])
        except TypeError:
            raise ValueError(f"{source}: {key} is {value!r}; it must be {in_words(types[key])}") from None
    try:
        return cls(**converted)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


def to_yaml(recipe: Any, *, changed_only: bool = False) -> str:
    """A recipe as a file that :func:`load_recipe` reads: every field, or only those that differ from the defaults."""
    values = asdict(recipe)
    if changed_only:
        values = {field.name: values[field.name] for field in fields(recipe) if _changed(recipe, field)}
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=math.inf)


def _changed(recipe: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(recipe, field.name) != default)
