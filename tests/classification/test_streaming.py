"""Training and evaluation on shards: every sample once, resumed to the bit, bad images and bad settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import grey_png, grey_samples, write_shards, write_tar
from classification_builders import UNCHANGED, assert_same, eval_set_of, image_recipe, samples_of, train_set_of

from vision_longformer.classification import streaming
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.data import shards as shards_module
from vision_longformer.data.images import ImageError


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards")


def _recipe(shards: Path, **changes: Any) -> ClassificationRecipe:
    return replace(image_recipe(f"wds/{shards}", num_classes=3, num_images=48), **changes)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_resume_bit_for_bit(shards: Path, workers: int) -> None:
    train_set = train_set_of(_recipe(shards, workers=workers, accumulate=2, color_jitter=0.4, auto_augment=None))
    whole = list(train_set.batches(1))
    assert len(whole) == train_set.batches_per_epoch == 24
    for start in (0, 1, 5, 23):
        assert_same(list(train_set.batches(1, start)), whole[start:])


def test_shards_of_two_processes_make_an_epoch(shards: Path) -> None:
    recipe = _recipe(shards, **UNCHANGED, workers=1)
    epochs = []
    for epoch in (0, 1):
        shares = [samples_of(train_set_of(recipe, rank, 2).batches(epoch)) for rank in (0, 1)]
        assert [len(share) for share in shares] == [24, 24]
        assert sorted(shares[0] + shares[1]) == grey_samples(48)
        epochs.append(shares[0])
    assert epochs[0] != epochs[1] != sorted(epochs[1])


def test_samples_of_different_shards_are_mixed(shards: Path) -> None:
    """The buffer is larger than an epoch here, so that a batch of 4 hardly ever is of one shard of 8."""
    values = [value for value, _ in samples_of(train_set_of(_recipe(shards, **UNCHANGED)).batches(0))]
    assert len({value // 8 for value in values[:8]}) >= 3


def test_every_epoch_has_its_own_order_of_shards(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 1)  # samples come as they are in the shards
    train_set = train_set_of(_recipe(shards, **UNCHANGED))
    orders = [[value // 8 for value, _ in samples_of(train_set.batches(epoch))][::8] for epoch in range(3)]
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3, 4, 5]] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_an_epoch_of_shards_may_be_longer_or_shorter(shards: Path) -> None:
    longer = samples_of(train_set_of(_recipe(shards, **UNCHANGED, num_images=96)).batches(0))
    assert sorted(longer[:48]) == sorted(longer[48:]) == grey_samples(48)
    assert len(samples_of(train_set_of(_recipe(shards, **UNCHANGED, num_images=11)).batches(0))) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_of_shards_counts_every_sample_once(shards: Path, workers: int) -> None:
    shares = [eval_set_of(_recipe(shards, workers=workers), rank, 2) for rank in (0, 1)]
    assert shares[0].size == 7
    assert shares[0].shape == (3, 16, 16)
    assert sorted(sample for share in shares for sample in samples_of(share.batches())) == grey_samples(7)


@pytest.mark.parametrize("pattern", ["train-{000..005}.tar", "train-*.tar", "{split}-{000..005}.tar"])
def test_patterns_of_shards(shards: Path, pattern: str) -> None:
    recipe = _recipe(shards, **UNCHANGED, data=f"wds/{shards}/{pattern}")
    assert sorted(samples_of(train_set_of(recipe).batches(0))) == grey_samples(48)


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
        list(train_set_of(_recipe(shards, **changes)).batches(0))


def test_damaged_shards(shards: Path) -> None:
    whole = (shards / "val-0.tar").read_bytes()
    (shards / "val-0.tar").write_bytes(whole[:1700])
    with pytest.raises(ValueError, match=r"^shard .*val-0.tar is not a valid tar file [^\n]*$"):
        list(eval_set_of(_recipe(shards, workers=1)).batches())


def test_no_samples_at_all(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", {})
    with pytest.raises(ValueError, match=r"there are no samples in .*train-0.tar"):
        list(train_set_of(_recipe(tmp_path)).batches(0))


def test_bad_images_of_shards(tmp_path: Path) -> None:
    files = {}
    for value in range(8):
        files |= {f"{value}.png": b"" if value in (2, 3) else grey_png(value), f"{value}.cls": str(value % 3).encode()}
    write_tar(tmp_path / "train-0.tar", files)
    recipe = _recipe(tmp_path, **UNCHANGED, num_images=8)
    with pytest.raises(ImageError, match=r"train-0.tar/[23] cannot be read as an image"):
        list(train_set_of(recipe).batches(0))
    train_set = train_set_of(replace(recipe, skip_bad_images=True))
    samples = samples_of(train_set.batches(0))
    assert {name.rpartition("/")[2] for name in train_set.skipped} == {"2", "3"}
    assert {value for value, _ in samples} == {0, 1, 4, 5, 6, 7}
    assert all(label == value % 3 for value, label in samples)
    assert samples_of(train_set.batches(0, 1)) == samples[4:]
    evaluation = eval_set_of(replace(recipe, skip_bad_images=True, eval_split="train"))
    assert [value for value, _ in samples_of(evaluation.batches())] == [0, 1, 4, 5, 6, 7]
    assert evaluation.skipped == [f"{tmp_path}/train-0.tar/{value}" for value in (2, 3)]
    for value in range(8):
        files[f"{value}.png"] = b""
    write_tar(tmp_path / "train-0.tar", files)
    with pytest.raises(ImageError, match=r"none of the 4 images from .*train-0.tar/\d on can be read"):
        list(train_set_of(replace(recipe, skip_bad_images=True)).batches(0))


@pytest.mark.parametrize(
    ("split", "count", "expected"),
    [
        ("train", 3, [0, 16, 32]),
        ("train", 6, [0, 8, 16, 24, 32, 40]),
        ("train", 10, [0, 1, 8, 9, 16, 17, 24, 25, 32, 33]),
        ("validation", 40, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_examples_are_the_first_of_shards_far_apart(
    shards: Path, split: str, count: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eval_set = eval_set_of(_recipe(shards, eval_split=split))
    read: list[str] = []
    shard_samples = shards_module._shard_samples

    def recorded(shard: str, num_classes: int) -> Any:
        for sample in shard_samples(shard, num_classes):
            read.append(sample.name)
            yield sample

    monkeypatch.setattr(shards_module, "_shard_samples", recorded)
    assert samples_of([eval_set.examples(count)]) == [(value, value % 3) for value in expected]
    assert len(read) <= count + 6
