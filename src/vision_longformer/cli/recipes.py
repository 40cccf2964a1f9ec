"""``vil recipes`` and ``vil detect recipes``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .output import print_json, print_table

if TYPE_CHECKING:
    from ..training.recipe import BackboneSettings


def recipes(name: str | None = None, /, *, all: bool = False, json: bool = False) -> None:
    """List the training recipes, or print one as YAML to start your own from.

    Args:
        name: a recipe from the list, or a .yaml file.
        all: also print the settings that the recipe leaves at their defaults.
        json: print JSON; a single recipe always with all settings.
    """
    _list_or_show("classification", name, all, json)


def detect_recipes(name: str | None = None, /, *, all: bool = False, json: bool = False) -> None:
    """List the training recipes of detectors, or print one as YAML to start your own from.

    Args:
        name: a recipe from the list, or a .yaml file.
        all: also print the settings that the recipe leaves at their defaults.
        json: print JSON; a single recipe always with all settings.
    """
    _list_or_show("detection", name, all, json)


def _list_or_show(task: str, name: str | None, all_settings: bool, json: bool) -> None:
    from ..training.recipe import resolve

    if name is None:
        _list(task, json)
    else:
        _show(resolve(_recipe_type(task), name), all_settings, json)


def _list(task: str, json: bool) -> None:
    from ..training.recipe import recipe_names, resolve

    columns = ("recipe", "model", "data", "about", "steps" if task == "detection" else "epochs", "batch_size")
    rows = []
    for name in recipe_names(_recipe_type(task)):
        recipe = resolve(_recipe_type(task), name)
        rows.append((name, *(getattr(recipe, column) for column in columns[1:])))
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(f"{len(rows)} recipes", (*columns[:-1], "batch"), rows, left=4)


def _show(recipe: BackboneSettings, all_settings: bool, json: bool) -> None:
    from ..training.recipe import to_yaml

    if json:
        print_json(asdict(recipe))
    else:
        print(to_yaml(recipe, changed_only=not all_settings), end="")


def _recipe_type(task: str) -> type[BackboneSettings]:
    if task == "detection":
        from ..detection.recipe import DetectionRecipe

        return DetectionRecipe
    from ..classification.recipe import ClassificationRecipe

    return ClassificationRecipe
