"""``vil recipes`` and ``vil detect recipes``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .output import print_json, print_table
from .parser import Settings

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
        _show(resolve(recipe_type(task), name), all_settings, json)


def _list(task: str, json: bool) -> None:
    from ..training.recipe import recipe_names, resolve

    columns = ("recipe", "model", "data", "about", "steps" if task == "detection" else "epochs", "batch_size")
    rows = []
    for name in recipe_names(recipe_type(task)):
        recipe = resolve(recipe_type(task), name)
        follows = ("model", "data", "steps", "epochs", "batch_size") if recipe.auto else ()
        rows.append((name, *(None if column in follows else getattr(recipe, column) for column in columns[1:])))
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        cells = [["" if value is None else value for value in row] for row in rows]
        print_table(f"{len(rows)} recipes", (*columns[:-1], "batch"), cells, left=4)


def _show(recipe: BackboneSettings, all_settings: bool, json: bool) -> None:
    from ..training.recipe import to_yaml

    if json:
        print_json(asdict(recipe))
    else:
        print(to_yaml(recipe, changed_only=not all_settings), end="")


def recipe_type(task: str) -> type[BackboneSettings]:
    """The dataclass of a task's recipes, which is free of torch."""
    if task == "detection":
        from ..detection.recipe import DetectionRecipe

        return DetectionRecipe
    from ..classification.recipe import ClassificationRecipe

    return ClassificationRecipe


SETTING_GROUPS = {
    "run settings": (
        *("about", "auto", "seed", "epochs", "steps", "batch_size", "accumulate", "precision", "compile"),
        *("grad_checkpointing", "strategy", "spatial", "workers", "checkpoint_minutes", "timeout_minutes", "log_every"),
        *("eval_every", "eval_batch_size", "patience"),
    ),
    "optimisation settings": (
        *("optimizer", "lr", "lr_batch", "beta2", "momentum", "weight_decay", "decay", "clip_norm"),
        *("schedule", "warmup", "warmup_steps", "warmup_factor", "min_lr", "milestones", "ema", "phase_start"),
    ),
    "model settings": (
        *("model", "model_options", "image_size", "drop_path", "neighbours", "shift_until"),
        *("init", "table_resize", "class_map", "detector", "detector_options", "freeze"),
    ),
    "data settings": (
        *("data", "train_split", "eval_split", "eval_fraction", "num_classes", "num_images", "balance"),
        *("skip_bad", "skip_bad_images", "in_memory"),
    ),
    "augmentation settings": (
        *(
            "crop",
            "crop_pad",
            "crop_scale",
            "crop_ratio",
            "hflip",
            "scale_jitter",
            "color_jitter",
            "auto_augment",
            "erase",
        ),
        *("mixup", "cutmix", "mix_prob", "smoothing", "repeats"),
    ),
    "preprocessing settings": ("interpolation", "crop_pct", "mean", "std"),
}
"""Titles under which 'vil train --help' and 'vil detect train --help' list the settings of recipes."""


def recipe_settings(task: str) -> Settings:
    """The settings of a task's recipes, as options of a command."""
    from ..detection.config import DetectorConfig
    from ..models.config import ModelConfig

    about = "A default applies unless the recipe or the command line says otherwise."
    nested: dict[str, type] = {"model_options": ModelConfig}
    if task == "detection":
        nested["detector_options"] = DetectorConfig
    return Settings(recipe_type(task), about, SETTING_GROUPS, nested, recipe_type(task).derived)
