"""Classification as a training task: the loss by hand, what is read; whole runs, resumed, over several processes."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import StopAt, grey_arrays, write_folder, write_npz, write_shards
from classification_builders import UNCHANGED, image_recipe, train_set_of
from torch import Tensor, nn

from vision_longformer import load
from vision_longformer.checkpoint import load_info
from vision_longformer.classification import evaluate, resume, train
from vision_longformer.classification import task as task_module
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.classification.task import ClassificationTask
from vision_longformer.cli.main import main
from vision_longformer.data.images import ImageError
from vision_longformer.data.order import Process
from vision_longformer.data.sources import ArraySource
from vision_longformer.training.checkpointer import latest_checkpoint, load_state
from vision_longformer.training.distributed import make_accelerator
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


# The task


def task_of(data: Path, **changes: Any) -> ClassificationTask:
    """On images of 16×16, of which nothing is changed but by ``changes``."""
    recipe = image_recipe(data, **{**UNCHANGED, "mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0, **changes})
    return ClassificationTask(recipe, make_accelerator(recipe))


class Fixed(nn.Module):
    """Gives the same logits for any images, which it remembers."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits
        self.images = torch.empty(0)

    def forward(self, images: Tensor) -> Tensor:
        self.images = images
        return self._logits


LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, -2.0]])


def pair() -> tuple[Tensor, Tensor]:
    """A white image of class 0 and a black one of class 2: mixed, they show how much of the first is in each."""
    return torch.stack([torch.ones(3, 16, 16), torch.zeros(3, 16, 16)]), torch.tensor([0, 2])


def soft_cross_entropy(targets: list[list[float]]) -> float:
    """The mean loss of :data:`LOGITS` for probabilities of the classes, in numpy."""
    logits = LOGITS.double().numpy()
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return float(-(np.array(targets) * log_probabilities).sum(1).mean())


@pytest.mark.parametrize(
    ("smoothing", "targets"),
    [(0.0, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), (0.3, [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])],
)
def test_loss_of_plain_labels(images: Path, smoothing: float, targets: list[list[float]]) -> None:
    """A part of each label is spread evenly over the three classes."""
    loss, values = task_of(images, smoothing=smoothing).loss(Fixed(LOGITS), pair(), 0)
    assert loss.item() == pytest.approx(soft_cross_entropy(targets), rel=1e-6)
    assert values["accuracy"].item() == 50


@pytest.mark.parametrize(
    ("micro_batch_index", "share"), [(0, 0.8951460528399015), (1, 0.16616260798097024), (2, 0.08291395284516118)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_of_mixed_labels(images: Path, micro_batch_index: int, share: float, smoothing: float) -> None:
    """Shares of seed 3's micro-batches: numpy's ``RandomState(seed)`` draws ``rand()``, then ``beta(0.8, 0.8)``.

    The seed is from ``printf "(3, 'mix', 0, 0)" | b2sum -l 64`` and so on: eight bytes, little end first, without the
    last bit, modulo 2**32. Labels are smoothed once, before they are mixed.
    """
    model = Fixed(LOGITS)
    task = task_of(images, seed=3, mixup=0.8, smoothing=smoothing)
    loss, values = task.loss(model, pair(), micro_batch_index)
    assert model.images[:, 0, 0, 0].tolist() == pytest.approx([share, 1 - share], rel=1e-6)
    even = smoothing / 3
    first = [(1 - smoothing) * share + even, even, (1 - smoothing) * (1 - share) + even]
    assert loss.item() == pytest.approx(soft_cross_entropy([first, first[::-1]]), rel=1e-6)
    assert values["accuracy"].item() == (50 if share > 0.5 else 0)


def test_each_process_mixes_by_its_own_draw(images: Path) -> None:
    task, model = task_of(images, seed=3, mixup=0.8), Fixed(LOGITS)
    task.batching = replace(task.batching, process=Process(1, 2))
    task.loss(model, pair(), 0)
    assert model.images[0, 0, 0, 0].item() == pytest.approx(0.10308180831768565, rel=1e-6)


def test_cutmix_weighs_labels_by_the_area_that_stays(images: Path) -> None:
    task, model = task_of(images, cutmix=1.0), Fixed(LOGITS)
    shares = set()
    for index in range(5):
        loss, _ = task.loss(model, pair(), index)
        assert set(model.images.unique().tolist()) <= {0.0, 1.0}
        share = model.images[0].mean().item()
        targets = [[share, 0.0, 1 - share], [1 - share, 0.0, share]]
        assert loss.item() == pytest.approx(soft_cross_entropy(targets), rel=1e-6)
        shares.add(share)
    assert len(shares) == 5


@pytest.mark.parametrize(("mixup", "sizes"), [(0.0, [3, 3, 3]), (0.8, [2, 4, 2])])
def test_images_that_are_mixed_stay_in_pairs(images: Path, mixup: float, sizes: list[int]) -> None:
    task = task_of(images, batch_size=6, accumulate=2, mixup=mixup)
    assert task.batches_per_epoch == 16
    assert [len(labels) for _, labels in islice(task.batches(0, 0), 3)] == sizes
    with pytest.raises(ValueError, match="batch_size 2 cannot be shared by 1 process × accumulate 2; use 4 or more"):
        task_of(images, batch_size=2, accumulate=2, mixup=0.8)


def test_features_are_redrawn_less_and_less_often() -> None:
    """Every step of epoch 0, every 6th of epoch 1, every 11th of epoch 2, always at the start of an epoch."""
    for epoch, expected in ((0, list(range(20))), (1, [0, 6, 12, 18]), (2, [0, 11])):
        assert [step for step in range(20) if ClassificationTask.redraws_features(99, epoch, step)] == expected


@pytest.mark.parametrize(("eval_batch_size", "sizes"), [(7, [7, 3]), (None, [4, 4, 2])])
def test_evaluation_batches_are_those_of_the_recipe_or_of_training(
    images: Path, eval_batch_size: int | None, sizes: list[int]
) -> None:
    task = task_of(images, batch_size=8, accumulate=2, eval_batch_size=eval_batch_size)
    assert [len(labels) for _, labels in task.eval_set.batches()] == sizes


def test_rare_classes_weigh_more_if_asked(tmp_path: Path) -> None:
    """Of 6, 3 and 3 images: weights 2/3, 4/3 and 4/3, whose mean over the images is 1."""
    labels = np.array([0, 1, 0, 2] * 3)
    data = write_npz(
        tmp_path / "a.npz", train_x=grey_arrays(12, 3), train_y=labels, val_x=grey_arrays(3, 3), val_y=labels[1:4]
    )
    task = task_of(data, balance="loss")
    loss, _ = task.loss(Fixed(LOGITS), pair(), 0)
    assert loss.item() == pytest.approx(soft_cross_entropy([[2 / 3, 0.0, 0.0], [0.0, 0.0, 4 / 3]]))


def test_every_class_comes_equally_often_if_asked(tmp_path: Path) -> None:
    labels = np.array([0] * 8 + [1, 1, 2, 2])
    data = write_npz(
        tmp_path / "a.npz", train_x=grey_arrays(12, 3), train_y=labels, val_x=grey_arrays(12, 3), val_y=labels
    )
    for in_memory in (False, True):
        task = task_of(data, balance="sample", in_memory=in_memory, color_jitter=0.0)
        seen = torch.cat([labels for _, labels in task.batches(0, 0)])
        assert seen.bincount().tolist() == [4, 4, 4]


def test_shards_cannot_be_balanced(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards")
    with pytest.raises(ValueError, match=r"balance is 'sample', but wds/.* does not list its labels; use 'none'"):
        train_set_of(image_recipe(f"wds/{shards}", num_classes=3, num_images=12, balance="sample"))


def test_bad_images_are_skipped_in_both_sets_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "folder")
    for split in ("train", "val"):
        (folder / split / "dog" / "01.png").write_bytes(b"")
    task = task_of(folder, skip_bad_images=True)
    assert sum(len(labels) for _, labels in task.batches(0, 0)) == 12
    assert task.train_set.skipped == {"dog/01.png"}
    named = [f"{part}: 1 image could not be read and was skipped: dog/01.png" for part in ("training", "evaluation")]
    for epoch in (1, 2):
        results = task.evaluate(lambda done, total: None)
        assert (results["skipped"], results["skipped_in_training"]) == (1, 1), "images, not how often they were skipped"
        assert caplog.messages == named, "once"
        assert task.result is not None
        assert (task.result.samples, task.result.skipped) == (5, ("dog/01.png",))
        assert len(list(task.batches(epoch, 0))) == 3
    assert task.summary()["training"] == "12 images as found: cat 4, dog 4, owl 4"
    assert task.summary()["evaluation"] == "6 images as found: cat 2, dog 2, owl 2"
    with pytest.raises(ImageError, match=r"val/dog/01\.png .*; 'vil check' lists all such files: remove them"):
        task_of(folder).evaluate(lambda done, total: None)


def test_the_page_of_predictions_counts_what_could_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "folder")
    (folder / "val" / "dog" / "01.png").write_bytes(b"")
    task = task_of(folder, skip_bad_images=True)
    task.evaluate(lambda done, total: None)
    task.save(tmp_path / "best.safetensors")
    pages: list[tuple[int, int]] = []
    monkeypatch.setattr(
        task_module, "draw_predictions", lambda pixels, *rest, total, **options: pages.append((len(pixels), total))
    )
    task.draw(tmp_path)
    assert pages == [(5, 5)]


def test_each_split_is_opened_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    load_arrays = np.load
    monkeypatch.setattr(np, "load", lambda path, **options: opened.append(str(path)) or load_arrays(path, **options))
    task_of(images)
    assert opened == [str(images)] * 2


def test_pictures_read_no_more_images_than_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty of 100: numbers 0, 2, 5, 7, … 97. Drawn are the evaluation's own, with the model's best guess."""
    grey = {"train_x": grey_arrays(9), "train_y": np.arange(9) % 3, "classes": np.array(CLASSES)}
    path = write_npz(tmp_path / "grey.npz", **grey, test_x=grey_arrays(100), test_y=np.arange(100) % 3)
    task = task_of(path)
    task.evaluate(lambda done, total: None)
    task.save(tmp_path / "best.safetensors")
    indices: list[int] = []
    read = ArraySource.read
    monkeypatch.setattr(ArraySource, "read", lambda self, index: indices.append(index) or read(self, index))
    pages: list[dict[str, Any]] = []
    monkeypatch.setattr(
        task_module,
        "draw_predictions",
        lambda pixels, labels, predictions, *rest, **options: pages.append(
            {"values": pixels[:, 0, 0, 0].tolist(), "labels": labels.tolist(), "predictions": predictions.tolist()}
        ),
    )
    task.draw(tmp_path)
    expected = sorted([*range(0, 100, 5), *range(2, 100, 5)])
    assert indices == expected
    (page,) = pages
    assert (page["values"], page["labels"]) == (expected, [value % 3 for value in expected])
    inputs = (torch.tensor(expected).float().view(-1, 1, 1, 1).expand(-1, 3, 16, 16) - 127.5) / 127.5
    with torch.no_grad():
        assert page["predictions"] == task.model.eval()(inputs).argmax(1).tolist()
    assert (tmp_path / "confusion.png").exists()


# Runs


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
    assert resumed.last == [r for r in RunDirectory(trained).records() if "evaluation" in r][-1]["evaluation"]


def test_a_run_from_the_command_line(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--epochs", "1", "--steps=2", "--workers", "0", "--output", str(tmp_path / "run")]
    values = settings(images, ema=None, neighbours="all")
    for key in ("data", "image_size", "model_options", "mean", "std", "batch_size", "in_memory"):
        arguments += [f"--{key}", json.dumps(values[key]) if key != "data" else values[key]]
    main(["train", "quickstart", *arguments])
    output = capsys.readouterr()
    assert "top-1" in output.out
    assert f"vil predict {tmp_path / 'run'} IMAGE" in output.out
    main(["train", "--resume", str(tmp_path / "run")])
    assert "top-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "unknown recipe 'nosuch'"),
        (["quickstart", "--epohcs", "3"], "unknown option '--epohcs'; did you mean '--epochs'"),
        (["quickstart", "--epochs"], "argument --epochs: expected one argument"),
        (["quickstart", "--lr", "fast"], "lr is 'fast'; it must be a number"),
        (["quickstart", "--data", "nowhere"], "nowhere"),
        (["quickstart", "--precision", "fp16"], "precision fp16 needs a GPU"),
        (["quickstart", "--batch_size", "10", "--accumulate", "6"], "batch_size 10 cannot be shared by 1 process ×"),
        (["quickstart", "--resume", "x"], "--resume continues a run as it was started"),
        (["--resume", "nowhere"], "there is no directory nowhere; give that of a run"),
        (["quickstart", "--init", "nowhere.safetensors"], "there is no file or run directory nowhere.safetensors"),
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
        f"{split}_{array}": value
        for split in (recipe.train_split, recipe.eval_split)
        for array, value in (("x", generator.integers(0, 256, shape, np.uint8)), ("y", np.arange(4)))
    }
    np.savez(tmp_path / "fake.npz", **arrays)
    changes = {"num_images": None, "num_classes": None, "batch_size": 2, "steps": 2, "workers": 0, "log_every": 1}
    result = train(name, output=tmp_path / "run", data=str(tmp_path / "fake.npz"), **changes)
    records = RunDirectory(result.run).records()
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert all(np.isfinite(record["loss"]) for record in records if "loss" in record)
