"""Labelled images with random access: arrays, folders, archives, and the data sets of other libraries.

:func:`open_source` opens any of them by the text that a recipe or a command calls it by.
"""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image
from timm.utils.misc import natural_key

from .images import IMAGE_EXTENSIONS, decode_image, list_images
from .loading import DataError

TRAINING = ("train", "training")
EVALUATION = ("validation", "val", "valid", "eval", "test")
"""Names by which data sets call the same split."""


def split_names(split: str) -> tuple[str, ...]:
    """Names that a split may have in the data, the one asked for first."""
    for group in (TRAINING, EVALUATION):
        if split in group:
            return (split, *(name for name in group if name != split))
    return (split,)


CLASS_FOLDERS = "give the folder that holds a folder of images for each class"
"""What data should be."""


class NoSplitError(ValueError):
    """Data without the split that was asked for."""


def check_unsplit(data: str, split: str) -> None:
    """Refuse data without splits for anything but training: a run would be evaluated on what it has learned."""
    if split not in TRAINING:
        raise NoSplitError(f"{data} has no split {split!r}; use split 'train' for all of it")


Labels = Sequence[int] | np.ndarray
"""Of images, the numbers of their classes."""


class Source(Protocol):
    """Labelled images by index.

    - ``names``: of the images, unique and lasting, and ``labels``: the numbers of their classes; both empty if they
      cannot be told without reading all images.
    - ``ignored``: files beside them that are no images, by their extension.
    """

    classes: tuple[str, ...]

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def labels(self) -> Labels: ...

    @property
    def ignored(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """An RGB image and the number of its class; raises :class:`ImageError` if it cannot be read."""
        ...


def open_source(
    data: str, split: str, *, classes: Sequence[str] | None = None, num_classes: int | None = None
) -> Source:
    """The ``split`` of ``data``.

    Args:
        data: a folder, .npz, .tar or .zip file, hfds/NAME, torch/NAME:FOLDER, or the built-in fashion-mnist.
        split: which part of it.
        classes: those that the data must have, in order; they serve as names where it has none.
        num_classes: how many there are where the data does not name them; verified where it does.
    """
    source = _open(data, split, classes, num_classes)
    if num_classes not in (None, len(source.classes)):
        raise ValueError(f"num_classes is {num_classes}, but {data} has {len(source.classes)} classes")
    if classes is not None:
        check_classes(data, source.classes, classes)
    return source


def _open(data: str, split: str, classes: Sequence[str] | None, num_classes: int | None) -> Source:
    unnamed = classes or (num_classes and tuple(map(str, range(num_classes)))) or None
    if data == "fashion-mnist":
        return fashion_mnist(split)
    if data.startswith("hfds/"):
        return hugging_face_source(data, split, unnamed)
    if data.startswith("torch/"):
        return torchvision_source(data, split, unnamed)
    path = Path(data)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no data {data}; "
            "give a folder, a .npz, .tar or .zip file, wds/…, hfds/…, torch/… or the built-in fashion-mnist"
        )
    if path.suffix == ".npz":
        return npz_source(path, split, unnamed)
    archive = find_archive(path, split)
    return ArchiveSource(archive, split) if archive else FolderSource(path, split)


def check_classes(data: str, classes: Sequence[str], expected: Sequence[str]) -> None:
    """Refuse data unless its ``classes`` are the ``expected`` ones, those of the model, in the same order."""
    if tuple(classes) == tuple(expected):
        return
    for name in expected:
        if name not in classes:
            raise ValueError(f"{data} lacks class {name!r}, which the model has")
    for name in classes:
        if name not in expected:
            raise ValueError(f"{data} has class {name!r}, which the model lacks")
    raise ValueError(f"{data} has the model's classes in another order: {', '.join(classes[:5])}, …")


def subset(source: Source, names: Sequence[str], data: str) -> Source:
    """The images of a source that are called ``names``; ``data`` is what errors call the source."""
    numbers = {name: number for number, name in enumerate(source.names)}
    for name in names:
        if name not in numbers:
            raise ValueError(f"{data} no longer has the image {name}, which the run's split names")
    indices = [numbers[name] for name in names]
    if isinstance(source, ArraySource):
        return ArraySource(source.images[indices], source.labels[indices], source.classes, data)
    return SubsetSource(source, indices)


class SubsetSource:
    """The images of a source at some indices."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source, self._indices = source, indices
        self.classes, self.ignored = source.classes, source.ignored
        self.names = [source.names[index] for index in indices]
        self.labels = [source.labels[index] for index in indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return self._source.read(self._indices[index])


# Arrays: .npz files, the built-in one among them

FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


class ArraySource:
    """Images (N, H, W) or (N, H, W, 3), uint8, and labels (N,); ``name`` is what errors call them.

    Without names of classes these are the numbers up to the largest label.
    """

    ignored = ()

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Sequence[str] | None, name: str) -> None:
        if images.ndim == 4 and images.shape[3] == 1:
            images = images[..., 0]
        if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
            raise ValueError(
                f"the images of {name} are {images.dtype} of shape {images.shape}; "
                "they should be uint8 of shape (N, H, W) or (N, H, W, 3)"
            )
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise ValueError(
                f"the labels of {name} are {labels.dtype} of shape {labels.shape}; "
                f"they should be {len(images)} integers, one for each image"
            )
        if not len(images):
            raise ValueError(f"{name} holds no images")
        self.classes = tuple(map(str, range(int(labels.max()) + 1) if classes is None else classes))
        wrong = np.flatnonzero((labels < 0) | (labels >= len(self.classes)))
        if len(wrong):
            raise ValueError(
                f"label {labels[wrong[0]]} of image {wrong[0]} of {name} is out of range; "
                f"the {len(self.classes)} classes have the numbers 0 to {len(self.classes) - 1}"
            )
        self.images = images
        self.labels = labels.astype(np.int64)

    @property
    def names(self) -> Sequence[str]:
        return [str(index) for index in range(len(self.images))]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])


def fashion_mnist(split: str) -> ArraySource:
    """The built-in subset: 6,000 training and 1,000 test images of 28×28."""
    with as_file(files("vision_longformer") / "assets" / "fashion_mnist_7k.npz") as path:
        return npz_source(path, split, FASHION_MNIST_CLASSES)


def npz_source(path: Path, split: str, classes: Sequence[str] | None = None) -> ArraySource:
    """Arrays ``<split>_x`` and ``<split>_y``, or ``x`` and ``y``; ``classes`` serve if the file names none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            prefix = _prefix(path, split, arrays.files)
            images, labels = arrays[f"{prefix}x"], arrays[f"{prefix}y"]
            if "classes" in arrays.files:
                classes = tuple(map(str, arrays["classes"]))
    except NoSplitError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a valid .npz file ({error})") from error
    return ArraySource(images, labels, classes, f"{path} ({split})")


def _prefix(path: Path, split: str, keys: Sequence[str]) -> str:
    """What precedes x and y in the names of the split's arrays."""
    for prefix in (*(f"{name}_" for name in split_names(split)), ""):
        if f"{prefix}x" in keys and f"{prefix}y" in keys:
            if not prefix:
                check_unsplit(str(path), split)
            return prefix
    raise NoSplitError(f"{path} has no arrays {split}_x and {split}_y, only {', '.join(keys) or 'nothing'}")


# Folders


class FolderSource:
    """``<data>/<split>/<class>/*.jpg`` and so on, or ``<data>/<class>/*.jpg`` for training.

    Files are listed when they are first needed; often only the names of the classes are.
    """

    def __init__(self, data: Path, split: str) -> None:
        self.folder = _split_folder(data, split)
        names = (entry.name for entry in self.folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        self.classes = tuple(sorted(names, key=natural_key))
        if not self.classes:
            raise ValueError(f"{self.folder} has no class folders; images should be in {self.folder}/CLASS/")

    @cached_property
    def _files(self) -> tuple[list[tuple[str, int]], list[str]]:
        """Paths of images below the folder with their labels, and paths of what is ignored."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        images, others = list_images(self.folder)
        loose = [path for path in images if Path(path).parts[0] not in numbers]
        samples = [(path, numbers[Path(path).parts[0]]) for path in images if Path(path).parts[0] in numbers]
        with_images = {label for _, label in samples}
        for number, name in enumerate(self.classes):
            if number not in with_images:
                raise ValueError(
                    f"class {name!r} is empty: there are no images in {self.folder / name} "
                    f"({', '.join(IMAGE_EXTENSIONS)})"
                )
        return samples, [*others, *loose]

    @cached_property
    def names(self) -> Sequence[str]:
        return [path for path, _ in self._files[0]]

    @cached_property
    def labels(self) -> Sequence[int]:
        return [label for _, label in self._files[0]]

    @property
    def ignored(self) -> Sequence[str]:
        return self._files[1]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return decode_image(self.folder / self.names[index]), self.labels[index]


def _split_folder(data: Path, split: str) -> Path:
    if not data.is_dir():
        raise ValueError(f"{data} is neither a folder nor a .npz, .tar or .zip file")
    for name in split_names(split):
        if (data / name).is_dir():
            return data / name
    divided = [name for name in (*TRAINING, *EVALUATION) if (data / name).is_dir()]
    if divided:
        raise NoSplitError(f"{data} has no folder {split!r}, only {', '.join(divided)}")
    check_unsplit(str(data), split)
    return data


# Tar and zip files, read in any order without being unpacked


class Member(NamedTuple):
    """A file of an archive; ``offset`` and ``size`` of its bytes are known for tar files only."""

    path: str
    offset: int = 0
    size: int = 0

    @property
    def folders(self) -> list[str]:
        return self.path.split("/")[:-1]


def find_archive(data: Path, split: str) -> Path | None:
    """``data`` if it is an archive, or ``<data>/<split>.tar`` or ``.zip``."""
    if data.suffix in (".tar", ".zip"):
        return data
    named = (data / f"{name}{suffix}" for name in split_names(split) for suffix in (".tar", ".zip"))
    return next((path for path in named if path.is_file()), None)


class ArchiveSource:
    """Images whose class is the folder (or, in a tar file of tar files, the inner file) that they are in.

    An archive that holds ``<split>/<class>/…`` is divided; one that is itself named after a split is that split.
    """

    def __init__(self, archive: Path, split: str) -> None:
        self.archive = archive
        images, self.ignored = _archive_members(archive, archive.stat().st_mtime_ns)
        self._members = _split_members(archive, split, images)
        for member in self._members:
            if not member.folders:
                raise ValueError(f"{archive} has an image outside of class folders: {member.path}")
        self.classes = tuple(sorted({member.folders[-1] for member in self._members}, key=natural_key))
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.names = [member.path for member in self._members]
        self.labels = [numbers[member.folders[-1]] for member in self._members]

    def __len__(self) -> int:
        return len(self._members)

    def read(self, index: int) -> tuple[Image.Image, int]:
        member = self._members[index]
        return decode_image(self._bytes(member), f"{self.archive}/{member.path}"), self.labels[index]

    def _bytes(self, member: Member) -> bytes:
        if self.archive.suffix == ".zip":
            try:
                return _open_zip(self.archive, os.getpid()).read(member.path)
            except zipfile.BadZipFile:  # a wrong checksum: nothing that an image could be read from
                return b""
        with self.archive.open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)


def _split_members(archive: Path, split: str, members: tuple[Member, ...]) -> tuple[Member, ...]:
    if archive.stem in split_names(split):
        return members
    outer = {folder for member in members for folder in member.folders[:-1]}
    for name in split_names(split):
        if name in outer:
            return tuple(member for member in members if name in member.folders[:-1])
    divided = [name for name in (*TRAINING, *EVALUATION) if name in outer]
    if divided:
        raise NoSplitError(f"{archive} has no folder {split!r}, only {', '.join(divided)}")
    check_unsplit(str(archive), split)
    return members


@lru_cache(maxsize=4)
def _archive_members(archive: Path, modified: int) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """Its images in natural order, and paths of what else it holds.

    ``modified`` keeps an older version of the file out of the cache.
    """
    try:
        with archive.open("rb") as file:
            members = list(_zip_members(file) if archive.suffix == ".zip" else _tar_members(file))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{archive} is not a valid {archive.suffix} file ({error})") from error
    members.sort(key=lambda member: natural_key(member.path))
    shown = [member for member in members if not member.path.endswith("/") and not _is_hidden(member.path)]
    images = tuple(member for member in shown if member.path.lower().endswith(IMAGE_EXTENSIONS))
    if not images:
        raise ValueError(f"{archive} holds no images ({', '.join(IMAGE_EXTENSIONS)})")
    return images, tuple(member.path for member in shown if not member.path.lower().endswith(IMAGE_EXTENSIONS))


def _is_hidden(path: str) -> bool:
    """As .DS_Store, or the __MACOSX folder that macOS adds to archives."""
    return path.rpartition("/")[2].startswith(".") or path.startswith("__MACOSX/")


def _zip_members(file: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        yield from map(Member, archive.namelist())


def _tar_members(file: IO[bytes], folder: str = "", start: int = 0) -> Iterator[Member]:
    """Files of a tar file that begins ``start`` bytes into the archive, and of tar files in it."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for info in archive:
            inner = archive.extractfile(info) if info.isfile() else None
            if inner is None:
                continue
            path, offset = folder + info.name, start + info.offset_data
            if path.endswith(".tar"):
                yield from _tar_members(inner, f"{path.removesuffix('.tar')}/", offset)
            else:
                yield Member(path, offset, info.size)


@lru_cache(maxsize=4)
def _open_zip(archive: Path, process: int) -> zipfile.ZipFile:
    """The open file of a process: worker processes that shared one would move each other's position."""
    return zipfile.ZipFile(archive)


# Data sets of other libraries


class ReaderSource:
    """A sequence of (image, label), where an image is an open file or Pillow's."""

    names: Sequence[str] = ()
    labels: Sequence[int] = ()
    ignored: Sequence[str] = ()

    def __init__(self, items: Any, classes: Sequence[str] | None, name: str) -> None:
        if classes is None:
            raise ValueError(f"{name} does not name its classes; say how many there are with num_classes")
        self.classes = tuple(classes)
        self._items = items
        self._name = name

    def __len__(self) -> int:
        return len(self._items)

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, label = self._items[index]
        if not 0 <= label < len(self.classes):
            raise DataError(
                f"label {label} of image {index} of {self._name} is out of range; "
                f"the {len(self.classes)} classes have the numbers 0 to {len(self.classes) - 1}"
            )
        if isinstance(image, Image.Image):
            return image.convert("RGB"), int(label)
        with image:
            return decode_image(image, f"image {index} of {self._name}"), int(label)


def hugging_face_source(data: str, split: str, classes: Sequence[str] | None) -> Source:
    """``hfds/NAME``, fetched or from its library's cache."""
    if find_spec("datasets") is None:
        raise ValueError(f"{data} needs Hugging Face's library; install it with: pip install datasets")
    from timm.data.readers.reader_hfds import ReaderHfds

    reader = ReaderHfds(data.partition("/")[2], split=split)
    numbers = reader.class_to_idx
    return ReaderSource(reader, sorted(numbers, key=lambda name: numbers[name]) or classes, f"{data} ({split})")


def torchvision_source(data: str, split: str, classes: Sequence[str] | None) -> Source:
    """``torch/NAME:FOLDER``, such as ``torch/cifar10:/data``; the folder as torchvision fills it."""
    from timm.data import create_dataset

    name, _, folder = data.partition(":")
    if not folder:
        raise ValueError(f"{data} does not say where it is; write {data}:FOLDER")
    try:
        dataset: Any = create_dataset(name, root=folder, split="train" if split in TRAINING else "validation")
    except AssertionError as error:
        raise ValueError(f"{name} is not a data set that timm knows ({error})") from error
    except RuntimeError as error:
        raise FileNotFoundError(f"{name} is not in {folder}; download it there with torchvision first") from error
    named = getattr(dataset, "classes", None)
    names = classes if named is None else [_class_name(value) for value in named]
    if hasattr(dataset, "data") and hasattr(dataset, "targets"):
        return ArraySource(np.asarray(dataset.data), np.asarray(dataset.targets), names, f"{name} ({split})")
    return ReaderSource(dataset, names, f"{name} ({split})")


def _class_name(value: str | Sequence[str]) -> str:
    """Some data sets have several words for a class."""
    return value if isinstance(value, str) else ", ".join(value)
