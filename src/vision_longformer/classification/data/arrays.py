"""Data sets that are arrays: ``.npz`` files, the built-in one among them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from PIL import Image

from .splits import check_undivided, split_names

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
                f"they should be {len(images)} whole numbers, one for each image"
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

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])


def fashion_mnist(split: str) -> ArraySource:
    """The built-in subset: 6,000 training and 1,000 test images of 28×28."""
    with as_file(files("vision_longformer.data") / "fashion_mnist_7k.npz") as path:
        return npz_source(path, split, FASHION_MNIST_CLASSES)


def npz_source(path: Path, split: str, classes: Sequence[str] | None = None) -> ArraySource:
    """Arrays ``<split>_x`` and ``<split>_y``, or ``x`` and ``y``; ``classes`` serve if the file names none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            prefix = _prefix(path, split, arrays.files)
            images, labels = arrays[f"{prefix}x"], arrays[f"{prefix}y"]
            if "classes" in arrays.files:
                classes = tuple(map(str, arrays["classes"]))
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a whole .npz file ({error})") from error
    return ArraySource(images, labels, classes, f"{path} ({split})")


def _prefix(path: Path, split: str, keys: Sequence[str]) -> str:
    """What precedes x and y in the names of the split's arrays."""
    for prefix in (*(f"{name}_" for name in split_names(split)), ""):
        if f"{prefix}x" in keys and f"{prefix}y" in keys:
            if not prefix:
                check_undivided(str(path), split)
            return prefix
    raise ValueError(f"{path} has no arrays {split}_x and {split}_y, only {', '.join(keys) or 'nothing'}")
