"""``vil recipes``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .output import print_json, print_table

if TYPE_CHECKING:
    from ..classification.recipe import ClassificationRecipe


def recipes(name: str | None = None, /, *, all: bool = False, json: bool = False) -> None:
    """List the training recipes, or show what one of them sets: YAML to start a recipe of one's own from.

    Args:
        name: a recipe from the list, or a .yaml file.
        all: show the settings that the recipe leaves at their defaults, too.
        json: print JSON; of a recipe, always all settings.
    """
    if name is None:
        _list(json)
    else:
        _show(name, all, json)


def _list(json: bool) -> None:
    from ..training.recipes import recipe_names

    columns = ("recipe", "model", "data", "about", "epochs", "batch_size")
    rows = []
    for name in recipe_names("classification"):
        recipe = _recipe(name)
        rows.append((name, *(getattr(recipe, column) for column in columns[1:])))
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(f"{len(rows)} recipes", (*columns[:-1], "batch"), rows, left=4)


def _show(name: str, all_settings: bool, json: bool) -> None:
    from ..training.recipes import to_yaml

    recipe = _recipe(name)
    if json:
        print_json(asdict(recipe))
    else:
        print(to_yaml(recipe, changed_only=not all_settings), end="")


def _recipe(name: str) -> ClassificationRecipe:
    from ..classification.recipe import ClassificationRecipe
    from ..training.recipes import build, load_recipe

    return build(ClassificationRecipe, load_recipe("classification", name), f"recipe {name}")
