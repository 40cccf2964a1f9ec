"""Recipe files: those we ship, and what a user's own may get wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.cli.recipes import recipes
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.training.recipe import (
    BackboneSettings,
    TrainSettings,
    build,
    load_recipe,
    parse_values,
    recipe_names,
    resolve,
    to_yaml,
)

NAMES = recipe_names(ClassificationRecipe)


def _recipe(name: str) -> ClassificationRecipe:
    return build(ClassificationRecipe, load_recipe(ClassificationRecipe, name), name)


def _written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# Shipped recipes

MECHANISMS = [
    *("ape", "full", "linformer", "sra64", "sra32", "global", "performer", "random_shift"),
    *("partial_linformer", "partial_sra32", "partial_global", "partial_performer"),
]
COMPARED_IN_DETECTION = [
    *("vil", "sra64", "sra32", "global", "performer"),
    *("partial_vil", "partial_sra32", "partial_global", "partial_performer"),
]


def test_names_of_all_recipes() -> None:
    classification = [
        *("cifar10", "cifar10_long", "cifar10_nano", "cifar100", "fashion_mnist", "own_images", "quickstart"),
        *(f"imagenet1k_{size}" for size in ("tiny", "small", "medium", "base")),
        *(f"imagenet1k_{size}_{name}" for size in ("tiny", "small") for name in MECHANISMS),
        *("imagenet1k_medium_ape", "imagenet1k_base_ape", "imagenet1k_small_release"),
        *("imagenet1k_384_medium", "imagenet1k_384_base", "imagenet21k_medium", "imagenet21k_base"),
    ]
    detection = [
        *("own_objects", "quickstart"),
        *(
            f"{detector}_{size}_{length}"
            for detector in ("mask_rcnn", "retinanet")
            for size in ("tiny", "small", "medium", "base")
            for length in ("1x", "3x")
        ),
        *(f"mask_rcnn_small_1x_{name}" for name in COMPARED_IN_DETECTION),
    ]
    assert (len(classification), len(detection)) == (42, 27)
    assert recipe_names(ClassificationRecipe) == sorted(classification)
    assert recipe_names(DetectionRecipe) == sorted(detection)


TRAINING = {
    "seed": 0,
    "epochs": 300,
    "accumulate": 1,
    "precision": "fp32",
    "compile": False,
    "grad_checkpointing": False,
    "strategy": "ddp",
    "spatial": 1,
    "optimizer": "adamw",
    "beta2": 0.999,
    "momentum": 0.9,
    "warmup": 5.0,
    "min_lr": 1e-6,
    "ema": None,
    "workers": 2,
    "timeout_minutes": 30.0,
    "checkpoint_minutes": 10.0,
    "log_every": 50,
    "eval_every": 1,
    "patience": None,
    "phase_start": 0,
    "eval_fraction": None,
    "auto": False,
    "model_options": {},
    "shift_until": 0.75,
    "init": None,
    "hflip": 0.5,
}
"""What the recipes below have in common."""

IMAGENET = {
    **TRAINING,
    "balance": "none",
    "steps": None,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "decay": "matrices",
    "clip_norm": None,
    "schedule": "cosine",
    "warmup_steps": None,
    "warmup_factor": 0.002,
    "milestones": (),
    "drop_path": 0.1,
    "image_size": None,
    "table_resize": "offset",
    "class_map": None,
    "data": "imagenet",
    "train_split": "train",
    "eval_split": "validation",
    "num_classes": None,
    "num_images": None,
    "skip_bad_images": False,
    "in_memory": False,
    "crop": "random_resized",
    "crop_pad": 0.125,
    "crop_scale": (0.08, 1.0),
    "crop_ratio": (0.75, 4 / 3),
    "color_jitter": 0.4,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_prob": 1.0,
    "smoothing": 0.1,
    "repeats": 1,
    "interpolation": "bicubic",
    "crop_pct": None,
    "mean": None,
    "std": None,
    "eval_batch_size": None,
}
COCO = {
    **TRAINING,
    "batch_size": 16,
    "lr_batch": None,
    "weight_decay": 0.05,
    "decay": "all",
    "clip_norm": 1.0,
    "schedule": "multistep",
    "warmup_steps": 1000,
    "warmup_factor": 0.01,
    "milestones": (2 / 3, 8 / 9),
    "neighbours": "all",
    "table_resize": "bilinear",
    "data": "coco",
    "train_split": "train2017",
    "eval_split": "val2017",
    "skip_bad": True,
    "scale_jitter": (1.0, 1.0),
    "color_jitter": 0.0,
    "freeze": 0,
}


@pytest.mark.parametrize(
    ("recipe_type", "name", "values"),
    [
        (
            ClassificationRecipe,
            "imagenet1k_small_full",
            {
                **IMAGENET,
                "about": "Full attention; 81.9% in the paper",
                "model": "msvit_small_1_2_8_1_full",
                "batch_size": 256,
                "lr_batch": 1024,
                "neighbours": "all",
            },
        ),
        (
            ClassificationRecipe,
            "imagenet1k_tiny_partial_sra32",
            {
                **IMAGENET,
                "about": "SRA 8, 4, then full; 75.2% in the paper",
                "model": "msvit_tiny_1_1_9_1_partial_sra32",
                "batch_size": 1024,
                "lr_batch": None,
                "neighbours": "all",
            },
        ),
        (
            DetectionRecipe,
            "retinanet_base_3x",
            {
                **COCO,
                "about": "RetinaNet on ViL-Base, COCO, 270,000 steps at several scales; give the classifier as --init",
                "model": "vision_longformer_base",
                "detector": "retinanet",
                "detector_options": {"min_size": [640, 672, 704, 736, 768, 800]},
                "steps": 270_000,
                "lr": 8e-5,
                "drop_path": 0.2,
            },
        ),
        (
            DetectionRecipe,
            "mask_rcnn_small_1x_performer",
            {
                **COCO,
                "about": "Mechanisms compared: Performer; 36.1 box AP in the paper",
                "model": "msvit_small_1_2_8_1_performer",
                "detector": "mask_rcnn",
                "detector_options": {},
                "steps": 90_000,
                "lr": 1e-4,
                "drop_path": 0.1,
            },
        ),
    ],
)
def test_every_value_of_a_generated_recipe(
    recipe_type: type[BackboneSettings], name: str, values: dict[str, Any]
) -> None:
    assert name in recipe_type.generated
    assert asdict(resolve(recipe_type, name)) == values


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes(name: str, tmp_path: Path) -> None:
    """Each builds, says what it is for, and comes back from what it is written as, whole or as a delta."""
    recipe = _recipe(name)
    assert 10 < len(recipe.about) < 100
    for changed_only in (False, True):
        path = _written(tmp_path, to_yaml(recipe, changed_only=changed_only))
        assert _recipe(path) == recipe


@pytest.mark.parametrize(
    ("name", "epochs", "lr", "decay", "batch"),
    [
        ("imagenet1k_tiny", 300, 1e-3, 0.1, 1024),
        ("imagenet1k_small", 300, 1e-3, 0.1, 1024),
        ("imagenet1k_medium", 300, 8e-4, 0.1, 1024),
        ("imagenet1k_base", 150, 8e-4, 0.1, 1024),
        ("imagenet21k_medium", 90, 5e-4, 0.1, 1024),
        ("imagenet21k_base", 90, 5e-4, 0.1, 1024),
        ("imagenet1k_384_medium", 10, 2e-3, 0.0, 512),
        ("imagenet1k_384_base", 10, 2e-3, 0.0, 512),
    ],
)
def test_training_table_of_the_paper(name: str, epochs: int, lr: float, decay: float, batch: int) -> None:
    """The paper's 2e-2 of the fine-tuning rows is the rate of an optimiser that needs ten times SGD's."""
    recipe = _recipe(name)
    assert (recipe.epochs, recipe.scaled_lr, recipe.weight_decay, recipe.batch_size) == (epochs, lr, decay, batch)
    assert (recipe.schedule, recipe.drop_path, recipe.clip_norm, recipe.ema) == ("cosine", 0.1, None, None)
    size = name.split("_")[-1]
    assert recipe.model == f"vision_longformer_{size}" + ("_384" if "384" in name else "")
    assert recipe.repeats == (3 if name in ("imagenet1k_medium", "imagenet1k_base") else 1)


def test_deit_augmentation() -> None:
    recipe = _recipe("imagenet1k_small")
    assert (recipe.auto_augment, recipe.color_jitter, recipe.erase) == ("rand-m9-mstd0.5-inc1", 0.4, 0.25)
    assert (recipe.mixup, recipe.cutmix, recipe.mix_prob, recipe.smoothing) == (0.8, 1.0, 1.0, 0.1)


def test_fine_tuning() -> None:
    """Random crops of images resized to 416, flips, and nothing else; SGD; windows 13, 17, 25, 25."""
    recipe = _recipe("imagenet1k_384_base")
    assert (recipe.optimizer, recipe.momentum, recipe.warmup, recipe.smoothing) == ("sgd", 0.9, 0.25, 0.1)
    assert (recipe.crop, int(384 / (recipe.crop_pct or 1)), recipe.hflip) == ("random", 416, 0.5)
    assert (recipe.auto_augment, recipe.color_jitter, recipe.erase, recipe.mixup, recipe.cutmix) == (None, 0, 0, 0, 0)
    config = recipe.model_config(1000)
    assert [2 * stage.attention.window + 1 for stage in config.stages] == [13, 17, 25, 25]  # type: ignore[attr-defined]


SAME_IN_ALL_STAGES = ("full", "linformer", "sra64", "sra32", "global", "performer")
MIXES = ("partial_linformer", "partial_sra32", "partial_global", "partial_performer")


@pytest.mark.parametrize(("size", "layout"), [("tiny", "1_1_9_1"), ("small", "1_2_8_1")])
def test_variants_differ_from_their_base_in_one_thing(size: str, layout: str) -> None:
    base = _recipe(f"imagenet1k_{size}")
    expected: dict[str, dict[str, Any]] = {
        name: {"model": f"msvit_{size}_{layout}_{name}"} for name in SAME_IN_ALL_STAGES + MIXES
    }
    expected["ape"] = {"model": f"vision_longformer_{size}_ape"}
    expected["random_shift"] = {"neighbours": "random", "shift_until": 0.75}
    if size == "small":
        expected["full"] |= {"batch_size": 256, "lr_batch": 1024}
        expected["release"] = {"optimizer": "release_adamw", "schedule": "release_cosine", "decay": "release"}
    for name, changes in expected.items():
        recipe = _recipe(f"imagenet1k_{size}_{name}")
        assert recipe == replace(base, about=recipe.about, **changes)
    assert {name for name in NAMES if name.startswith(f"imagenet1k_{size}_")} == {
        f"imagenet1k_{size}_{name}" for name in expected
    }


# Files of one's own


def test_own_file_on_a_shipped_one(tmp_path: Path) -> None:
    path = _written(tmp_path, "base: imagenet1k_medium\nlr: 4e-4\nmilestones: [0.5, 1e-1]\nema: 0.9999\n")
    values = load_recipe(ClassificationRecipe, path)
    assert (values["lr"], values["milestones"], values["model"]) == (4e-4, [0.5, 0.1], "vision_longformer_medium")
    assert "base" not in values


def test_chain_of_files(tmp_path: Path) -> None:
    """Later files win; paths are seen from the file that names them."""
    (tmp_path / "below").mkdir()
    _written(tmp_path, "base: imagenet1k_base\nepochs: 5\nwarmup: 1\nseed: 3\n", "first.yaml")
    _written(tmp_path / "below", "base: ../first.yaml\nepochs: 6\nwarmup: 2\n", "second.yaml")
    last = _written(tmp_path, "base: below/second.yaml\nepochs: 7\n")
    recipe = _recipe(last)
    assert (recipe.epochs, recipe.warmup, recipe.seed, recipe.lr) == (7, 2.0, 3, 8e-4)


def test_what_a_base_is_about_does_not_hold_for_the_file(tmp_path: Path) -> None:
    """Only what the file itself says, or a shipped recipe of itself."""
    assert _recipe("imagenet1k_tiny").about == "ViL-Tiny; 76.7% in the paper"
    first = _written(tmp_path, "base: imagenet1k_tiny\nepochs: 5\n", "first.yaml")
    assert _recipe(first).about == ""
    _written(tmp_path, "base: first.yaml\nabout: five epochs\n", "second.yaml")
    assert _recipe(str(tmp_path / "second.yaml")).about == "five epochs"
    assert _recipe(_written(tmp_path, "base: second.yaml\nlr: 1e-4\n")).about == ""


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert _recipe(_written(tmp_path, "# nothing yet\n")) == ClassificationRecipe()


@pytest.mark.parametrize("base", ["mine.yaml", "../{folder}/mine.yaml"])
def test_a_chain_that_never_ends(base: str, tmp_path: Path) -> None:
    path = _written(tmp_path, "base: " + base.format(folder=tmp_path.name))
    with pytest.raises(ValueError, match="is its own base"):
        load_recipe(ClassificationRecipe, path)


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown recipe 'imagenet1k_tinny'; did you mean 'imagenet1k_tiny'"):
        load_recipe(ClassificationRecipe, "imagenet1k_tinny")
    with pytest.raises(FileNotFoundError, match=r"there is no recipe file no.yaml"):
        load_recipe(ClassificationRecipe, "no.yaml")
    with pytest.raises(FileNotFoundError, match=r"there is no recipe file .*gone.yaml"):
        load_recipe(ClassificationRecipe, _written(tmp_path, "base: gone.yaml"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: 1e-3\nmodel: [a, b\nepochs: 3\n", "mine.yaml, line 3: "),
        ("lr: 1e-3\n\tepochs: 3\n", "mine.yaml, line 2: "),
        ("about: \x07", "mine.yaml is not YAML: "),
        ("- lr\n- epochs\n", "mine.yaml is not a recipe; write lines of 'key: value'"),
        ("3: 4\n", "mine.yaml is not a recipe"),
        ("base: 3\n", "mine.yaml: base is 3; it must be the name of a recipe"),
        ("base: !!python/name:os.system\n", "mine.yaml, line 1: could not determine a constructor"),
    ],
)
def test_files_that_are_no_recipes(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_recipe(ClassificationRecipe, _written(tmp_path, text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"lr: \xff\xfe")
    with pytest.raises(ValueError, match=r"mine.yaml is not text in UTF-8: invalid start byte at byte 4"):
        load_recipe(ClassificationRecipe, str(path))


# Values


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("epoch", 3, "unknown key 'epoch'; did you mean 'epochs'"),
        ("lr", "fast", "lr is 'fast'; it must be a number"),
        ("lr", True, "lr is True; it must be a number"),
        ("lr", float("nan"), "lr is nan; it must be a number"),
        ("lr", -1, "lr is -1.0; it must be positive"),
        ("epochs", 2.5, "epochs is 2.5; it must be an integer"),
        ("epochs", True, "epochs is True; it must be an integer"),
        ("epochs", None, "epochs is None; it must be an integer"),
        ("steps", "ten", "steps is 'ten'; it must be an integer, or null"),
        ("compile", 1, "compile is 1; it must be true or false"),
        ("model", 7, "model is 7; it must be text"),
        ("mean", 0.5, "mean is 0.5; it must be a list of numbers, or null"),
        ("mean", ["a"], "mean is ['a']; it must be a list of numbers, or null"),
        ("crop_scale", [0.08], "crop_scale is [0.08]; it must be a list of 2 numbers"),
        ("model_options", [], "model_options is []; it must be keys with values"),
        ("model_options", {"in_chan": 1}, "unknown model option 'in_chan'; did you mean 'in_chans'"),
        ("model_options", {"mlp_ratio": "4"}, "not supported between instances"),
        ("optimizer", "adam", "unknown optimizer 'adam'; did you mean 'adamw'"),
        ("model", "vision_longformer_tini", "did you mean 'vision_longformer_tiny'"),
    ],
)
def test_values_that_do_not_fit(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build(ClassificationRecipe, {key: value}, "my.yaml")
    assert str(error.value).startswith("my.yaml: ")
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs is 0; it must be an integer of at least 1"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean 'adamw'"),
        ({"ema": 1.0}, "ema is 1.0; it must be at least 0 and below 1"),
        ({"milestones": (0.9, 0.5)}, "give rising fractions"),
        ({"lr": 0.0}, "lr is 0.0; it must be positive"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"steps": 0}, "steps is 0; it must be an integer of at least 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must not be negative"),
        ({"timeout_minutes": 0.0}, "timeout_minutes is 0.0; it must be positive"),
        ({"checkpoint_minutes": -1.0}, "checkpoint_minutes is -1.0; it must not be negative"),
        ({"milestones": (0.5, 1.0)}, "give rising fractions"),
        ({"drop_path": 1.5}, "drop_path is 1.5; it must be between 0 and 1"),
        ({"shift_until": -0.5}, "shift_until is -0.5; it must be between 0 and 1"),
        ({"neighbours": "some"}, "unknown neighbours 'some'"),
        ({"strategy": "zero"}, "unknown strategy 'zero'"),
        ({"grad_checkpointing": "strip"}, "grad_checkpointing is 'strip'; it must be true or false or strips"),
        ({"spatial": 0}, "spatial is 0; it must be an integer of at least 1"),
        (
            {"spatial": 2, "compile": True},
            "spatial shares images between processes, which cannot be compiled; leave out compile",
        ),
        ({"grad_checkpointing": None}, "grad_checkpointing is None; it must be true or false or strips"),
        (
            {"grad_checkpointing": "strips", "strategy": "fsdp"},
            "grad_checkpointing strips needs whole parameters; use strategy ddp with it, not fsdp",
        ),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackboneSettings(**change)


@pytest.mark.parametrize(
    ("settings", "steps"), [({}, 500), ({"warmup": 0.25}, 25), ({"warmup": 0.0}, 0), ({"warmup_steps": 7}, 7)]
)
def test_steps_of_warm_up(settings: dict[str, Any], steps: int) -> None:
    assert TrainSettings(**settings).count_warmup(100) == steps


def test_the_rate_is_scaled_to_the_batch() -> None:
    assert TrainSettings(lr=0.3, batch_size=256).scaled_lr == 0.3
    assert TrainSettings(lr=0.3, batch_size=256, lr_batch=1024).scaled_lr == pytest.approx(0.075)


def test_settings_are_resolved_with_changes() -> None:
    recipe = resolve(ClassificationRecipe, "imagenet1k_tiny", epochs=7, crop_scale=[0.5, 1])
    assert (recipe.epochs, recipe.crop_scale, recipe.model) == (7, (0.5, 1.0), "vision_longformer_tiny")
    assert resolve(ClassificationRecipe, recipe, epochs=8) == replace(recipe, epochs=8)
    with pytest.raises(ValueError, match="recipe imagenet1k_tiny: unknown key 'epoch'; did you mean 'epochs'"):
        resolve(ClassificationRecipe, "imagenet1k_tiny", epoch=7)


def test_lists_become_tuples_and_whole_numbers_floats() -> None:
    recipe = build(ClassificationRecipe, {"mean": [1], "crop_scale": [0.5, 1], "lr": 1, "steps": None}, "here")
    assert (recipe.mean, recipe.crop_scale, recipe.lr, recipe.steps) == ((1.0,), (0.5, 1.0), 1.0, None)
    assert [type(value) for value in (*(recipe.mean or ()), *recipe.crop_scale, recipe.lr)] == [float] * 4


def test_values_of_a_command_line() -> None:
    """Read as in a file; what YAML cannot read is text."""
    texts = {
        "lr": "1e-3",
        "steps": "null",
        "mean": "[0.5]",
        "compile": "true",
        "data": "my/images",
        "about": "a: b: [c",
        "model_options": "{in_chans: 1}",
    }
    values = [0.001, None, [0.5], True, "my/images", "a: b: [c", {"in_chans": 1}]
    assert parse_values(texts) == dict(zip(texts, values, strict=True))


def test_round_trip_of_awkward_values(tmp_path: Path) -> None:
    """Text that looks like numbers, small numbers, unicode, nested options, empty lists."""
    recipe = ClassificationRecipe(
        about="1e-3", init="no", data="α: β # γ", lr=1e-7, min_lr=1.5e-300, mean=(0.1,), model_options={"in_chans": 1}
    )
    text = to_yaml(recipe)
    assert [line.split(":")[0] for line in text.splitlines()][:2] == ["about", "seed"]
    assert len(text.splitlines()) == len(fields(recipe)) + 1
    assert "crop_scale: [0.08, 1.0]\n" in text
    assert _recipe(_written(tmp_path, text)) == recipe


# Command


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    recipes()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert set(NAMES) < set(lines)
    assert lines["imagenet1k_base"].split()[1:3] == ["vision_longformer_base", "imagenet"]
    assert lines["imagenet1k_base"].split()[-2:] == ["150", "1024"]


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    recipes(json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in rows] == NAMES
    assert rows[NAMES.index("imagenet21k_base")] | {"about": ""} == {
        "recipe": "imagenet21k_base",
        "model": "vision_longformer_base",
        "data": "wds/imagenet21k",
        "about": "",
        "epochs": 90,
        "batch_size": 1024,
    }


def test_one_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    recipes("imagenet1k_small_random_shift")
    about, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith("about: ")
    assert lines == ["model: vision_longformer_small", "neighbours: random"]
    recipes("imagenet1k_small_random_shift", all=True)
    assert "shift_until: 0.75\n" in capsys.readouterr().out
    recipes("imagenet1k_small_random_shift", json=True)
    assert json.loads(capsys.readouterr().out)["crop_scale"] == [0.08, 1.0]


# Lengths in epochs and in steps, sizes, and settings that are derived


def test_a_length_in_epochs_replaces_one_in_steps(tmp_path: Path) -> None:
    recipe = resolve(DetectionRecipe, "retinanet_tiny_1x", epochs=3, warmup=0.5)
    assert (recipe.epochs, recipe.steps, recipe.warmup, recipe.warmup_steps) == (3, None, 0.5, None)
    both = resolve(DetectionRecipe, "retinanet_tiny_1x", epochs=3, steps=7)
    assert (both.epochs, both.steps) == (3, 7)
    (tmp_path / "mine.yaml").write_text("base: retinanet_tiny_1x\nepochs: 4\n")
    assert resolve(DetectionRecipe, str(tmp_path / "mine.yaml")).steps is None
    assert resolve(DetectionRecipe, both, epochs=5).steps is None


def test_image_sizes() -> None:
    for given, kept, size in ((96, 96, (96, 96)), ("96x128", (96, 128), (96, 128)), ([64, 32], (64, 32), (64, 32))):
        recipe = resolve(ClassificationRecipe, "imagenet1k_tiny", image_size=given)
        assert recipe.image_size == kept
        assert recipe.model_config(10).img_size == size
    with pytest.raises(ValueError, match="image_size is '96x'; it must be an integer or a list of 2 numbers, or null"):
        resolve(ClassificationRecipe, "imagenet1k_tiny", image_size="96x")


def test_only_what_is_not_given_is_derived() -> None:
    seen: list[dict[str, Any]] = []

    def derive(values: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(dict(values))
        return {"epochs": 7, "lr": 0.5, "batch_size": 4}

    recipe = resolve(ClassificationRecipe, "own_images", derive, data="x", lr=0.25)
    assert (recipe.epochs, recipe.lr, recipe.batch_size) == (7, 0.25, 4)
    assert seen[0]["data"] == "x"
    assert resolve(ClassificationRecipe, "own_images", derive, steps=9).steps == 9
    options = resolve(
        DetectionRecipe, "own_objects", lambda values: {"detector_options": {"min_size": [9], "max_size": 9}},
        detector_options={"max_size": 12},
    ).detector_options  # fmt: skip
    assert options == {"min_size": [9], "max_size": 12}
    resolve(ClassificationRecipe, "cifar10", derive)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_norm": 0}, "clip_norm is 0.0; it must be positive, or null for no limit"),
        ({"schedule": "multistep"}, "schedule multistep needs milestones"),
        ({"mixup": -1}, "mixup is -1.0; it must not be negative"),
        ({"eval_fraction": 1}, "eval_fraction is 1.0; it must be above 0 and below 1"),
        ({"patience": 0}, "patience is 0; it must be an integer of at least 1"),
        ({"balance": "loos"}, "unknown balance 'loos'; did you mean 'loss'"),
    ],
)
def test_settings_that_would_do_nothing_or_harm(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(ClassificationRecipe, "cifar10", **change)


def test_the_recipe_for_data_of_ones_own() -> None:
    assert ClassificationRecipe.default_name({"data": "x"}) == "own_images"
    assert ClassificationRecipe.default_name({"epochs": 1}) == "quickstart"
