"""WebDataset shards: tar files in which the image and the label of a sample lie beside each other, read as streams."""

from __future__ import annotations

import glob
import json
import operator
import os
import random
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from .images import IMAGE_EXTENSIONS
from .loading import DataError
from .sources import check_unsplit, split_names

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
"""Such as ``{000..099}``."""


class ShardSource:
    """The shards of a split of ``wds/PATTERN``; they name no classes, which are ``classes`` or else numbers.

    A pattern may hold ranges, as ``train-{000..099}.tar``, ``*`` and ``{split}``; a folder holds ``<split>-*.tar`` or
    ``<split>/*.tar``.
    """

    def __init__(
        self, data: str, split: str, *, classes: Sequence[str] | None = None, num_classes: int | None = None
    ) -> None:
        if classes is None:
            if num_classes is None:
                raise ValueError(f"{data} is streamed; set num_classes to the number of classes")
            classes = [str(number) for number in range(num_classes)]
        self.data = data
        self.classes = tuple(classes)
        self.paths = _find_shards(data, split)

    def samples(self, paths: Iterable[str]) -> Iterator[Sample]:
        """Samples of some of the shards, in order."""
        for path in paths:
            yield from _shard_samples(path, len(self.classes))

    def count_samples(self) -> int:
        """How many samples there are in all shards; reads no more than the names of their files."""
        return sum(map(_count_samples, self.paths))


class Sample(NamedTuple):
    """An image, not decoded yet, and its label; ``name`` says which shard and sample."""

    name: str
    image: bytes
    label: int


def _find_shards(data: str, split: str) -> list[str]:
    pattern = data.removeprefix("wds/")
    if Path(pattern).is_dir():
        patterns = [f"{pattern}/{name}{rest}" for name in split_names(split) for rest in ("-*.tar", "/*.tar")]
    elif "{split}" in pattern:
        patterns = [pattern.replace("{split}", name) for name in split_names(split)]
    else:
        check_unsplit(data, split)
        patterns = [pattern]
    for candidate in patterns:
        shards = [path for name in _ranges(candidate) for path in (sorted(glob.glob(name)) or [name])]
        missing = [path for path in shards if not os.path.isfile(path)]
        if not missing:
            return shards
        if len(missing) < len(shards):
            raise FileNotFoundError(f"there is no shard {missing[0]}, which {data} names")
    raise FileNotFoundError(f"there are no shards like {patterns[0]}")


def _ranges(pattern: str) -> list[str]:
    """The pattern with its first ``{000..099}``, and so all of them, written out."""
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for number in numbers for name in _ranges(pattern[: match.start()] + number + pattern[match.end() :])]


def _shard_samples(shard: str, num_classes: int) -> Iterator[Sample]:
    for key, files in groupby(_files(shard), key=lambda file: file[0]):
        parts = {suffix: content for _, suffix, content in files}
        name = f"{shard}/{key}"
        image = next((content for suffix, content in parts.items() if f".{suffix}".endswith(IMAGE_EXTENSIONS)), None)
        if image is None:
            raise DataError(f"{name} has no image, only {', '.join(parts)}")
        yield Sample(name, image, _label(name, parts, num_classes))


def _count_samples(shard: str) -> int:
    with _refusing_damage(shard), tarfile.open(shard) as archive:
        return len({_key(info.name)[0] for info in archive if info.isfile()})


def shuffled(samples: Iterable[Sample], generator: random.Random, buffer_size: int) -> Iterator[Sample]:
    """The samples in another order: each waits in a buffer until a later one draws its slot."""
    buffer: list[Sample] = []
    for sample in samples:
        if len(buffer) < buffer_size:
            buffer.append(sample)
            continue
        slot = generator.randrange(buffer_size)
        yield buffer[slot]
        buffer[slot] = sample
    generator.shuffle(buffer)
    yield from buffer


def _files(shard: str) -> Iterator[tuple[str, str, bytes]]:
    """Key, suffix and content of each file of a tar file."""
    with _refusing_damage(shard), tarfile.open(shard, "r|") as archive:
        for info in archive:
            file = archive.extractfile(info) if info.isfile() else None
            if file is not None:
                yield *_key(info.name), file.read()


@contextmanager
def _refusing_damage(shard: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"shard {shard} is not a valid tar file ({error})") from error


def _key(path: str) -> tuple[str, str]:
    """``folder/0001.seg.PNG`` is of sample ``folder/0001`` and has the suffix ``seg.png``."""
    folder, slash, name = path.rpartition("/")
    stem, _, suffix = name.partition(".")
    return folder + slash + stem, suffix.lower()


def _label(name: str, parts: dict[str, bytes], num_classes: int) -> int:
    if "cls" not in parts and "json" not in parts:
        raise DataError(f"{name} has no label, only {', '.join(parts)}; there should be a .cls or .json file")
    try:
        label: Any = json.loads(parts["cls"] if "cls" in parts else parts["json"])
        if isinstance(label, dict):
            label = label["label"] if "label" in label else label["cls"]
        label = operator.index(label)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the label of {name} is not an integer ({error})") from error
    if not 0 <= label < num_classes:
        raise DataError(
            f"label {label} of {name} is out of range; the {num_classes} classes are 0 to {num_classes - 1}"
        )
    return label
