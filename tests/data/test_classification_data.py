"""Images for classification: what is read from where, in which order, and that a place in a run is all it takes."""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vision_longformer.classification.dataset import EvalData, TrainData, class_names, eval_data, train_data
from vision_longformer.classification.preprocessing import Preprocessing, preprocessing
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.data.images import ImageError
from vision_longformer.data.order import Process, epoch_order
from vision_longformer.errors import CheckpointError

SIZE = 16
CLASSES = ("cat", "dog", "owl")
PLAIN: dict[str, Any] = {"crop": "none", "hflip": 0.0, "color_jitter": 0.0, "auto_augment": None, "erase": 0.0}
IN_MEMORY: dict[str, Any] = {"crop": "pad", "color_jitter": 0.0, "auto_augment": None, "erase": 0.5, "in_memory": True}


def _recipe(data: str | Path, **changes: Any) -> ClassificationRecipe:
    """Small images with values that can be read off: one is ``(value - 127.5) / 127.5``."""
    settings: dict[str, Any] = {
        "data": str(data),
        "image_size": SIZE,
        "batch_size": 4,
        "workers": 0,
        "crop_pct": 1.0,
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
    return ClassificationRecipe(**{**settings, **changes})


def _train(recipe: ClassificationRecipe, *process: int) -> TrainData:
    return train_data(recipe, recipe.model_config(3), process=Process(*process))


def _eval(recipe: ClassificationRecipe, *process: int, classes: tuple[str, ...] = CLASSES) -> EvalData:
    return eval_data(recipe, preprocessing(recipe, recipe.model_config(3), classes), Process(*process))


def _values(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[int, int]]:
    """(grey value, label) of each sample; images must be of one colour."""
    found = []
    for images, labels in batches:
        assert images.shape[1:] == (3, SIZE, SIZE)
        assert (images == images[:, :1, :1, :1]).all()
        values = (images[:, 0, 0, 0] * 127.5 + 127.5).round().int().tolist()
        found += list(zip(values, labels.tolist(), strict=True))
    return found


def _assert_same(batches: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> None:
    assert len(batches) == len(expected)
    for (images, labels), (expected_images, expected_labels) in zip(batches, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def _png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (SIZE, SIZE), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def _files(count: int = 12) -> dict[str, bytes]:
    """Image files of ``count`` grey values, classes in turn."""
    return {f"{CLASSES[value % 3]}/{value:02}.png": _png(value) for value in range(count)}


def _sorted_values(count: int = 12) -> list[tuple[int, int]]:
    return [(value, value % 3) for value in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Splits train (12 images) and val (6)."""
    for split, count in (("train", 12), ("val", 6)):
        for name, content in _files(count).items():
            path = tmp_path / "folder" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return tmp_path / "folder"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of 12 noisy JPEG files of different sizes, without splits."""
    generator = np.random.default_rng(0)
    for index in range(12):
        path = tmp_path / "photos" / CLASSES[index % 3] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20 + index, 30, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def _npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Noise of 13 images for training, 3 for testing."""
    images = np.random.default_rng(0).integers(0, 256, (16, SIZE, SIZE, 3), np.uint8)
    labels = np.arange(16) % 3
    return _npz(
        tmp_path / "noise.npz",
        train_x=images[:13],
        train_y=labels[:13],
        test_x=images[13:],
        test_y=labels[13:],
        classes=np.array(CLASSES),
    )


def _shard(path: Path, values: Iterable[int], kind: str = "cls") -> None:
    with tarfile.open(path, "w") as archive:
        for value in values:
            label = str(value % 3) if kind == "cls" else json.dumps({"label": value % 3})
            for name, content in ((f"{value:03}.png", _png(value)), (f"{value:03}.{kind}", label.encode())):
                info = tarfile.TarInfo(f"./{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Six shards of 8 images for training, two of 5 and 2 for evaluation."""
    (tmp_path / "shards").mkdir()
    for number in range(6):
        _shard(tmp_path / "shards" / f"train-{number:03}.tar", range(number * 8, number * 8 + 8))
    _shard(tmp_path / "shards" / "val-0.tar", range(5))
    _shard(tmp_path / "shards" / "val-1.tar", range(5, 7), "json")
    return tmp_path / "shards"


def _streamed(shards: Path, **changes: Any) -> ClassificationRecipe:
    return replace(_recipe(f"wds/{shards}", num_classes=3, num_images=48), **changes)


# Order and exactness


def test_order_is_a_permutation_that_changes_with_seed_and_epoch() -> None:
    orders = [epoch_order(100, seed, epoch, 10) for seed in (0, 1) for epoch in (0, 1)]
    assert all(torch.equal(order.sort().values, torch.arange(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.equal(orders[0], epoch_order(100, 0, 0, 25))


@pytest.mark.parametrize(("samples", "batch", "repeats"), [(24, 12, 3), (25, 8, 3), (10, 4, 2)])
def test_repeats(samples: int, batch: int, repeats: int) -> None:
    """An image is shown ``repeats`` times in one global batch or two, and each of as many processes has one copy."""
    order = epoch_order(samples, 0, 0, batch, repeats)
    assert len(order) == samples
    counts = order.bincount(minlength=samples).sort(descending=True).values.tolist()
    assert counts[: samples // repeats] == [repeats] * (samples // repeats)
    assert sum(count > 0 for count in counts) == -(-samples // repeats)
    share = batch // repeats
    for whole in order[: samples // batch * batch].split(batch):
        assert all(len(part.unique()) == len(part) for part in whole.split(share))


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_resume_bit_for_bit(photos: Path, workers: int) -> None:
    data = _train(_recipe(photos, workers=workers, batch_size=2))
    whole = list(data.batches(1))
    assert len(whole) == data.batches_per_epoch == 6
    for start in (0, 1, 5, 6):
        _assert_same(list(data.batches(1, start)), whole[start:])
    next(data.batches(0))  # left in the middle
    _assert_same(list(data.batches(1, 4)), whole[4:])
    assert not torch.equal(whole[0][0], next(data.batches(2))[0])


def test_workers_change_nothing(photos: Path) -> None:
    one, two = (_train(_recipe(photos, workers=workers)) for workers in (0, 2))
    _assert_same(list(one.batches(3)), list(two.batches(3)))


@pytest.mark.parametrize("crop", ["pad", "random", "none"])
def test_in_memory_epochs_resume_bit_for_bit(arrays: Path, crop: str) -> None:
    recipe = _recipe(arrays, **{**IN_MEMORY, "crop": crop, "crop_pct": 0.8}, accumulate=2)
    whole = list(_train(recipe).batches(1))
    assert len(whole) == 6
    assert whole[0][0].shape == (2, 3, SIZE, SIZE)
    for start in (1, 4):
        _assert_same(list(_train(recipe).batches(1, start)), whole[start:])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_step_sees_the_same_with_one_process_and_with_two(arrays: Path, in_memory: bool, accumulate: int) -> None:
    recipe = _recipe(arrays, accumulate=accumulate, repeats=2, **(IN_MEMORY if in_memory else {"erase": 0.5}))
    alone = list(_train(recipe).batches(2))
    first, second = (list(_train(recipe, rank, 2).batches(2)) for rank in (0, 1))
    assert len(alone) == len(first) == len(second) == 3 * accumulate
    for step in range(3):
        part = slice(step * accumulate, (step + 1) * accumulate)
        for field in (0, 1):
            expected = torch.cat([batch[field] for batch in alone[part]])
            assert torch.equal(torch.cat([batch[field] for batch in first[part] + second[part]]), expected)


def test_nothing_else_that_is_random_notices(photos: Path, arrays: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for recipe in (_recipe(photos), _recipe(photos, workers=1), _recipe(arrays, **IN_MEMORY)):
        list(_train(recipe).batches(0))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_an_epoch_shows_every_image_once(folder: Path) -> None:
    data = _train(_recipe(folder, **PLAIN))
    first, second = _values(data.batches(0)), _values(data.batches(1))
    assert sorted(first) == sorted(second) == _sorted_values()
    assert first != second


def test_evaluation_shares_partition_the_set(arrays: Path, tmp_path: Path) -> None:
    images = np.arange(10, dtype=np.uint8)[:, None, None].repeat(SIZE, 1).repeat(SIZE, 2)
    recipe = _recipe(_npz(tmp_path / "ten.npz", test_x=images, test_y=np.arange(10) % 3))
    shares = [_eval(recipe, rank, 3) for rank in range(3)]
    assert [share.size for share in shares] == [10] * 3
    assert [len(_values(share.batches())) for share in shares] == [4, 3, 3]
    assert sorted(sample for share in shares for sample in _values(share.batches())) == _sorted_values(10)
    assert [len(labels) for _, labels in _eval(replace(recipe, eval_batch_size=7)).batches()] == [7, 3]


# Augmentation


def test_pad_crop_moves_images_by_an_eighth(tmp_path: Path) -> None:
    """One bright pixel in the middle: it may be up to 2 of 16 pixels away, and with flips on either side."""
    images = np.zeros((200, SIZE, SIZE), np.uint8)
    images[:, 8, 5] = 255
    path = _npz(tmp_path / "point.npz", train_x=images, train_y=np.zeros(200, int), classes=np.array(CLASSES))
    for in_memory in (False, True):
        settings = {**IN_MEMORY, "erase": 0.0, "in_memory": in_memory}
        ((batch, _),) = _train(_recipe(path, batch_size=200, **settings)).batches(0)
        bright = (batch[:, 0] > 0).nonzero()
        assert bright[:, 0].tolist() == list(range(200))
        assert set(bright[:, 1].tolist()) == set(range(6, 11))
        assert set(bright[:, 2].tolist()) == {3, 4, 5, 6, 7} | {8, 9, 10, 11, 12}


def test_erasing_in_memory(tmp_path: Path) -> None:
    """Half of the images have a box of noise, of 2% to a third of their area."""
    path = _npz(tmp_path / "grey.npz", train_x=np.full((400, 32, 32), 127, np.uint8), train_y=np.arange(400) % 3)
    recipe = _recipe(path, **{**IN_MEMORY, "crop": "none"}, batch_size=400, image_size=32)
    ((images, _),) = _train(recipe).batches(0)
    noisy = images != images.flatten(1).mode().values[:, None, None, None]
    erased = noisy.flatten(1).any(1)
    assert 160 < erased.sum() < 240
    areas = noisy[erased, 0].flatten(1).float().mean(1)
    assert 0.015 < areas.min() < 0.05
    assert 0.28 < areas.max() < 0.36
    for mask in noisy[erased, 0]:
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)
        assert (rows.diff().sum(), columns.diff().sum()) <= (2, 2)
    assert abs(images[noisy].mean()) < 0.02
    assert abs(images[noisy].std() - 1) < 0.02


def test_in_memory_agrees_with_the_usual_way(arrays: Path) -> None:
    usual, quick = (_train(_recipe(arrays, **PLAIN, in_memory=in_memory)) for in_memory in (False, True))
    _assert_same(list(usual.batches(0)), list(quick.batches(0)))


def test_in_memory_resizes_and_takes_colour_away(arrays: Path) -> None:
    """Bilinear, because Pillow clips what bicubic interpolation overshoots between rows and columns."""
    grey: dict[str, Any] = {"model_options": {"in_chans": 1}, "mean": (0.5,), "std": (0.5,), "image_size": 24}
    grey["interpolation"] = "bilinear"
    usual, quick = (_train(_recipe(arrays, **{**PLAIN, **grey, "in_memory": flag})) for flag in (False, True))
    for (images, labels), (expected, expected_labels) in zip(quick.batches(0), usual.batches(0), strict=True):
        assert images.shape == (4, 1, 24, 24)
        assert torch.equal(labels, expected_labels)
        assert (images - expected).abs().max() <= 1 / 127.5 + 1e-6  # roundings of the last bit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": "random_resized"}, "in_memory cannot crop 'random_resized'"),
        ({"color_jitter": 0.4}, "in_memory changes no colours"),
        ({"auto_augment": "rand-m9"}, "in_memory changes no colours"),
    ],
)
def test_in_memory_refuses_what_it_cannot_do(arrays: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _train(_recipe(arrays, **{**IN_MEMORY, **changes}))


@pytest.mark.parametrize("crop", ["random_resized", "random", "pad", "none"])
@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", "original", None])
def test_augmentation_of_grey_models(photos: Path, crop: str, policy: str | None) -> None:
    options = {"model_options": {"in_chans": 1}, "mean": None, "std": None, "interpolation": "random", "crop_pct": 0.9}
    images, _ = next(_train(_recipe(photos, **options, crop=crop, auto_augment=policy, erase=0.0)).batches(0))
    assert images.shape == (4, 1, SIZE, SIZE)
    assert (images * 0.226 + 0.449).min() > -1e-6
    assert (images * 0.226 + 0.449).max() < 1 + 1e-6
    assert images.flatten(1).std(1).min() > 0


def test_posterizing_to_no_bits_is_black(photos: Path) -> None:
    """What magnitude 10 of RandAugment asks for, and newer versions of Pillow refuse."""
    data = _train(_recipe(photos, auto_augment="rand-m10-n1-inc1", erase=0.0))
    images = torch.cat([images for epoch in range(10) for images, _ in data.batches(epoch)])
    assert 1 <= (images == -1).flatten(1).all(1).sum() <= 20


def test_unknown_policy(photos: Path) -> None:
    with pytest.raises(ValueError, match="auto_augment is 'rand-q9', which timm does not know"):
        _train(_recipe(photos, auto_augment="rand-q9"))


# Sources


def test_fashion_mnist() -> None:
    recipe = _recipe("fashion-mnist", **PLAIN, image_size=28, batch_size=100, in_memory=True)
    classes = class_names(recipe)
    assert (len(classes), classes[0], classes[9]) == (10, "T-shirt/top", "Ankle boot")
    data = train_data(recipe, recipe.model_config(10))
    assert data.batches_per_epoch == 60
    labels = torch.cat([labels for _, labels in data.batches(0)])
    assert labels.bincount().tolist() == [600] * 10
    evaluation = _eval(recipe, classes=classes)
    assert evaluation.size == 1000
    assert torch.cat([labels for _, labels in evaluation.batches()]).bincount().tolist() == [100] * 10


def test_folder(folder: Path) -> None:
    recipe = _recipe(folder)
    assert class_names(recipe) == CLASSES
    assert _values(_eval(recipe).batches()) == sorted(_sorted_values(6), key=lambda sample: sample[1])
    assert sorted(_values(_eval(_recipe(folder / "train", eval_split="train")).batches())) == _sorted_values()


def _tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def _zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(("write", "suffix"), [(_tar, "tar"), (_zip, "zip")])
@pytest.mark.parametrize("workers", [0, 2])
def test_archives(tmp_path: Path, write: Any, suffix: str, workers: int) -> None:
    divided = {f"set/train/{name}": content for name, content in _files().items()}
    divided |= {f"set/val/{name}": content for name, content in _files(6).items()}
    whole = _recipe(write(tmp_path / f"all.{suffix}", divided), workers=workers, **PLAIN)
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / f"train.{suffix}", _files())
    write(tmp_path / "parts" / f"validation.{suffix}", _files(6))
    parts = replace(whole, data=str(tmp_path / "parts"))
    for recipe in (whole, parts):
        assert class_names(recipe) == CLASSES
        assert sorted(_values(_train(recipe).batches(0))) == _sorted_values()
        assert sorted(_values(_eval(recipe).batches())) == _sorted_values(6)


def test_tar_of_tars(tmp_path: Path) -> None:
    inner = {}
    for number, name in enumerate(CLASSES):
        path = _tar(tmp_path / f"{name}.tar", {f"{value}.png": _png(value) for value in range(number, 12, 3)})
        inner[path.name] = path.read_bytes()
    recipe = _recipe(_tar(tmp_path / "all.tar", inner), **PLAIN)
    assert sorted(_values(_train(recipe).batches(0))) == _sorted_values()


def test_npz_without_names_and_splits(tmp_path: Path) -> None:
    images = np.arange(12, dtype=np.uint8)[:, None, None, None].repeat(SIZE, 1).repeat(SIZE, 2)
    recipe = _recipe(_npz(tmp_path / "plain.npz", x=images, y=np.arange(12) % 3), **PLAIN)
    assert class_names(recipe) == ("0", "1", "2")
    assert sorted(_values(_train(recipe).batches(0))) == _sorted_values()
    assert class_names(replace(recipe, num_classes=5)) == ("0", "1", "2", "3", "4")
    with pytest.raises(ValueError, match="has no split 'validation'; ask for split 'train'"):
        _eval(recipe)


def test_torchvision(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    def pretend(self: Any, root: str, train: bool, download: bool) -> None:
        assert (root, download) == ("/somewhere", False)
        count = 12 if train else 6
        self.data = np.arange(count, dtype=np.uint8)[:, None, None, None] + np.zeros((1, SIZE, SIZE, 3), np.uint8)
        self.targets = [value % 3 for value in range(count)]
        self.classes = list(CLASSES)

    recipe = _recipe("torch/cifar10:/somewhere", **PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(CIFAR10, "__init__", pretend)
        for in_memory in (False, True):
            assert sorted(_values(_train(replace(recipe, in_memory=in_memory)).batches(0))) == _sorted_values()
        assert _values(_eval(recipe).batches()) == _sorted_values(6)
    assert class_names(_recipe(f"torch/folder:{photos}")) == CLASSES
    assert _train(_recipe(f"torch/folder:{photos}")).batches_per_epoch == 3
    with pytest.raises(FileNotFoundError, match=r"torch/cifar10 is not in .*; download it there"):
        _train(_recipe(f"torch/cifar10:{tmp_path}"))
    with pytest.raises(ValueError, match="torch/nothing is not a data set that timm knows"):
        _train(_recipe(f"torch/nothing:{tmp_path}"))
    with pytest.raises(ValueError, match="torch/cifar10 does not say where it is"):
        _train(_recipe("torch/cifar10"))


class _Reader:
    """Stands in for timm's reader of Hugging Face data sets."""

    def __init__(self, name: str, split: str) -> None:
        assert name == "Someone/Pets"
        self.count = 12 if split == "train" else 6
        self.class_to_idx = {"owl": 2, "cat": 0, "dog": 1}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        return io.BytesIO(_png(index)), index % 3


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _recipe("hfds/Someone/Pets", **PLAIN)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        patch.setattr("vision_longformer.data.sources.find_spec", lambda name: None)
        with pytest.raises(ValueError, match="pip install datasets"):
            _train(recipe)
    module = ModuleType("reader_hfds")
    module.ReaderHfds = _Reader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm.data.readers.reader_hfds", module)
    monkeypatch.setattr("vision_longformer.data.sources.find_spec", lambda name: module)
    assert class_names(recipe) == CLASSES
    assert sorted(_values(_train(recipe).batches(0))) == _sorted_values()
    assert _values(_eval(recipe).batches()) == _sorted_values(6)


# Shards


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_resume_bit_for_bit(shards: Path, workers: int) -> None:
    data = _train(_streamed(shards, workers=workers, accumulate=2, color_jitter=0.4, auto_augment=None))
    whole = list(data.batches(1))
    assert len(whole) == data.batches_per_epoch == 24
    for start in (0, 1, 5, 23):
        _assert_same(list(data.batches(1, start)), whole[start:])


def test_shards_of_two_processes_make_an_epoch(shards: Path) -> None:
    recipe = _streamed(shards, **PLAIN, workers=1)
    epochs = []
    for epoch in (0, 1):
        shares = [_values(_train(recipe, rank, 2).batches(epoch)) for rank in (0, 1)]
        assert [len(share) for share in shares] == [24, 24]
        assert sorted(shares[0] + shares[1]) == _sorted_values(48)
        epochs.append(shares[0])
    assert epochs[0] != epochs[1] != sorted(epochs[1])


def test_an_epoch_of_shards_may_be_longer_or_shorter(shards: Path) -> None:
    longer = _values(_train(_streamed(shards, **PLAIN, num_images=96)).batches(0))
    assert sorted(longer[:48]) == sorted(longer[48:]) == _sorted_values(48)
    assert len(_values(_train(_streamed(shards, **PLAIN, num_images=11)).batches(0))) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_of_shards_counts_every_sample_once(shards: Path, workers: int) -> None:
    shares = [_eval(_streamed(shards, workers=workers), rank, 2) for rank in (0, 1)]
    assert shares[0].size == 7
    assert sorted(sample for share in shares for sample in _values(share.batches())) == _sorted_values(7)


@pytest.mark.parametrize("pattern", ["train-{000..005}.tar", "train-*.tar", "{split}-{000..005}.tar"])
def test_patterns_of_shards(shards: Path, pattern: str) -> None:
    recipe = _streamed(shards, **PLAIN, data=f"wds/{shards}/{pattern}")
    assert sorted(_values(_train(recipe).batches(0))) == _sorted_values(48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 7}, "has 6 shards, fewer than the 7 workers"),
        ({"num_images": None}, "num_images"),
        ({"num_classes": None}, "num_classes"),
        ({"num_images": 3}, "batch_size is 4, but there are only 3 images"),
        ({"in_memory": True}, "in_memory is for arrays"),
        ({"num_classes": 2}, r"label 2 of .*train-00.*tar/./0.. is out of range; the 2 classes are 0 to 1"),
    ],
)
def test_bad_settings_for_shards(shards: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(_train(_streamed(shards, **changes)).batches(0))


def test_bad_shards(shards: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no shard .*train-006.tar"):
        _train(_streamed(shards, data=f"wds/{shards}/train-{{000..009}}.tar"))
    with pytest.raises(FileNotFoundError, match=r"there are no shards like .*other-"):
        _train(_streamed(shards, data=f"wds/{shards}/other-{{000..009}}.tar"))
    with pytest.raises(ValueError, match="ask for split 'train'"):
        _eval(_streamed(shards, data=f"wds/{shards}/train-*.tar"))
    whole = (shards / "val-0.tar").read_bytes()
    (shards / "val-0.tar").write_bytes(whole[:1700])
    with pytest.raises(ValueError, match=r"shard .*val-0.tar is not a whole tar file"):
        list(_eval(_streamed(shards, workers=1)).batches())


@pytest.mark.parametrize("files", [{"a.png": b"", "a.txt": b""}, {"a.cls": b"0"}, {"a.png": b"", "a.cls": b"cat"}])
def test_bad_samples_of_shards(tmp_path: Path, files: dict[str, bytes]) -> None:
    _tar(tmp_path / "bad.tar", files)
    with pytest.raises(
        ValueError, match=r"bad.tar/a (has no image|has no label)|the label of .* is not a whole number"
    ):
        list(_train(_streamed(tmp_path, data=f"wds/{tmp_path}/bad.tar")).batches(0))


# Bad input


def test_missing_data(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no data .*missing; give a folder"):
        class_names(_recipe(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match=r"has no folder 'final', only train, val"):
        _eval(_recipe(folder, eval_split="final"))
    with pytest.raises(ValueError, match=r"has no split 'validation'; ask for split 'train'"):
        _eval(_recipe(folder / "train"))
    with pytest.raises(ValueError, match="has no class folders"):
        class_names(_recipe(folder / "train" / "cat"))


def test_empty_class(folder: Path) -> None:
    (folder / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match=r"class 'emu' is empty: there are no images in .*train/emu"):
        _train(_recipe(folder))


def test_other_classes_in_evaluation(folder: Path) -> None:
    with pytest.raises(ValueError, match="lacks class 'emu', which the model has"):
        _eval(_recipe(folder), classes=(*CLASSES, "emu"))
    with pytest.raises(ValueError, match="has class 'owl', which the model lacks"):
        _eval(_recipe(folder), classes=CLASSES[:2])
    with pytest.raises(ValueError, match="in another order: cat, dog, owl"):
        _eval(_recipe(folder), classes=CLASSES[::-1])
    with pytest.raises(ValueError, match=r"num_classes is 5, but .* has 3 classes"):
        class_names(_recipe(folder, num_classes=5))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_y": np.array([0, 1, 7, 2])}, "label 7 of image 2 of .*bad.npz .train. is out of range; the 3 classes"),
        ({"train_y": np.array([0, -1, 2, 2])}, "label -1 of image 1 of .* is out of range"),
        ({"train_y": np.zeros(3, int)}, r"they should be 4 whole numbers"),
        ({"train_y": np.zeros(4)}, "they should be 4 whole numbers"),
        ({"train_x": np.zeros((4, 8, 8))}, r"are float64 of shape \(4, 8, 8\); they should be uint8"),
        ({"train_x": np.zeros((4, 8, 8, 2), np.uint8)}, r"of shape \(4, 8, 8, 2\); they should be uint8"),
        ({"train_x": np.zeros((0, 8, 8), np.uint8), "train_y": np.zeros(0, int)}, "holds no images"),
        ({"train_y": np.array([None] * 4)}, "pickle"),
    ],
)
def test_bad_arrays(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    good = {"train_x": np.zeros((4, 8, 8), np.uint8), "train_y": np.arange(4) % 3, "classes": np.array(CLASSES)}
    with pytest.raises(ValueError, match=message):
        _train(_recipe(_npz(tmp_path / "bad.npz", **{**good, **arrays})))


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    for suffix in ("npz", "tar", "zip"):
        path = tmp_path / f"text.{suffix}"
        path.write_text("text" * 500)
        with pytest.raises(ValueError, match=rf"text.{suffix} is not a whole .{suffix} file|pickle"):
            _train(_recipe(path))
    with pytest.raises(ValueError, match="has no arrays train_x and train_y, only images"):
        _train(_recipe(_npz(tmp_path / "other.npz", images=np.zeros(1))))
    with pytest.raises(ValueError, match=r"has an image outside of class folders: 1.png"):
        _train(_recipe(_zip(tmp_path / "flat.zip", {"1.png": _png(1)})))
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match="neither a folder nor"):
        _train(_recipe(tmp_path / "notes.txt"))


def test_batches_that_cannot_be_divided(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"batch_size is 4; it must be divisible by 3 \(processes: 3, accumulate: 1\)"):
        _train(_recipe(folder), 0, 3)
    with pytest.raises(ValueError, match=r"batch_size is 4; it must be divisible by 6 \(processes: 2, accumulate: 3\)"):
        _train(_recipe(folder, accumulate=3), 0, 2)
    with pytest.raises(ValueError, match="batch_size is 16, but there are only 12 images to train on"):
        _train(_recipe(folder, batch_size=16))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_stop_a_run_and_are_named(folder: Path, workers: int) -> None:
    for split in ("train", "val"):
        (folder / split / "dog" / "01.png").write_bytes(_png(1)[:60])
    with pytest.raises(ImageError, match=r"^\S*train/dog/01.png cannot be read as an image: [^\n]*$"):
        list(_train(_recipe(folder, workers=workers)).batches(0))
    with pytest.raises(ImageError, match=r"^\S*val/dog/01.png cannot be read as an image: [^\n]*$"):
        list(_eval(_recipe(folder, workers=workers)).batches())


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_if_asked(folder: Path, workers: int) -> None:
    for split in ("train", "val"):
        (folder / split / "dog" / "01.png").write_bytes(b"")
        (folder / split / "dog" / "04.png").unlink()
        (folder / split / "dog" / "04.png").symlink_to("nowhere")
    recipe = _recipe(folder, workers=workers, skip_bad_images=True, **PLAIN)
    data = _train(recipe)
    shown = _values(data.batches(0))
    assert data.skipped >= 2
    files = sorted(_sorted_values(), key=lambda sample: sample[1])
    order = [files[index] for index in epoch_order(12, 0, 0, 4)]
    bad = {(1, 1), (4, 1)}
    for place, sample in enumerate(shown):
        following = order[place:] + order[:place]
        assert sample == next(other for other in following if other not in bad)
    assert _values(data.batches(0, 1)) == shown[4:]
    evaluation = _eval(recipe)
    assert sorted(_values(evaluation.batches())) == [sample for sample in _sorted_values(6) if sample not in bad]
    assert (evaluation.size, evaluation.skipped) == (6, 2)


def test_no_readable_image_at_all(folder: Path) -> None:
    for path in folder.glob("*/*/*.png"):
        path.write_bytes(b"")
    recipe = _recipe(folder, skip_bad_images=True)
    with pytest.raises(ValueError, match=r"none of the images of .* can be read"):
        list(_train(recipe).batches(0))
    evaluation = _eval(recipe)
    assert (list(evaluation.batches()), evaluation.skipped) == ([], 6)


def test_bad_images_of_shards(tmp_path: Path) -> None:
    files = {}
    for value in range(8):
        files |= {f"{value}.png": b"" if value in (2, 3) else _png(value), f"{value}.cls": str(value % 3).encode()}
    _tar(tmp_path / "train-0.tar", files)
    recipe = _streamed(tmp_path, **PLAIN, num_images=8)
    with pytest.raises(ImageError, match=r"train-0.tar/[23] cannot be read as an image"):
        list(_train(recipe).batches(0))
    data = _train(replace(recipe, skip_bad_images=True))
    shown = _values(data.batches(0))
    assert data.skipped == 2
    assert {value for value, _ in shown} == {0, 1, 4, 5, 6, 7}
    assert _values(data.batches(0, 1)) == shown[4:]
    evaluation = _eval(replace(recipe, skip_bad_images=True, eval_split="train"))
    assert [value for value, _ in _values(evaluation.batches())] == [0, 1, 4, 5, 6, 7]
    assert evaluation.skipped == 2


# Preprocessing


def test_preprocessing_crops_the_centre_of_the_resized_image() -> None:
    """From 40×20 at crop_pct .8: the shorter side becomes 20, and the crop is its middle 16 of 20 and of 40 pixels."""
    prepare = Preprocessing((16, 16), (0.5,) * 3, (0.25,) * 3, 0.8, "bicubic", CLASSES)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)
    images = prepare.transform()(Image.fromarray(pixels))[None]
    assert torch.equal(images, prepare.normalise(torch.from_numpy(pixels[2:18, 12:28]).permute(2, 0, 1)[None]))
    assert torch.equal(prepare.denormalise(images)[0], torch.from_numpy(pixels[2:18, 12:28]).permute(2, 0, 1))
    assert prepare.transform((8, 12))(Image.fromarray(pixels)).shape == (3, 8, 12)
    assert (images.max() <= 2, images.min() >= -2) == (True, True)


def test_preprocessing_of_recipes() -> None:
    small = _recipe("fashion-mnist", mean=None, std=None, crop_pct=None, interpolation="random")
    prepared = preprocessing(small, small.model_config(3), CLASSES)
    assert prepared == Preprocessing(
        (SIZE, SIZE), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.875, "bicubic", CLASSES
    )
    large = replace(small, image_size=384)
    assert preprocessing(large, large.model_config(3), CLASSES).crop_pct == 0.922
    grey = replace(small, model_options={"in_chans": 1}, crop_pct=1.0)
    prepared = preprocessing(grey, grey.model_config(3), CLASSES)
    assert (prepared.mean, prepared.std, prepared.crop_pct) == ((0.449,), (0.226,), 1.0)
    levels = np.full((SIZE, SIZE, 3), 51, np.uint8)
    assert torch.allclose(prepared.transform()(Image.fromarray(levels)), torch.tensor((0.2 - 0.449) / 0.226))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_options": {"in_chans": 4}}, "in_chans is 4; images have 3 channels"),
        ({"mean": (0.5,)}, r"mean is \(0.5,\), but the model's images have 3 channels"),
        ({"std": (0.0, 1.0, 1.0)}, "std is .* must be positive"),
        ({"crop_pct": 0.0}, "crop_pct is 0.0; it must be above 0"),
    ],
)
def test_bad_preprocessing(changes: dict[str, Any], message: str) -> None:
    recipe = _recipe("fashion-mnist", **changes)
    with pytest.raises(ValueError, match=message):
        preprocessing(recipe, recipe.model_config(3), CLASSES)


def test_preprocessing_is_stored_as_json() -> None:
    prepare = Preprocessing((16, 24), (0.5,), (0.25,), 0.8, "bilinear", CLASSES)
    data = json.loads(json.dumps(prepare.to_dict()))
    assert Preprocessing.from_dict(data, "model.safetensors") == prepare
    with pytest.raises(CheckpointError, match=r"model.safetensors does not say .*: mean, classes missing"):
        Preprocessing.from_dict({key: data[key] for key in data if key not in ("mean", "classes")}, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors does not say .*: crop_pct is 7; it must be"):
        Preprocessing.from_dict({**data, "crop_pct": 7}, "model.safetensors")
