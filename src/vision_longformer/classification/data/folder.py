"""A folder with a folder for each class."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from PIL import Image
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key

from ..images import decode_image
from .splits import EVALUATION, TRAINING, check_undivided, split_names


class FolderSource:
    """``<data>/<split>/<class>/*.jpg`` and so on, or ``<data>/<class>/*.jpg`` for training.

    Files are not looked for until they are needed, for the names of the classes are often all that is.
    """

    def __init__(self, data: Path, split: str) -> None:
        self.folder = _split_folder(data, split)
        names = (entry.name for entry in self.folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        self.classes = tuple(sorted(names, key=natural_key))
        if not self.classes:
            raise ValueError(f"{self.folder} has no class folders; images should be in {self.folder}/CLASS/")

    @cached_property
    def samples(self) -> list[tuple[str, int]]:
        """Paths and labels."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        try:
            samples = list(ReaderImageFolder(str(self.folder), class_map=numbers).samples)
        except RuntimeError:  # timm's for no images at all
            samples = []
        found = {label for _, label in samples}
        for number, name in enumerate(self.classes):
            if number not in found:
                raise ValueError(f"class {name!r} is empty: there are no images in {self.folder / name}")
        return samples

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return decode_image(path), label


def _split_folder(data: Path, split: str) -> Path:
    if not data.is_dir():
        raise ValueError(f"{data} is neither a folder nor a .npz, .tar or .zip file")
    for name in split_names(split):
        if (data / name).is_dir():
            return data / name
    divided = [name for name in (*TRAINING, *EVALUATION) if (data / name).is_dir()]
    if divided:
        raise FileNotFoundError(f"{data} has no folder {split!r}, only {', '.join(divided)}")
    check_undivided(str(data), split)
    return data
