"""Shards: which files a pattern names, what is read from them, and the order of a shuffled stream."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from builders import IMAGE_CLASSES, grey_png, write_shards, write_tar

from vision_longformer.data.loading import DataError
from vision_longformer.data.shards import Sample, ShardSource, shuffled


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards")


def test_samples(shards: Path) -> None:
    source = ShardSource(f"wds/{shards}", "validation", num_classes=3)
    assert source.classes == ("0", "1", "2")
    assert source.count_samples() == 7
    samples = list(source.samples(source.paths))
    assert [sample.label for sample in samples] == [0, 1, 2, 0, 1, 2, 0]
    assert [sample.image for sample in samples] == [grey_png(value) for value in range(7)]
    assert samples[5].name == f"{shards}/val-1.tar/./005"
    assert [sample.label for sample in source.samples(source.paths[1:])] == [2, 0]


@pytest.mark.parametrize(
    "pattern", ["", "/train-{000..005}.tar", "/train-*.tar", "/{split}-{000..005}.tar", "/train-00{0..5}.tar"]
)
def test_patterns(shards: Path, pattern: str) -> None:
    source = ShardSource(f"wds/{shards}{pattern}", "train", classes=IMAGE_CLASSES)
    assert source.paths == [f"{shards}/train-{number:03}.tar" for number in range(6)]
    assert source.classes == IMAGE_CLASSES
    assert source.count_samples() == 48


def test_folders_of_splits(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "divided").mkdir()
    shards.rename(tmp_path / "divided" / "val")
    paths = ShardSource(f"wds/{tmp_path}/divided", "validation", num_classes=3).paths
    assert [Path(path).name for path in paths] == [*(f"train-{n:03}.tar" for n in range(6)), "val-0.tar", "val-1.tar"]


def test_bad_settings(shards: Path) -> None:
    with pytest.raises(ValueError, match="is streamed; set num_classes to the number of classes"):
        ShardSource(f"wds/{shards}", "train")
    with pytest.raises(FileNotFoundError, match=r"there is no shard .*train-006.tar"):
        ShardSource(f"wds/{shards}/train-{{000..009}}.tar", "train", num_classes=3)
    with pytest.raises(FileNotFoundError, match=r"there are no shards like .*other-"):
        ShardSource(f"wds/{shards}/other-{{000..009}}.tar", "train", num_classes=3)
    with pytest.raises(ValueError, match="use split 'train'"):
        ShardSource(f"wds/{shards}/train-*.tar", "validation", num_classes=3)


def test_damaged_shards(shards: Path) -> None:
    path = shards / "val-0.tar"
    path.write_bytes(path.read_bytes()[:1700])
    source = ShardSource(f"wds/{shards}", "val", num_classes=3)
    with pytest.raises(DataError, match=r"shard .*val-0.tar is not a valid tar file"):
        list(source.samples(source.paths))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"", "a.txt": b""}, r"bad.tar/a has no label, only png, txt; there should be a .cls or .json file"),
        ({"a.cls": b"0"}, r"bad.tar/a has no image, only cls"),
        ({"a.png": b"", "a.cls": b"cat"}, r"the label of .*bad.tar/a is not an integer"),
        ({"a.png": b"", "a.json": b'{"name": "cat"}'}, r"the label of .*bad.tar/a is not an integer \('cls'\)"),
        ({"a.png": b"", "a.cls": b"3"}, r"label 3 of .*bad.tar/a is out of range; the 3 classes are 0 to 2"),
    ],
)
def test_bad_samples(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    write_tar(tmp_path / "bad.tar", files)
    source = ShardSource(f"wds/{tmp_path}/bad.tar", "train", num_classes=3)
    with pytest.raises(DataError, match=message):
        list(source.samples(source.paths))


def test_names_of_files_in_a_sample(tmp_path: Path) -> None:
    """The suffix begins at the first dot of the name; its last part says whether it is an image, however written."""
    files = {"a.b/1.left.PNG": grey_png(1), "a.b/1.json": b'{"cls": 2}', "a.b/2.jpeg": grey_png(2), "a.b/2.cls": b"1"}
    write_tar(tmp_path / "named.tar", files)
    source = ShardSource(f"wds/{tmp_path}/named.tar", "train", num_classes=3)
    samples = list(source.samples(source.paths))
    assert [(Path(sample.name).name, sample.label) for sample in samples] == [("1", 2), ("2", 1)]
    assert samples[0].image == grey_png(1)
    assert source.count_samples() == 2


class _Dice(random.Random):
    """Draws the numbers it is given, and leaves what is shuffled in reverse order."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = iter(numbers)

    def randrange(self, *limits: int) -> int:  # type: ignore[override]
        assert limits == (3,)
        return next(self._numbers)

    def shuffle(self, values: list[Sample]) -> None:  # type: ignore[override]
        values.reverse()


def test_a_stream_is_shuffled_through_a_buffer() -> None:
    """Buffer 0 1 2; slot 1 gives 1 and takes 3; slot 1 gives 3 and takes 4; slot 0 gives 0 and takes 5; then 5 4 2."""
    samples = [Sample(str(number), b"", number) for number in range(6)]
    order = [sample.label for sample in shuffled(samples, _Dice(1, 1, 0), 3)]
    assert order == [1, 3, 0, 2, 4, 5]


def test_a_short_stream_is_shuffled_whole() -> None:
    samples = [Sample(str(number), b"", number) for number in range(4)]
    assert [sample.label for sample in shuffled(samples, _Dice(), 5)] == [3, 2, 1, 0]
