"""Tar and zip files with a folder for each class, read in any order without being unpacked."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

from PIL import Image
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key

from ..images import decode_image
from .splits import EVALUATION, TRAINING, check_undivided, split_names


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
        self._members = _split_members(archive, split, _image_members(archive, archive.stat().st_mtime_ns))
        for member in self._members:
            if not member.folders:
                raise ValueError(f"{archive} has an image outside of class folders: {member.path}")
        self.classes = tuple(sorted({member.folders[-1] for member in self._members}, key=natural_key))
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self._members)

    def read(self, index: int) -> tuple[Image.Image, int]:
        member = self._members[index]
        return decode_image(self._bytes(member), f"{self.archive}/{member.path}"), self._numbers[member.folders[-1]]

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
        raise ValueError(f"{archive} has no folder {split!r}, only {', '.join(divided)}")
    check_undivided(str(archive), split)
    return members


@lru_cache(maxsize=4)
def _image_members(archive: Path, modified: int) -> tuple[Member, ...]:
    """Its images in natural order; ``modified`` tells versions of the file apart in the cache."""
    try:
        with archive.open("rb") as file:
            members = list(_zip_members(file) if archive.suffix == ".zip" else _tar_members(file))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{archive} is not a whole {archive.suffix} file ({error})") from error
    types = get_img_extensions(as_set=True)
    images = [member for member in members if os.path.splitext(member.path)[1].lower() in types]
    if not images:
        raise ValueError(f"{archive} holds no images")
    return tuple(sorted(images, key=lambda member: natural_key(member.path)))


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
