"""Training and evaluation sets: exact order, the same whatever loads them, bad images, and only what is needed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    IMAGE_CLASSES,
    grey_arrays,
    grey_png,
    grey_samples,
    write_folder,
    write_npz,
    write_photos,
)
from classification_builders import (
    IN_MEMORY,
    UNCHANGED,
    assert_same,
    eval_set_of,
    image_recipe,
    samples_of,
    train_set_of,
)
from PIL import Image

from vision_longformer.classification.dataset import EvalImages, IndexedEvalSet, build_eval_set
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.data.images import ImageError
from vision_longformer.data.order import Process, epoch_order


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "folder")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Noise of 13 images for training, 3 for testing."""
    images = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), np.uint8)
    labels = np.arange(16) % 3
    return write_npz(
        tmp_path / "noise.npz",
        train_x=images[:13],
        train_y=labels[:13],
        test_x=images[13:],
        test_y=labels[13:],
        classes=np.array(IMAGE_CLASSES),
    )


@pytest.fixture
def points(tmp_path: Path) -> Path:
    """Eight black images with a white pixel at row 8, column 5."""
    images = np.zeros((8, 16, 16), np.uint8)
    images[:, 8, 5] = 255
    return write_npz(tmp_path / "points.npz", train_x=images, train_y=np.arange(8) % 3)


# Order and exactness


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_resume_bit_for_bit(photos: Path, workers: int) -> None:
    train_set = train_set_of(image_recipe(photos, workers=workers, batch_size=2))
    whole = list(train_set.batches(1))
    assert len(whole) == train_set.batches_per_epoch == 6
    for start in (0, 1, 5, 6):
        assert_same(list(train_set.batches(1, start)), whole[start:])
    next(train_set.batches(0))  # left in the middle
    assert_same(list(train_set.batches(1, 4)), whole[4:])
    assert not torch.equal(whole[0][0], next(train_set.batches(2))[0])


def test_workers_change_nothing(photos: Path) -> None:
    one, two = (train_set_of(image_recipe(photos, workers=workers)) for workers in (0, 2))
    assert_same(list(one.batches(3)), list(two.batches(3)))


@pytest.mark.parametrize("crop", ["pad", "random", "none"])
def test_in_memory_epochs_resume_bit_for_bit(arrays: Path, crop: str) -> None:
    recipe = image_recipe(arrays, **{**IN_MEMORY, "crop": crop, "crop_pct": 0.8}, accumulate=2)
    whole = list(train_set_of(recipe).batches(1))
    assert len(whole) == 6
    assert whole[0][0].shape == (2, 3, 16, 16)
    for start in (1, 4):
        assert_same(list(train_set_of(recipe).batches(1, start)), whole[start:])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_step_sees_the_same_with_one_process_and_with_two(arrays: Path, in_memory: bool, accumulate: int) -> None:
    plain = {"accumulate": accumulate, "repeats": 2, "mixup": 0.0, "cutmix": 0.0}
    recipe = image_recipe(arrays, **plain, **(IN_MEMORY if in_memory else {"erase": 0.5}))
    alone = list(train_set_of(recipe).batches(2))
    first, second = (list(train_set_of(recipe, rank, 2).batches(2)) for rank in (0, 1))
    assert len(alone) == len(first) == len(second) == 3 * accumulate
    for step in range(3):
        part = slice(step * accumulate, (step + 1) * accumulate)
        for field in (0, 1):
            expected = torch.cat([batch[field] for batch in alone[part]])
            assert torch.equal(torch.cat([batch[field] for batch in first[part] + second[part]]), expected)


def test_nothing_else_that_is_random_notices(photos: Path, arrays: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for recipe in (image_recipe(photos), image_recipe(photos, workers=1), image_recipe(arrays, **IN_MEMORY)):
        list(train_set_of(recipe).batches(0))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_an_epoch_shows_every_image_once(folder: Path) -> None:
    train_set = train_set_of(image_recipe(folder, **UNCHANGED))
    first, second = samples_of(train_set.batches(0)), samples_of(train_set.batches(1))
    assert sorted(first) == sorted(second) == grey_samples()
    assert first != second


def test_images_come_in_the_order_of_the_seed(folder: Path) -> None:
    """PyTorch's permutation seeded by BLAKE2b of ``(5, 'order', 2)``, of files sorted by class."""
    files = sorted(grey_samples(), key=lambda sample: sample[1])
    digest = bytes.fromhex("34a068bda889d211")  # printf "(5, 'order', 2)" | b2sum -l 64
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    order = torch.randperm(12, generator=generator).tolist()
    recipe = image_recipe(folder, **UNCHANGED, seed=5)
    assert samples_of(train_set_of(recipe).batches(2)) == [files[index] for index in order]


def test_in_memory_draws_are_those_of_every_earlier_run(tmp_path: Path) -> None:
    """Crops, flips and erased boxes of the second batch of epoch 3, from PyTorch's generator seeded by hand."""
    ramp = (16 * np.arange(16)[:, None] + np.arange(16)).astype(np.uint8)  # pixel = 16 row + column
    path = write_npz(tmp_path / "ramp.npz", train_x=np.stack([ramp] * 8), train_y=np.zeros(8, int))
    recipe = image_recipe(path, **{**IN_MEMORY, "erase": 0.0}, seed=2, num_classes=3)
    images, _ = list(train_set_of(recipe).batches(3))[1]
    digest = bytes.fromhex("8c6d559ceae3840d")  # printf "(2, 'augment', 3, 1)" | b2sum -l 64
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    top, left, flip = torch.rand(3, 4, 1, generator=generator).squeeze(2).tolist()
    padded = np.pad(ramp, 2)  # an eighth of the side
    for index in range(4):
        row, column = int(top[index] * 5), int(left[index] * 5)
        crop = padded[row : row + 16, column : column + 16]
        expected = crop[:, ::-1] if flip[index] < 0.5 else crop
        got = (images[index, 0] * 127.5 + 127.5).round().int().numpy()
        assert (got == expected).all()


def test_each_position_of_each_epoch_has_its_own_augmentation(points: Path) -> None:
    """Flips: the first number of PyTorch's generator, seeded by BLAKE2b of ``(7, 'augment', epoch, position)``."""
    train_set = train_set_of(image_recipe(points, **{**UNCHANGED, "hflip": 0.5}, seed=7))
    flipped, expected = [], []
    for epoch in (0, 1, 2):
        for images, _ in train_set.batches(epoch):
            flipped += (images[:, 0, 8, 10] > 0).tolist()
        for position in range(8):
            key = f"(7, 'augment', {epoch}, {position})".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
            expected.append(torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() < 0.5)
    assert flipped == expected
    assert len({tuple(flipped[start : start + 8]) for start in (0, 8, 16)}) == 3


def test_evaluation_shares_partition_the_set(tmp_path: Path) -> None:
    recipe = image_recipe(write_npz(tmp_path / "ten.npz", test_x=grey_arrays(10), test_y=np.arange(10) % 3))
    shares = [eval_set_of(recipe, rank, 3) for rank in range(3)]
    assert [share.size for share in shares] == [10] * 3
    assert [samples_of(share.batches()) for share in shares] == [
        [(value, value % 3) for value in values] for values in ((0, 3, 6, 9), (1, 4, 7), (2, 5, 8))
    ]
    assert [len(labels) for _, labels in eval_set_of(replace(recipe, eval_batch_size=7)).batches()] == [7, 3]


# In memory


def test_in_memory_agrees_with_the_usual_way(arrays: Path) -> None:
    usual, quick = (train_set_of(image_recipe(arrays, **UNCHANGED, in_memory=in_memory)) for in_memory in (False, True))
    assert_same(list(usual.batches(0)), list(quick.batches(0)))


def test_in_memory_resizes_and_takes_colour_away(arrays: Path) -> None:
    """Bilinear, because Pillow clips what bicubic interpolation overshoots between rows and columns."""
    grey: dict[str, Any] = {"model_options": {"in_chans": 1}, "mean": (0.5,), "std": (0.5,), "image_size": 24}
    grey["interpolation"] = "bilinear"
    usual, quick = (
        train_set_of(image_recipe(arrays, **{**UNCHANGED, **grey, "in_memory": in_memory}))
        for in_memory in (False, True)
    )
    for (images, labels), (expected, expected_labels) in zip(quick.batches(0), usual.batches(0), strict=True):
        assert images.shape == (4, 1, 24, 24)
        assert torch.equal(labels, expected_labels)
        assert (images - expected).abs().max() <= 1 / 127.5 + 1e-6  # roundings of the last bit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": "random_resized"}, "in_memory cannot crop 'random_resized'"),
        ({"color_jitter": 0.4}, "in_memory does not support colour"),
        ({"auto_augment": "rand-m9"}, "in_memory does not support colour"),
    ],
)
def test_in_memory_refuses_what_it_cannot_do(arrays: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_set_of(image_recipe(arrays, **{**IN_MEMORY, **changes}))


def test_in_memory_is_for_arrays(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"in_memory is for arrays \(.npz files, .*\), not for .*folder"):
        train_set_of(image_recipe(folder, **IN_MEMORY))


# Settings


def test_batches_that_cannot_be_divided(folder: Path) -> None:
    with pytest.raises(ValueError, match="batch_size 4 cannot be shared by 3 processes × accumulate 1; use 6 or more"):
        train_set_of(image_recipe(folder), 0, 3)
    with pytest.raises(ValueError, match="batch_size is 16, but there are only 12 images to train on"):
        train_set_of(image_recipe(folder, batch_size=16))


def test_evaluation_takes_the_names_of_the_model_or_of_the_data(folder: Path) -> None:
    preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic", ("0", "1", "2"))
    images = EvalImages(str(folder), "val")
    with pytest.raises(ValueError, match="lacks class '0', which the model has"):
        images.open(preprocessing, named=True)
    source = images.open(preprocessing, named=False)
    assert build_eval_set(source, preprocessing, batch_size=4, workers=0).classes == IMAGE_CLASSES
    two = replace(preprocessing, classes=("0", "1"))
    with pytest.raises(ValueError, match=r"num_classes is 2, but .* has 3 classes"):
        images.open(two, named=False)
    with pytest.raises(ValueError, match="batch_size is 0; it must be an integer of at least 1"):
        build_eval_set(source, preprocessing, batch_size=0, workers=0)
    with pytest.raises(ValueError, match="workers is -1; it must be an integer of at least 0"):
        build_eval_set(source, preprocessing, batch_size=1, workers=-1)


# Examples for pictures


class _Recorded:
    """``count`` images by index, which are of that grey value; remembers what was read."""

    classes = IMAGE_CLASSES
    names = ()

    def __init__(self, count: int, unreadable: Sequence[int] = ()) -> None:
        self._count, self._unreadable = count, unreadable
        self.read_indices: list[int] = []

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[Image.Image, int]:
        self.read_indices.append(index)
        if index in self._unreadable:
            raise ImageError(f"image {index} cannot be read")
        return Image.new("RGB", (16, 16), (index, index, index)), index % 3


def _recorded_eval_set(source: _Recorded, *process: int, skip_bad_images: bool = False) -> IndexedEvalSet:
    preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic", IMAGE_CLASSES)
    return IndexedEvalSet(source, preprocessing, 4, 0, skip_bad_images, Process(*process))


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [
        (5, 2, [0, 2]),
        (44, 10, [0, 4, 8, 13, 17, 22, 26, 30, 35, 39]),
        (40, 40, range(40)),
        (7, 40, range(7)),
    ],
)
def test_examples_read_no_more_than_they_need(size: int, count: int, expected: Sequence[int]) -> None:
    source = _Recorded(size)
    samples = samples_of([_recorded_eval_set(source).examples(count)])
    assert source.read_indices == list(expected)
    assert samples == [(index, index % 3) for index in expected]


def test_examples_are_of_the_whole_set_in_each_process() -> None:
    source = _Recorded(12)
    assert samples_of([_recorded_eval_set(source, 1, 3).examples(4)]) == [(0, 0), (3, 0), (6, 0), (9, 0)]


def test_examples_leave_out_bad_images_if_asked() -> None:
    with pytest.raises(ImageError, match="image 3 cannot be read"):
        _recorded_eval_set(_Recorded(12, unreadable=[3])).examples(4)
    eval_set = _recorded_eval_set(_Recorded(12, unreadable=[3]), skip_bad_images=True)
    assert samples_of([eval_set.examples(4)]) == [(0, 0), (6, 0), (9, 0)]


# Bad images


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_stop_a_run_and_are_named(folder: Path, workers: int) -> None:
    for split in ("train", "val"):
        (folder / split / "dog" / "01.png").write_bytes(grey_png(1)[:60])
    with pytest.raises(ImageError, match=r"^\S*train/dog/01.png cannot be read as an image: [^\n]*$"):
        list(train_set_of(image_recipe(folder, workers=workers)).batches(0))
    with pytest.raises(ImageError, match=r"^\S*val/dog/01.png cannot be read as an image: [^\n]*$"):
        list(eval_set_of(image_recipe(folder, workers=workers)).batches())


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_if_asked(folder: Path, workers: int) -> None:
    for split in ("train", "val"):
        (folder / split / "dog" / "01.png").write_bytes(b"")
        (folder / split / "dog" / "04.png").unlink()
        (folder / split / "dog" / "04.png").symlink_to("nowhere")
    recipe = image_recipe(folder, workers=workers, skip_bad_images=True, **UNCHANGED)
    train_set = train_set_of(recipe)
    samples = samples_of(train_set.batches(0))
    files = sorted(grey_samples(), key=lambda sample: sample[1])
    order = [files[index] for index in epoch_order(12, 0, 0, 4)]
    bad = {(1, 1), (4, 1)}
    for position, sample in enumerate(samples):
        following = order[position:] + order[:position]
        assert sample == next(other for other in following if other not in bad)
    assert train_set.skipped == {"dog/01.png", "dog/04.png"}
    assert samples_of(train_set.batches(0, 1)) == samples[4:]
    evaluation = eval_set_of(recipe)
    assert sorted(samples_of(evaluation.batches())) == [sample for sample in grey_samples(6) if sample not in bad]
    assert (evaluation.size, evaluation.skipped) == (6, ["dog/01.png", "dog/04.png"])
    list(evaluation.batches())
    assert len(evaluation.skipped) == 2, "of the last evaluation, not of all"


def test_no_readable_image_at_all(folder: Path) -> None:
    for path in folder.glob("*/*/*.png"):
        path.write_bytes(b"")
    recipe = image_recipe(folder, skip_bad_images=True)
    with pytest.raises(ValueError, match=r"none of the images of .* can be read"):
        list(train_set_of(recipe).batches(0))
    evaluation = eval_set_of(recipe)
    assert (list(evaluation.batches()), len(evaluation.skipped)) == ([], 6)


def test_images_without_names_are_called_by_number() -> None:
    eval_set = _recorded_eval_set(_Recorded(5, unreadable=[3]), skip_bad_images=True)
    assert sum(len(labels) for _, labels in eval_set.batches()) == 4
    assert eval_set.skipped == ["image 3"]
