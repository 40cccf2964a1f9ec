"""Images of which rows are read when they are needed: arrays, TIFF, zarr and NumPy files, and photos decoded whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from ..data.images import ImageError, decode_image
from ..errors import check_at_least, first_line
from ..geometry import ceil_div

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of TIFF and BigTIFF files, whatever they are called: OME-TIFF, SVS, NDPI and others are TIFF, too."""

TIFF_LAYOUTS = ("YX", "YXS", "SYX", "CYX")
"""Axes of one image, axes of length 1 left out: rows, columns, and channels as samples of a pixel or as planes."""

COLOURS = (1, 2)
"""TIFF's photometric interpretations whose numbers are brightnesses: grey and RGB."""

YCBCR, JPEG = 6, (6, 7)
"""A further interpretation, and the compressions whose decoder turns it into RGB."""

BITS = (8, 16)
"""Of a number in a TIFF: others are integers whose white is not known, or floating-point numbers."""

WITHOUT_WHITE = "save it as uint8 or uint16, or pass a normalised array to vision_longformer.large.stream"
"""What to do with a file of other numbers."""

ORIENTATION = 274
"""The tag of a TIFF that says how it is to be turned: 1 not at all, 2 to 8 somehow."""

KEPT_BYTES = 512 * 2**20
"""A row of a zarr array's chunks that takes no more is kept until rows of another one are read."""

ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
"""One of these is in every zarr folder."""


class RowsError(ImageError):
    """Rows of an image that cannot be read, named with their file."""


class LargeImage:
    """An image (height, width, channels) that is sliced by rows, of which only these are read.

    Grey images have their channel repeated for models of three. ``file``: what errors name, and what must stay as it
    is while it is read.
    """

    def __init__(self, rows: Any, channels: int, file: Path | None = None) -> None:
        self._rows, self.file = rows, file
        self._stamped = file and file / getattr(rows, "path", "")  # of a zarr group, one array
        self._stamp = _stamp(self._stamped)
        self._name = "the image" if file is None else str(file)
        shape = tuple(rows.shape)
        if len(shape) not in (2, 3):
            raise ValueError(
                f"{self._name} is of shape {shape}; it must be (height, width) or (height, width, channels)"
            )
        given = shape[2] if len(shape) == 3 else 1
        if given not in (1, channels):
            raise ValueError(f"{self._name} is of shape {shape}, with {given} channels; the model takes {channels}")
        dtype = np.dtype(getattr(rows, "dtype", np.uint8)).newbyteorder("=")  # if it does not say, its rows will
        if dtype.kind != "f" and dtype not in (np.uint8, np.uint16):
            raise ValueError(f"{self._name} is of {dtype}; give uint8, uint16 or floating-point numbers")
        self.shape = *shape[:2], channels
        self._chunk_height = 0 if file is None else _chunk_height(rows)
        self._chunk_row: tuple[int, np.ndarray] | None = None

    @property
    def identity(self) -> str:
        """The file with its size and time, so that a run is not resumed with another one; empty for an array."""
        return "" if self.file is None else f"{self.file.resolve()} {self._stamp}"

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Some rows, (n, width, channels)."""
        first, last, _ = rows.indices(self.shape[0])
        if not self._chunk_height:
            return self._read(first, last)
        tops = range(first - first % self._chunk_height, last, self._chunk_height)
        parts = [self._read_chunk_row(top)[max(first - top, 0) : last - top].copy() for top in tops]
        if last == self.shape[0]:
            self._chunk_row = None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_chunk_row(self, top: int) -> np.ndarray:
        """The rows of a row of chunks; those that were read last are in memory."""
        if self._chunk_row is None or self._chunk_row[0] != top:
            self._chunk_row = None
            self._chunk_row = top, self._read(top, min(top + self._chunk_height, self.shape[0]))
        return self._chunk_row[1]

    def _read(self, first: int, last: int) -> np.ndarray:
        where = f"{self._name} at rows {first} to {last - 1}"
        try:
            part = np.asarray(self._rows[first:last])
        except (MemoryError, RowsError):
            raise
        except Exception as error:  # decoders of damaged files raise nearly anything
            self._check_unchanged(where)
            raise RowsError(f"{where} cannot be read: {first_line(error)}") from error
        self._check_unchanged(where)
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise RowsError(f"{where} has values that are NaN or infinite; replace them, by 0 for instance")
        part = part.astype(part.dtype.newbyteorder("="), copy=False).reshape(*part.shape[:2], -1)
        return np.broadcast_to(part, (len(part), *self.shape[1:]))

    def _check_unchanged(self, where: str) -> None:
        if _stamp(self._stamped) != self._stamp:
            raise RowsError(
                f"{where} cannot be read: the file has changed since it was opened; start again when it is complete"
            )


def _chunk_height(rows: Any) -> int:
    """Rows of a zarr array's chunks, if a row of chunks may be kept; otherwise, and for other files, 0."""
    height = min(getattr(rows, "chunks", (0,))[0], rows.shape[0])
    return height if height * prod(rows.shape[1:]) * rows.dtype.itemsize <= KEPT_BYTES else 0


def _stamp(file: Path | None) -> tuple[int, int] | None:
    """Size and time of a file; of a folder, the number of its files and the newest time. What is gone has none."""
    if file is None or not file.exists():
        return None
    if file.is_dir():
        try:
            times = [
                os.stat(os.path.join(parent, name)).st_mtime_ns for parent, _, names in os.walk(file) for name in names
            ]
        except FileNotFoundError:  # deleted meanwhile
            return None
        return len(times), max(times, default=0)
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def open_image(source: Any, channels: int = 3, *, level: int = 0, allow_large: bool = False) -> LargeImage:
    """An image for a model of so many ``channels``, read by rows.

    Args:
        source: a TIFF, zarr, .npy, JPEG or PNG file, or anything with ``shape`` and slicing by rows: (height, width,
            channels), or (height, width) for grey. Files hold uint8 or uint16, arrays floating-point numbers, too.
        level: of a pyramid, 0 for the largest image.
        allow_large: decode JPEG and PNG of more pixels than ``data.images`` allows. They are decoded whole.
    """
    if not isinstance(source, str | Path):
        return LargeImage(source, channels)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no image file {path}")
    check_at_least("level", level, 0)
    try:
        rows = _open(path, channels, level, allow_large)
        if rows.dtype.kind == "f":
            raise ValueError(f"{path} stores {rows.dtype.name} numbers; {WITHOUT_WHITE}")
        return LargeImage(rows, channels, path)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # as above
        raise ImageError(f"{path} cannot be read as an image: {first_line(error)}") from error


def is_zarr(path: Path) -> bool:
    """Whether a folder is zarr's."""
    return any((path / name).exists() for name in ZARR_FILES)


def _open(path: Path, channels: int, level: int, allow_large: bool) -> Any:
    """The rows of a file, by what it is."""
    if is_zarr(path):
        return _open_zarr(path, level)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, but not a zarr store; give an image file")
    with path.open("rb") as file:
        start = file.read(4)
    if start in TIFF_STARTS:
        return TiffRows(path, level)
    if level:
        raise ValueError(f"{path} is not a pyramid; level is {level}, but it must be 0")
    if path.suffix == ".npy":
        return NumpyRows(path)
    image = decode_image(path, allow_large=allow_large)
    return np.asarray(image.convert("L") if channels == 1 else image)


def _open_zarr(path: Path, level: int) -> Any:
    """An array; of a group, such as an OME-Zarr's, the array that is called by the number of the level."""
    opened = _package("zarr", path).open(path, mode="r")
    if hasattr(opened, "shape") and not level:
        return opened
    names = [] if hasattr(opened, "shape") else sorted(opened.array_keys())
    if str(level) not in names:
        raise ValueError(f"{path} has no level {level}; its arrays are {', '.join(names) or 'one, of level 0'}")
    return opened[str(level)]


def _package(name: str, path: Path) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} needs the package {name}; install it with: pip install 'vision-longformer[large]'"
        ) from None


class NumpyRows:
    """Rows of a .npy file, in C or Fortran order. They are read, not mapped: a file that shrinks meanwhile is an error,
    but a map of it would end the process."""

    def __init__(self, path: Path) -> None:
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")
        except ValueError as error:
            raise ImageError(
                f"{path} cannot be read as a NumPy array: {first_line(error)}; if it was cut off, save or copy it again"
            ) from error
        self.shape, self.dtype, self._offset = mapped.shape, mapped.dtype, mapped.offset
        self._order: Literal["C", "F"] = "C" if mapped.flags.c_contiguous else "F"
        self._file = path.open("rb")

    def __getitem__(self, rows: slice) -> np.ndarray:
        part = np.empty((rows.stop - rows.start, *self.shape[1:]), self.dtype, order=self._order)
        if self._order == "C":
            self._read(part, rows.start * prod(self.shape[1:]))
        else:
            for index, column in enumerate(part.T.reshape(-1, len(part))):
                self._read(column, index * self.shape[0] + rows.start)
        return part

    def _read(self, numbers: np.ndarray, first: int) -> None:
        """Numbers that are stored one after the other."""
        self._file.seek(self._offset + first * self.dtype.itemsize)
        if self._file.readinto(numbers.data.cast("B")) < numbers.nbytes:
            raise ImageError("the file ends too early")


class _Plane(NamedTuple):
    """What one or all channels of a TIFF are stored in: a page, or one of its planes."""

    page: Any
    number: int


class TiffRows:
    """Rows of a TIFF, BigTIFF or OME-TIFF. Only tiles or strips that rows touch are decoded, and those that the next
    rows may touch, too, are kept."""

    def __init__(self, path: Path, level: int) -> None:
        tifffile = _package("tifffile", path)
        try:
            self._file = tifffile.TiffFile(path)
            levels = self._file.series[0].levels
        except Exception as error:
            raise ImageError(f"{path} cannot be read as TIFF: {first_line(error)}") from error
        if level >= len(levels):
            sizes = ", ".join("×".join(map(str, each.get_shape(squeeze=True))) for each in levels)
            raise ValueError(f"{path} has levels 0 to {len(levels) - 1} ({sizes}); level is {level}")
        _check_upright(path, levels[0].keyframe)
        self._planes = _planes(path, self._file, levels[level], tifffile.TIFF.DECOMPRESSORS)
        page = self._planes[0].page.keyframe
        samples = page.samplesperpixel if page.planarconfig == 1 else 1
        self.shape = page.imagelength, page.imagewidth, samples * len(self._planes)
        self.dtype = np.dtype(page.dtype)
        self._decoded: dict[tuple[int, int], np.ndarray] = {}

    def __getitem__(self, rows: slice) -> np.ndarray:
        parts = [self._read(number, rows.start, rows.stop) for number in range(len(self._planes))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Rows of a plane, (n, width, samples)."""
        page = self._planes[number].page.keyframe
        samples = self.shape[2] // len(self._planes)
        if page.is_final:
            return self._read_stored(self._planes[number], start, stop, samples)
        part = np.empty((stop - start, self.shape[1], samples), self.dtype)
        needed: dict[tuple[int, int], np.ndarray] = {}
        for top, left, index in _segments(self._planes[number], start, stop):
            key = number, index
            tile = self._decoded[key] if key in self._decoded else self._decode(self._planes[number], index)
            tile = tile[:, : self.shape[1] - left]
            if top + len(tile) > stop:
                needed[key] = tile
            first, last = max(start, top), min(stop, top + len(tile))
            part[first - start : last - start, left : left + tile.shape[1]] = tile[first - top : last - top]
        self._decoded = {key: tile for key, tile in self._decoded.items() if key[0] != number} | needed
        return part

    def _read_stored(self, plane: _Plane, start: int, stop: int, samples: int) -> np.ndarray:
        """Rows of numbers that are not compressed and lie one after the other in the file."""
        row = self.shape[1] * samples * self.dtype.itemsize
        data = self._bytes(
            plane.page.dataoffsets[0] + (plane.number * self.shape[0] + start) * row, (stop - start) * row
        )
        stored = self.dtype.newbyteorder(self._file.byteorder)
        return np.frombuffer(data, stored).reshape(stop - start, self.shape[1], samples)

    def _decode(self, plane: _Plane, index: int) -> np.ndarray:
        """A tile or strip, (height, width, samples), perhaps with what lies beyond the image."""
        page = plane.page
        count = page.databytecounts[index]
        data = self._bytes(page.dataoffsets[index], count) if count else None
        tables = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader} if page.compression in (6, 7) else {}
        tile, _, (_, height, width, samples) = page.decode(data, index, **tables)
        if tile is None:  # nothing is stored
            return np.full((height, width, samples), page.nodata, self.dtype)
        return tile[0]

    def _bytes(self, offset: int, count: int) -> bytes:
        self._file.filehandle.seek(offset)
        data = self._file.filehandle.read(count)
        if len(data) < count:
            raise ImageError("the file ends too early")
        return data


def _check_upright(path: Path, page: Any) -> None:
    """Refuse a page that viewers turn or mirror, as ``decode_image`` does."""
    orientation = page.tags.valueof(ORIENTATION, default=1)
    if orientation in range(2, 9):
        raise ValueError(
            f"{path} has orientation {orientation}: it is stored turned or mirrored, and cannot be turned while it is "
            "read by rows; save it upright, with orientation 1"
        )


def _planes(path: Path, file: Any, level: Any, decompressors: Any) -> list[_Plane]:
    """The planes of an image, after a check that it can be decoded."""
    axes = level.get_axes(squeeze=True)
    pages = [page for page in level.pages if page is not None]
    if axes not in TIFF_LAYOUTS or not pages:
        raise ValueError(f"{path} has axes {axes}; one image is asked for, with axes {', '.join(TIFF_LAYOUTS)}")
    if any(page.parent is not file for page in pages):
        raise ValueError(f"{path} is spread over several files; save it as one")
    key = pages[0].keyframe
    if key.compression not in decompressors:
        name = getattr(key.compression, "name", "unknown")
        raise ImageError(
            f"{path} has compression {int(key.compression)} ({name}), which cannot be decoded; perhaps it needs the "
            "package imagecodecs: pip install 'vision-longformer[large]'"
        )
    if key.photometric not in COLOURS and not (key.photometric == YCBCR and key.compression in JPEG):
        raise ValueError(
            f"{path} has numbers of kind {getattr(key.photometric, 'name', key.photometric)}; save it as grey or RGB"
        )
    if key.bitspersample not in BITS or key.dtype.kind != "u":
        raise ValueError(f"{path} stores {key.dtype.name} numbers of {key.bitspersample} bits; {WITHOUT_WHITE}")
    separate = key.samplesperpixel if key.planarconfig == 2 else 1
    planes = [_Plane(page, index) for page in pages for index in range(separate)]
    channels = 1 if axes == "YX" else level.get_shape(squeeze=True)[axes.index("S" if "S" in axes else "C")]
    if len(planes) * (key.samplesperpixel // separate) != channels:
        raise ValueError(f"{path} stores {channels} channels in {len(planes)} planes; save it with all in one page")
    return planes


def _segments(plane: _Plane, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """First row, first column and number of each tile or strip that rows touch."""
    page = plane.page.keyframe
    height = page.tilelength if page.is_tiled else page.rowsperstrip
    width = page.tilewidth if page.is_tiled else page.imagewidth
    across, down = ceil_div(page.imagewidth, width), ceil_div(page.imagelength, height)
    for row in range(start // height, ceil_div(stop, height)):
        for column in range(across):
            yield row * height, column * width, (plane.number * down + row) * across + column
