"""Data sets with random access: one protocol, and what is behind a recipe's ``data``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from PIL import Image

from ..recipe import ClassificationRecipe


class Source(Protocol):
    """Labelled images by number."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """An RGB image and the number of its class; raises :class:`ImageError` if there is no reading it."""
        ...


def open_source(recipe: ClassificationRecipe, split: str, classes: Sequence[str] | None = None) -> Source:
    """The recipe's data; ``classes`` are those that it must have, if they are known already."""
    source = _open(recipe.data, split, classes, recipe.num_classes)
    if recipe.num_classes not in (None, len(source.classes)):
        raise ValueError(f"num_classes is {recipe.num_classes}, but {recipe.data} has {len(source.classes)} classes")
    if classes is not None:
        check_classes(recipe.data, source.classes, classes)
    return source


def _open(data: str, split: str, classes: Sequence[str] | None, num_classes: int | None) -> Source:
    from .archives import ArchiveSource, find_archive
    from .arrays import fashion_mnist, npz_source
    from .folder import FolderSource
    from .libraries import hugging_face_source, torchvision_source

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


def check_classes(data: str, found: Sequence[str], expected: Sequence[str]) -> None:
    """Refuse data whose classes are others, or other in order, than those that the model has learned."""
    if tuple(found) == tuple(expected):
        return
    for name in expected:
        if name not in found:
            raise ValueError(f"{data} lacks class {name!r}, which the model has")
    for name in found:
        if name not in expected:
            raise ValueError(f"{data} has class {name!r}, which the model lacks")
    raise ValueError(f"{data} has the model's classes in another order: {', '.join(found[:5])}, …")
