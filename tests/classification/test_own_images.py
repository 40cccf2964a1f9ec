"""Data of one's own: 'vil train --data FOLDER' alone, and everything that follows from what is found there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vision_longformer import load, save
from vision_longformer.classification import evaluate, train
from vision_longformer.classification.dataset import find_images, open_splits
from vision_longformer.classification.estimate import run_summary
from vision_longformer.classification.own_images import derive_settings
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.classification.task import ClassificationTask
from vision_longformer.cli.main import main
from vision_longformer.data.images import ImageError
from vision_longformer.hub import save_pretrained
from vision_longformer.models import VisionLongformer
from vision_longformer.models.zoo import model_config
from vision_longformer.training.recipe import load_recipe, resolve

COLOURS = {"blue": (30, 30, 200), "green": (30, 160, 30), "red": (200, 30, 30)}


def write_colours(folder: Path, count: int, size: tuple[int, int] = (100, 70)) -> Path:
    """``count`` images of each of three colours, of a different shade each."""
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for shade in range(count):
            Image.new("RGB", size, tuple(min(255, part + shade) for part in colour)).save(
                folder / name / f"{shade}.webp"
            )
    return folder


def derived(data: Path, **values: Any) -> dict[str, Any]:
    return derive_settings({**load_recipe(ClassificationRecipe, "own_images"), "data": str(data), **values})


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colours(tmp_path_factory.mktemp("data") / "colours", 20)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("cpu")
def test_what_follows_from_sixty_images(colours: Path) -> None:
    """17 of 20 of each class are trained on: 51. Sides of 70 allow 64; 40 epochs are fewer than 10,000 images."""
    values = derived(colours)
    assert (values["model"], values["init"], values["image_size"]) == ("vision_longformer_nano", "cifar10_nano", 64)
    assert (values["batch_size"], values["epochs"], values["warmup"]) == (16, 40, 4)
    assert (values["lr"], values["eval_every"], values["workers"]) == (5e-4, 2, 1)
    assert values["mean"] == load_mean()
    recipe = resolve(ClassificationRecipe, "own_images", ClassificationTask.derive, data=str(colours), lr=0.5, epochs=3)
    assert (recipe.lr, recipe.epochs, recipe.batch_size, recipe.clip_norm) == (0.5, 3, 16, 1.0)


def load_mean() -> list[float]:
    from vision_longformer.checkpoint import load_info

    return list(load_info("cifar10_nano")["preprocessing"]["mean"])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (2, (40, 40), {"batch_size": 2, "epochs": 40, "image_size": 64}),  # 3 images to train on
        (2, (300, 99), {"image_size": 96}),
        (2, (300, 128), {"image_size": 128}),
        (120, (8, 8), {"batch_size": 16, "epochs": 32}),  # 306: 19 in 16ths, and 32 times 306 is 9,792
        (300, (8, 8), {"batch_size": 32, "epochs": 13}),  # 765
    ],
)
def test_what_follows_from_other_images(
    count: int, size: tuple[int, int], expected: dict[str, int], tmp_path: Path
) -> None:
    values = derived(write_colours(tmp_path / "data", count, size))
    assert {name: values[name] for name in expected} == expected


@pytest.mark.usefixtures("cpu")
def test_what_is_given_decides_the_rest(colours: Path, tmp_path: Path) -> None:
    assert "init" not in derived(colours, init=None)
    assert derived(colours, init=None)["lr"] == 1e-3
    assert derived(colours, model="vision_longformer_micro").get("init") is None
    assert derived(colours, epochs=10)["warmup"] == 1
    assert derived(colours, model="vision_longformer_small")["image_size"] is None  # the model's own
    assert derived(colours, model="vision_longformer_tiny")["image_size"] == 96
    config = model_config("vision_longformer_tiny").override(img_size=(96, 64), num_classes=5)
    preprocessing = {"mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.8}
    path = save(VisionLongformer(config), tmp_path / "tiny.safetensors", info={"preprocessing": preprocessing})
    values = derived(colours, init=str(path))
    assert (values["model"], values["image_size"], values["crop_pct"]) == ("vision_longformer_tiny", [96, 64], 0.8)
    assert (values["mean"], values["std"]) == ([0.1] * 3, [0.2] * 3)
    stages = config.stages[:2]
    path = save(VisionLongformer(config.override(stages=stages)), tmp_path / "two.safetensors")
    recipe = resolve(ClassificationRecipe, "own_images", ClassificationTask.derive, data=str(colours), init=str(path))
    assert recipe.model_config(3).stages == stages
    left_open = {*values, *derived(colours), *derived(colours, init=str(path))}
    assert left_open.difference(load_recipe(ClassificationRecipe, "own_images")) == ClassificationRecipe.derived


def test_processes_share_a_batch(colours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes and two parts of a step, a pair in each: multiples of 12."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert derived(colours, accumulate=2)["batch_size"] == 12


def test_a_gpu_and_many_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocked; 51 images for training, of which 50 are few."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr("vision_longformer.classification.own_images.FEW_IMAGES", 50)
    values = derived(write_colours(tmp_path / "data", 20, (200, 200)))
    assert (values["model"], values.get("init")) == ("vision_longformer_tiny", None)
    assert (values["image_size"], values["workers"], values["lr"]) == (192, 8, 1e-3)


def test_what_cannot_be_derived() -> None:
    with pytest.raises(ValueError, match="own_images is for data of your own; say where it is with --data FOLDER"):
        derive_settings({"auto": True})
    with pytest.raises(ValueError, match="set num_classes to the number of classes"):
        derive_settings({"data": "wds/x"})


# Splits


def test_images_are_held_out_where_there_is_no_split(colours: Path, tmp_path: Path) -> None:
    recipe = ClassificationRecipe(data=str(colours), batch_size=2)
    splits = open_splits(recipe)
    assert splits.split is not None
    assert [list(splits.evaluation.labels).count(label) for label in range(3)] == [3, 3, 3]  # type: ignore[union-attr]
    assert [len(part) for part in splits[:2]] == [51, 9]  # type: ignore[arg-type]
    half = open_splits(ClassificationRecipe(data=str(colours), batch_size=2, eval_fraction=0.5)).evaluation
    assert len(half) == 30  # type: ignore[arg-type]
    write_colours(tmp_path / "divided" / "train", 4)
    write_colours(tmp_path / "divided" / "val", 2)
    divided = ClassificationRecipe(data=str(tmp_path / "divided"), batch_size=2)
    assert open_splits(divided).split is None
    assert [len(part) for part in open_splits(divided)[:2]] == [12, 6]  # type: ignore[arg-type]
    asked = ClassificationRecipe(data=str(tmp_path / "divided"), batch_size=2, eval_fraction=0.25)
    assert [len(part) for part in open_splits(asked)[:2]] == [9, 3]  # type: ignore[arg-type]


def test_a_single_class_is_refused(colours: Path, tmp_path: Path) -> None:
    """As in the folder above the one with classes."""
    (tmp_path / "photos").symlink_to(colours)
    with pytest.raises(
        ValueError, match="has a single class, 'photos': nothing to learn; give the folder that holds a"
    ):
        derive_settings({"data": str(tmp_path)})


def test_doubtful_images_are_said_at_the_start(tmp_path: Path) -> None:
    """Three loose images, two of one class and one of another, which cannot be held out."""
    for name in ("1.png", "2.png", "3.png", "4.png", "cat/1.png", "cat/2.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    recipe = ClassificationRecipe(data=str(tmp_path), batch_size=2, model="vision_longformer_micro", image_size=32)
    rows = run_summary(recipe, open_splits(recipe), "random weights")
    assert rows["warning"] == (
        "most images (4) lie outside of class folders, and are not used; not in the evaluation images: dog"
    )


# The command


@pytest.fixture(scope="module")
def run(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run directory of one epoch by the command line, and what was printed on stderr."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("rich.console.Console.print", lambda self, text="", **options: lines.append(str(text)))
        main(["train", "--data", str(colours), "--epochs", "2", "--workers", "0", "--output", str(folder)])
    return folder, "\n".join(lines)


def test_the_banner(run: tuple[Path, str], colours: Path) -> None:
    rows = dict(line.split("  ", 1) for line in run[1].splitlines() if "  " in line)
    rows = {name: text.strip() for name, text in rows.items()}
    assert rows["data"] == str(colours)
    assert rows["training"] == "51 images: blue 17, green 17, red 17"
    assert rows["evaluation"] == "9 images: blue 3, green 3, red 3, held out from the training images (split.json)"
    assert rows["model"] == "vision_longformer_nano, images of 64×64"
    assert rows["starts from"] == "cifar10_nano, with a new head"
    assert rows["schedule"] == "2 epochs, 6 steps of 16 images"
    assert rows["expected"].startswith("about ")
    assert rows["run directory"] == str(run[0])
    assert "ignored" not in rows
    assert "loss" in run[1].split("epoch 1 of 2")[1].splitlines()[0]


def test_the_split_is_remembered_and_evaluated(run: tuple[Path, str], colours: Path) -> None:
    """Images that come later are in neither part."""
    folder, _ = run
    split = json.loads((folder / "split.json").read_text())
    assert (len(split["train"]), len(split["evaluation"])) == (51, 9)
    result = evaluate(folder, workers=0)
    assert result.samples == 9
    assert result.seen.tolist() == [3, 3, 3]
    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = max(line["evaluation"]["top1"] for line in recorded if "evaluation" in line)
    assert result.top1 == pytest.approx(best)
    assert evaluate(folder, str(colours), "train", workers=0).samples == 51
    with pytest.raises(ValueError, match="has no split 'test'"):
        evaluate(folder, split="test", workers=0)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        evaluate("none.safetensors")
    extra = colours / "red" / "new.png"
    Image.new("RGB", (64, 64), "red").save(extra)
    try:
        assert evaluate(folder / "best.safetensors", workers=0).samples == 9
    finally:
        extra.unlink()


def test_a_resumed_run_keeps_its_split(run: tuple[Path, str]) -> None:
    """Another seed would divide the images otherwise."""
    folder, _ = run
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("seed: 0", "seed: 1"))
    recipe = resolve(ClassificationRecipe, str(folder / "recipe.yaml"))
    again = open_splits(recipe, folder)
    (folder / "recipe.yaml").write_text(text)
    assert list(again.evaluation.names) == json.loads((folder / "split.json").read_text())["evaluation"]  # type: ignore[union-attr]


def test_weights_of_a_run_bring_its_split(run: tuple[Path, str], colours: Path, tmp_path: Path) -> None:
    """On the same data, whatever the seed; what they have learned from is not evaluated on."""
    held = json.loads((run[0] / "split.json").read_text())["evaluation"]
    same = open_splits(ClassificationRecipe(data=str(colours), batch_size=2, init=str(run[0]), seed=5))
    assert same.split is not None
    assert list(same.split.evaluation) == held
    assert same.how == "the same images that the run it starts from held out"
    copy = write_colours(tmp_path / "copy", 25)  # with five more of each
    moved = open_splits(ClassificationRecipe(data=str(copy), batch_size=2, init=str(run[0]), seed=5))
    assert moved.split is not None
    assert list(moved.split.evaluation) == held
    assert len(moved.split.train) == 75 - 9
    few = write_colours(tmp_path / "few", 5)
    other = open_splits(ClassificationRecipe(data=str(few), batch_size=2, init=str(run[0]), seed=5))
    assert other.how.startswith("newly held out: most images that the starting weights were trained on are not")


def test_a_folder_of_a_run_is_evaluated_on_what_was_held_out(
    run: tuple[Path, str], colours: Path, tmp_path: Path
) -> None:
    """Of the run's data and of a copy of it; of other data it says that there is no split."""
    folder = save_pretrained(run[0], tmp_path / "my_classifier")
    held = tuple(json.loads((run[0] / "split.json").read_text())["evaluation"])
    copy = write_colours(tmp_path / "copy", 20)
    for data in (colours, copy):
        images = find_images(folder, str(data), None)
        assert (str(images), images.names) == (f"{data}, the images that the run held out", held)
    assert evaluate(folder, str(copy), workers=0).samples == 9
    trained = find_images(folder, str(copy), "train")
    assert str(trained) == f"{copy}, the images that the run trained on"
    assert len(trained.names or ()) == 51
    few = write_colours(tmp_path / "few", 5)
    with pytest.raises(ValueError, match="has no split 'validation'"):
        evaluate(folder, str(few), workers=0)


def test_a_folder_of_a_run_brings_its_split(run: tuple[Path, str], colours: Path, tmp_path: Path) -> None:
    folder = save_pretrained(run[0], tmp_path / "my_classifier")
    same = open_splits(ClassificationRecipe(data=str(colours), batch_size=2, init=str(folder), seed=5))
    assert same.split is not None
    assert list(same.split.evaluation) == json.loads((run[0] / "split.json").read_text())["evaluation"]
    assert same.how == "the same images that the run it starts from held out"


def test_what_a_checkpoint_elsewhere_is_evaluated_on(run: tuple[Path, str], tmp_path: Path) -> None:
    alone = save(load(run[0]), tmp_path / "alone.safetensors")
    with pytest.raises(
        ValueError, match=r"is not in a run directory.* give --data DATA\. .* RUN/best\.onnx by default"
    ):
        evaluate(alone)


@pytest.fixture(scope="module")
def skipping_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with --skip-bad-images on twelve images, of which one that is held out cannot be read; and its name."""
    data = write_colours(tmp_path_factory.mktemp("data") / "colours", 4)
    recipe = ClassificationRecipe(data=str(data), batch_size=2)
    bad = open_splits(recipe).evaluation.names[0]  # type: ignore[union-attr]
    (data / bad).write_bytes(b"no image")
    settings = {"data": str(data), "skip_bad_images": True, "epochs": 1, "workers": 0}
    return train(output=data.parent / "run", **settings).run, bad


def test_a_run_that_skips_bad_images_is_evaluated_as_it_was_trained(
    skipping_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One image of each class is held out, one of the three is bad; on other data a bad image stops the command."""
    run, bad = skipping_run
    main(["evaluate", str(run), "--workers", "0", "--json"])
    reported = json.loads(capsys.readouterr().out)
    assert (reported["samples"], reported["skipped"]) == (2, 1)
    main(["evaluate", str(run), "--workers", "0"])
    assert f"\n1 image could not be read and was skipped: {bad}\n" in capsys.readouterr().out
    assert find_images(run / "best.onnx", None, None).skip_bad_images
    with pytest.raises(ImageError, match=f"{bad} cannot be read"):
        evaluate(run, workers=0, skip_bad_images=False)
    copy = shutil.copytree(run.parent / "colours", tmp_path / "copy")
    with pytest.raises(ImageError, match=f"copy/{bad} cannot be read"):
        evaluate(run, str(copy), workers=0)


def test_a_dry_run_has_the_derived_settings(colours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--data", str(colours), "--dry-run"])
    output = capsys.readouterr().out
    assert "model: vision_longformer_nano" in output
    assert "51 images of 3 classes" in output
    assert "reading and augmenting" in output


@pytest.mark.slow
def test_colours_are_learned_in_a_few_epochs(colours: Path, tmp_path: Path) -> None:
    """A third would be chance."""
    assert train(data=str(colours), epochs=8, workers=0, output=tmp_path / "run").best["top1"] == 100
