"""Training classifiers: from a recipe to a checkpoint, resumed, over several processes, from another checkpoint."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import StopAt

from vision_longformer import VisionLongformer, load, save
from vision_longformer.checkpoint import load_info
from vision_longformer.classification import evaluate, resume
from vision_longformer.classification import task as train
from vision_longformer.classification.model import initial_model
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.cli.main import main
from vision_longformer.errors import CheckpointError
from vision_longformer.training.checkpointer import latest_checkpoint, load_state
from vision_longformer.training.recipe import recipe_names, resolve
from vision_longformer.training.run_directory import RunDirectory

CLASSES = ("dark", "middle", "bright")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images to train on and 10 to evaluate, of three classes by brightness."""
    path = tmp_path_factory.mktemp("images") / "brightness.npz"
    generator, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 48), ("validation", 10)):
        labels = np.arange(count) % 3
        noise = generator.integers(0, 60, (count, 16, 16, 3))
        arrays[f"{split}_x"], arrays[f"{split}_y"] = (noise + 90 * labels[:, None, None, None]).astype(np.uint8), labels
    np.savez(path, classes=np.array(CLASSES), **arrays)
    return path


def settings(data: Path, **changes: Any) -> dict[str, Any]:
    """A run of 12 steps of all that is random: workers, augmentation, mixing, shift, dropped paths, an average."""
    return {
        "data": str(data),
        "image_size": 16,
        "model_options": {},
        "mean": None,
        "std": None,
        "epochs": 2,
        "batch_size": 8,
        "workers": 2,
        "in_memory": False,
        "crop": "random_resized",
        "color_jitter": 0.4,
        "mixup": 0.8,
        "cutmix": 1.0,
        "drop_path": 0.2,
        "ema": 0.9,
        "neighbours": "random",
        "log_every": 2,
        **changes,
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    state = load_state(path)
    return {**state["model"], **{f"average {name}": value for name, value in state["average"].items()}}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("quickstart", output=tmp_path_factory.mktemp("runs") / "whole", **settings(images)).run


def test_a_run_leaves_what_people_need(trained: Path, images: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names >= {"best.safetensors", "last.safetensors", "confusion.png", "predictions.png", "recipe.yaml"}
    assert names >= {"metrics.jsonl", "environment.json", "checkpoints", "tensorboard"}
    assert tuple(load_info(trained / "best.safetensors")["preprocessing"]["classes"]) == CLASSES
    last = [line for line in RunDirectory(trained).records() if "evaluation" in line][-1]["evaluation"]
    result = evaluate(trained / "last.safetensors", str(images))
    assert result.samples == 10
    assert result.top1 == last["top1"]
    assert result.loss == pytest.approx(last["loss"], rel=1e-6)


@pytest.mark.parametrize(("step", "minutes"), [(3, 0), (9, 10)])
def test_a_killed_run_ends_with_the_same_weights(
    trained: Path, images: Path, tmp_path: Path, step: int, minutes: float
) -> None:
    options = settings(images, checkpoint_minutes=minutes)
    with pytest.raises(KeyboardInterrupt):
        train("quickstart", output=tmp_path / "run", callback=StopAt(step), **options)
    resumed = resume(tmp_path / "run")
    assert_equal(weights(trained), weights(resumed.run))
    assert resumed.results == [r for r in RunDirectory(trained).records() if "evaluation" in r][-1]["evaluation"]


def test_a_run_from_the_command_line(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--epochs", "1", "--steps=2", "--workers", "0", "--output", str(tmp_path / "run")]
    values = settings(images, ema=None, neighbours="all")
    for key in ("data", "image_size", "model_options", "mean", "std", "batch_size", "in_memory"):
        arguments += [f"--{key}", json.dumps(values[key]) if key != "data" else values[key]]
    main(["train", "quickstart", *arguments])
    output = capsys.readouterr()
    assert "top-1" in output.out
    assert f"vil predict {tmp_path / 'run' / 'best.safetensors'}" in output.out
    main(["train", "--resume", str(tmp_path / "run")])
    assert "top-1" in capsys.readouterr().out


def test_a_dry_run_says_what_it_would_take(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "quickstart", "--data", str(images), "--batch_size", "8", "--epochs", "5", "--dry-run"])
    output = capsys.readouterr().out
    assert "epochs: 5" in output
    assert "48 images of 3 classes" in output
    assert "30" in output  # optimiser steps
    assert "whole training on this machine" in output
    main(["train", "cifar10", "--data", "nowhere", "--dry-run"])
    assert "1,281,167 images of 1,000 classes (assumed: the data are not here)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "unknown recipe 'nosuch'"),
        (["quickstart", "--epohcs", "3"], "unknown key 'epohcs'; did you mean 'epochs'"),
        (["quickstart", "--epochs"], "--epochs needs a value"),
        (["quickstart", "--lr", "fast"], "lr is 'fast'; it must be a number"),
        (["quickstart", "--data", "nowhere"], "nowhere"),
        (["quickstart", "--precision", "fp16"], "precision fp16 needs a GPU"),
        (["quickstart", "--batch_size", "10", "--accumulate", "4"], "batch_size 10 is not divisible by 1 processes"),
        (["quickstart", "--resume", "x"], "--resume goes on with a run as it was"),
        (["--resume", "nowhere"], "nowhere is not a run"),
        (["quickstart", "--init", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["quickstart", "--mixup", "1", "--batch_size", "9"], "must be even"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["train", *arguments])
    assert exit_code.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_is_not_overwritten(trained: Path, images: Path) -> None:
    with pytest.raises(FileExistsError, match="exists; give another --output"):
        train("quickstart", output=trained, **settings(images))


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "train_classifier.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", "2", "--output", str(tmp_path / "run")])
    runpy.run_path(str(path), run_name="__main__")
    output = capsys.readouterr().out
    assert "after 2 steps" in output
    assert "1000 images at 36×36" in output
    assert output.count("garment_") == 3


# Starting from a checkpoint


def test_a_checkpoint_of_the_same_classes_keeps_its_head(trained: Path, images: Path) -> None:
    recipe = resolve(ClassificationRecipe, "quickstart", **settings(images, init=str(trained / "last.safetensors")))
    model, report = initial_model(recipe, CLASSES)
    assert_equal(model.state_dict(), load(trained / "last.safetensors").state_dict())
    assert "nothing was resized" in report
    assert "head: 3 of 3 classes from the checkpoint" in report


def test_other_classes_get_a_new_head(trained: Path, images: Path, tmp_path: Path) -> None:
    path = trained / "last.safetensors"
    classes = ("bright", "purple")
    fresh = initial_model(resolve(ClassificationRecipe, "quickstart", **settings(images)), classes)[0].head.weight
    model, report = initial_model(
        resolve(ClassificationRecipe, "quickstart", **settings(images, init=str(path))), classes
    )
    assert torch.equal(model.head.weight, fresh)
    assert "head: 0 of 2 classes" in report
    class_map = tmp_path / "map.yaml"
    class_map.write_text("bright: bright\n")
    recipe = resolve(ClassificationRecipe, "quickstart", **settings(images, init=str(path), class_map=str(class_map)))
    model, report = initial_model(recipe, classes)
    assert torch.equal(model.head.weight[0], load(path).head.weight[2])
    assert torch.equal(model.head.weight[1], fresh[1])
    assert "head: 1 of 2 classes" in report
    class_map.write_text("bright: 7\n")
    with pytest.raises(ValueError, match="unknown class of the checkpoint"):
        initial_model(recipe, classes)
    class_map.write_text("brigt: bright\n")
    with pytest.raises(ValueError, match="did you mean 'bright'"):
        initial_model(recipe, classes)


def test_tables_are_resized_to_another_image_size(trained: Path, images: Path, tmp_path: Path) -> None:
    source = VisionLongformer(
        resolve(ClassificationRecipe, "quickstart", **settings(images)).model_config(3), img_size=(40, 40)
    )
    path = save(source, tmp_path / "other.safetensors")
    recipe = resolve(ClassificationRecipe, "quickstart", **settings(images, init=str(path)))
    assert "resized" in initial_model(recipe, CLASSES)[1]


def test_a_checkpoint_of_another_model_is_refused(images: Path, tmp_path: Path) -> None:
    config = resolve(ClassificationRecipe, "quickstart", **settings(images)).model_config(3)
    path = save(VisionLongformer(config, stages=config.stages[:1]), tmp_path / "other.safetensors")
    recipe = resolve(ClassificationRecipe, "quickstart", **settings(images, init=str(path)))
    with pytest.raises(CheckpointError, match=r"last stage has|weights are of another model"):
        initial_model(recipe, CLASSES)


# Other processes


def command(*arguments: str, processes: int = 1) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    return [sys.executable, *launch, "-m", "vision_longformer", *arguments]


def as_arguments(values: dict[str, Any]) -> list[str]:
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return [part for key, value in plain.items() for part in (f"--{key}", value)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_as_one(images: Path, tmp_path: Path, strategy: str) -> None:
    plain = {"crop": "none", "hflip": 0, "erase": 0, "color_jitter": 0, "auto_augment": None, "mixup": 0, "cutmix": 0}
    values = settings(images, **plain, drop_path=0, log_every=1, epochs=4, accumulate=2, clip_norm=1.0)
    losses = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        arguments = as_arguments({**values, "strategy": strategy, "output": str(folder)})
        subprocess.run(command("train", "quickstart", *arguments, processes=processes), env=ENVIRONMENT, check=True)
        records = RunDirectory(folder).records()
        losses[processes] = [record["loss"] for record in records if "loss" in record]
        assert {r["evaluation"]["top1"] % 10 for r in records if "evaluation" in r} == {0.0}  # of 10 samples, once each
    assert len(losses[1]) == 24
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
    one, two = (load(tmp_path / name / "last.safetensors").state_dict() for name in "12")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-3)
    assert evaluate(tmp_path / "2" / "last.safetensors", str(images)).samples == 10


@pytest.mark.slow
def test_ten_kills_at_random_moments(images: Path, tmp_path: Path) -> None:
    """With workers, random shift, new features, mixing and an average: the same weights to the last bit."""
    common = {"dim": 16, "depth": 1, "heads": 2, "patch": 2}
    stages = [
        {**common, "attention": {"kind": "longformer", "window": 2}},
        {**common, "attention": {"kind": "performer", "features": 8}, "position": "absolute"},
    ]
    values = settings(images, model_options={"stages": stages}, epochs=30, checkpoint_minutes=0)
    whole = ["train", "quickstart", *as_arguments({**values, "output": str(tmp_path / "whole")})]
    subprocess.run(command(*whole), env=ENVIRONMENT, check=True)
    folder, kills, dice = tmp_path / "killed", 0, random.Random(1)
    arguments = ["train", "quickstart", *as_arguments({**values, "output": str(folder)})]
    while True:
        before = latest_checkpoint(folder / "checkpoints") if folder.exists() else None
        process = subprocess.Popen(command(*arguments), env=ENVIRONMENT, start_new_session=True)
        if kills == 10:
            assert process.wait() == 0
            break
        while process.poll() is None and (not folder.exists() or latest_checkpoint(folder / "checkpoints") == before):
            time.sleep(0.05)
        time.sleep(dice.uniform(0, 0.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        arguments = ["train", "--resume", str(folder)]
    assert_equal(weights(tmp_path / "whole"), weights(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names(ClassificationRecipe))
def test_every_recipe_takes_two_steps(name: str, tmp_path: Path) -> None:
    recipe = resolve(ClassificationRecipe, name)
    config = recipe.model_config(recipe.num_classes or 1000)
    shape = (4, *config.img_size, *((3,) if config.in_chans == 3 else ()))
    generator = np.random.default_rng(0)
    arrays = {
        f"{split}_{kind}": value
        for split in (recipe.train_split, recipe.eval_split)
        for kind, value in (("x", generator.integers(0, 256, shape, np.uint8)), ("y", np.arange(4)))
    }
    np.savez(tmp_path / "fake.npz", **arrays)
    changes = {"num_images": None, "num_classes": None, "batch_size": 2, "steps": 2, "workers": 0, "log_every": 1}
    result = train(name, output=tmp_path / "run", data=str(tmp_path / "fake.npz"), **changes)
    records = RunDirectory(result.run).records()
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert all(np.isfinite(record["loss"]) for record in records if "loss" in record)
