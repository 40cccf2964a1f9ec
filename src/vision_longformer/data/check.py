"""What labelled images there are, and what is wrong with them: unreadable files, duplicates, missing classes."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from statistics import median
from typing import NamedTuple

from ..errors import first_line
from .images import IMAGE_EXTENSIONS, count_kinds
from .loading import UNREADABLE, BatchLoader, Progress
from .sources import CLASS_FOLDERS, EVALUATION, TRAINING, ArraySource, NoSplitError, Source, open_source

COMPARED = 64
"""Images of two arrays that tell whether they are the same."""


class Problem(NamedTuple):
    """What is wrong with an image, or with a split as a whole if ``image`` is empty."""

    split: str
    image: str
    what: str


class SplitReport(NamedTuple):
    """What a split holds.

    - ``classes``: images by class; ``formats``: by extension; ``ignored``: files that are not used, by kind.
    - ``sides``: least, median and most pixels of the shorter sides; None if no image could be read.
    """

    split: str
    images: int
    classes: dict[str, int]
    formats: dict[str, int]
    sides: tuple[int, float, int] | None
    ignored: dict[str, int]


class DataReport(NamedTuple):
    splits: list[SplitReport]
    problems: list[Problem]

    @property
    def imbalance(self) -> float:
        """How many times as many images the largest class has as the smallest, in the first split."""
        counts = self.splits[0].classes.values()
        return max(counts) / max(1, min(counts))


class Looked(NamedTuple):
    """An image that was looked at: its width, height and a digest of its pixels, or else an error."""

    size: tuple[int, int] | None
    digest: str
    error: str


def check_images(data: str, *, workers: int = 2, progress: Progress | None = None) -> DataReport:
    """Read every image of every split of ``data``, given as in recipes, shards excepted."""
    sources = dict(_open_splits(data))
    total, done = sum(map(len, sources.values())), 0
    reports, problems, seen = [], [], defaultdict(list)
    for split, source in sources.items():
        looked = []
        for one in BatchLoader(_Look(source), range(len(source)), workers):
            looked.append(one)
            done += 1
            if progress is not None:
                progress(done, total)
        reports.append(_split_report(split, source, looked))
        for name, label, one in zip(source.names, source.labels, looked, strict=True):
            if one.error:
                problems.append(Problem(split, name, one.error))
            else:
                seen[one.digest].append((split, name, source.classes[label]))
    return DataReport(reports, _misplaced(sources) + problems + _duplicates(seen.values()) + _missing_classes(reports))


def _open_splits(data: str) -> Iterator[tuple[str, Source]]:
    """Every split that there is, by name; undivided data is all "train"."""
    if data.startswith("wds/"):
        raise ValueError(f"{data} is streamed, and is not checked; give a folder, or a .npz, .tar or .zip file")
    opened = set()
    for names in (TRAINING, *((name,) for name in EVALUATION)):
        try:
            source = open_source(data, names[0])
        except NoSplitError:
            continue
        if not len(source.labels):
            raise ValueError(f"{data} does not list its labels, and is not checked; give a folder or a file")
        identity = _identity(source)
        if identity not in opened:
            opened.add(identity)
            yield names[0], source


def _identity(source: Source) -> object:
    """The same for a split under its several names, such as "val" and "validation"."""
    if isinstance(source, ArraySource):
        return len(source), source.images[:COMPARED].tobytes(), source.labels[:COMPARED].tobytes()
    return getattr(source, "archive", None), getattr(source, "folder", None), tuple(source.names)


class _Look:
    """Reads an image in a worker process."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __call__(self, index: int) -> Looked:
        try:
            image, _ = self._source.read(index)
        except UNREADABLE as error:
            text = first_line(error)
            return Looked(None, "", text[max(0, text.find("cannot be read")) :])
        return Looked(image.size, hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest(), "")


def _split_report(split: str, source: Source, looked: Sequence[Looked]) -> SplitReport:
    counts = Counter(map(int, source.labels))
    sides = [min(one.size) for one in looked if one.size is not None]
    return SplitReport(
        split,
        len(source),
        {name: counts[number] for number, name in enumerate(source.classes)},
        dict(Counter(PurePath(name).suffix.lower() or "array" for name in source.names).most_common()),
        (min(sides), median(sides), max(sides)) if sides else None,
        count_kinds(source.ignored),
    )


def _misplaced(sources: Mapping[str, Source]) -> list[Problem]:
    """What suggests that classes are not where they are looked for, or cannot be evaluated."""
    problems = []
    for split, source in sources.items():
        whats = [] if len(source.classes) > 1 else [f"has a single class, {source.classes[0]!r}; {CLASS_FOLDERS}"]
        if (loose := count_loose(source)) > len(source):
            whats.append(f"{loose} images lie outside of class folders, and {len(source)} in them; {CLASS_FOLDERS}")
        counts = Counter(map(int, source.labels))
        for number, name in enumerate(source.classes if len(sources) == 1 else ()):
            if counts[number] == 1:
                whats.append(f"class {name!r} has only one image, so none can be held out for evaluation")
        problems += [Problem(split, "", what) for what in whats]
    return problems


def count_loose(source: Source) -> int:
    """Images that are not used, because they lie outside of class folders."""
    return sum(name.lower().endswith(IMAGE_EXTENSIONS) for name in source.ignored)


Placed = tuple[str, str, str]
"""The split, name and class of an image."""


def _duplicates(groups: Iterable[list[Placed]]) -> list[Problem]:
    """Images with the same pixels in two splits or of two classes, or else twice in one."""
    problems = []
    for (split, name, label), *others in (group for group in groups if len(group) > 1):
        for other_split, other, other_label in others:
            where = f"{split}/{name}" if split != other_split else name
            what = f"duplicate of {where}"
            if label != other_label:
                what += f", which is of class {label}"
            elif split != other_split:
                what += ": evaluation would count an image that was trained on"
            problems.append(Problem(other_split, other, what))
    return problems


def _missing_classes(reports: Sequence[SplitReport]) -> list[Problem]:
    first, *others = reports
    problems = []
    for other in others:
        for name in first.classes.keys() ^ other.classes.keys():
            lacking, having = (other, first) if name in first.classes else (first, other)
            problems.append(Problem(lacking.split, "", f"class {name!r} is missing; {having.split} has it"))
    return sorted(problems)
