"""Data sets of other libraries: Hugging Face's and torchvision's, through timm."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from ..images import decode_image
from .arrays import ArraySource
from .contract import DataError
from .source import Source
from .splits import TRAINING


class ReaderSource:
    """A sequence of (image, label), where an image is a file or a picture of Pillow."""

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
