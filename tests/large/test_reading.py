"""Images read by rows: every kind of file by value, how much is decoded, and a sentence for each that is bad."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_stream import longformer, model_of

from vision_longformer.data import images
from vision_longformer.data.images import ImageError
from vision_longformer.large import open_image, reading, stream
from vision_longformer.large.reading import TiffRows

tifffile, zarr = pytest.importorskip("tifffile"), pytest.importorskip("zarr")

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (75, 50, 3), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (75, 50), dtype=np.uint16)


def write_tiff(path: Path, array: np.ndarray = COLOUR, **options: Any) -> Path:
    tifffile.imwrite(path, array, **{"photometric": "rgb" if array.shape[-1] == 3 else "minisblack", **options})
    return path


def read_in_parts(path: Path, channels: int, rows: int, level: int = 0) -> np.ndarray:
    image = open_image(path, channels, level=level)
    return np.concatenate([image[start : start + rows] for start in range(0, image.shape[0], rows)])


TILED = {"tile": (16, 32), "compression": "deflate"}

TIFFS: dict[str, dict[str, Any]] = {
    "tiled BigTIFF with deflate": {"bigtiff": True, **TILED},
    "with a predictor": {**TILED, "predictor": True},
    "big-endian": {"byteorder": ">", **TILED},
    "tiles that are not compressed": {"tile": (16, 16)},
    "strips of 7 rows": {"rowsperstrip": 7, "compression": "lzw"},
    "one piece": {},
    "one piece, big-endian": {"byteorder": ">"},
    "OME": {"ome": True, **TILED},
}


@pytest.mark.parametrize("options", TIFFS.values(), ids=TIFFS)
@pytest.mark.parametrize("rows", [1, 10, 16, 100])
def test_tiff(tmp_path: Path, options: dict[str, Any], rows: int) -> None:
    colour, deep = (write_tiff(tmp_path / f"{a.ndim}.tif", a, **options) for a in (COLOUR, DEEP))
    assert np.array_equal(read_in_parts(colour, 3, rows), COLOUR)
    assert np.array_equal(read_in_parts(deep, 1, rows), DEEP[..., None])


@pytest.mark.parametrize("options", [TILED, {}, {"rowsperstrip": 7, "compression": "deflate"}], ids=str)
def test_tiff_of_planes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Channels as planes of one page, and as a page each."""
    planes = np.ascontiguousarray(COLOUR.transpose(2, 0, 1))
    path = write_tiff(tmp_path / "planes.tif", planes, photometric="rgb", planarconfig="separate", **options)
    assert np.array_equal(read_in_parts(path, 3, 10), COLOUR)
    pages = tmp_path / "pages.ome.tif"
    tifffile.imwrite(pages, planes, photometric="minisblack", metadata={"axes": "CYX"}, **options)
    assert np.array_equal(read_in_parts(pages, 3, 10), COLOUR)


def test_jpeg_inside_a_tiff(tmp_path: Path) -> None:
    """Tiles that share their tables, as scanners of slides write them; compared with tifffile's own reading."""
    path = write_tiff(tmp_path / "slide.svs", tile=(16, 32), compression="jpeg")
    assert np.array_equal(read_in_parts(path, 3, 10), tifffile.imread(path))


def pyramid(path: Path) -> Path:
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(COLOUR, subifds=2, photometric="rgb", **TILED)
        for step in (2, 4):
            file.write(np.ascontiguousarray(COLOUR[::step, ::step]), subfiletype=1, photometric="rgb", **TILED)
    return path


def test_levels_of_a_pyramid(tmp_path: Path) -> None:
    path = pyramid(tmp_path / "pyramid.tif")
    for level, step in enumerate((1, 2, 4)):
        assert np.array_equal(read_in_parts(path, 3, 10, level), COLOUR[::step, ::step])
    with pytest.raises(ValueError, match=r"has levels 0 to 2 \(75×50×3, 38×25×3, 19×13×3\); level is 3"):
        open_image(path, level=3)


def test_tiles_that_are_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "sparse.tif"
    tiles = iter([b"", bytes([7]) * 16 * 16 * 3, b"", b""])
    tifffile.imwrite(path, tiles, shape=(32, 32, 3), dtype=np.uint8, photometric="rgb", tile=(16, 16))
    expected = np.zeros((32, 32, 3), np.uint8)
    expected[:16, 16:] = 7
    assert np.array_equal(read_in_parts(path, 3, 10), expected)


def test_tiles_that_are_not_stored_have_the_files_own_value(tmp_path: Path) -> None:
    """GDAL's tag for it is 42113."""
    path, tiles = tmp_path / "sparse.tif", iter([b"", bytes([7]) * 16 * 16])
    value = [(42113, "s", 0, "200", True)]
    tifffile.imwrite(
        path, tiles, shape=(16, 32), dtype=np.uint8, photometric="minisblack", tile=(16, 16), extratags=value
    )
    assert np.array_equal(read_in_parts(path, 1, 10)[..., 0], np.repeat([[200, 7]], 16, axis=1).repeat(16, axis=0))


REVERSED = np.packbits(np.unpackbits(COLOUR), bitorder="little").reshape(COLOUR.shape)
DIFFERENCES = np.diff(COLOUR, axis=1, prepend=np.uint8(0))


@pytest.mark.parametrize(("tag", "stored"), [(266, REVERSED), (317, DIFFERENCES)], ids=["FillOrder", "Predictor"])
@pytest.mark.parametrize("options", [{}, {"rowsperstrip": 7}], ids=str)
def test_numbers_that_are_not_compressed_but_changed(
    tmp_path: Path, tag: int, stored: np.ndarray, options: dict[str, Any]
) -> None:
    """A tag is 2 that tifffile does not write: bits are in reverse order, or numbers are differences of neighbours."""
    path = write_tiff(tmp_path / "x.tif", stored, extratags=[(65000, "H", 1, 2, True)], **options)
    data, number = path.read_bytes(), (65000).to_bytes(2, "little") + b"\x03\0"
    assert data.count(number) == 1
    path.write_bytes(data.replace(number, tag.to_bytes(2, "little") + b"\x03\0"))
    assert np.array_equal(read_in_parts(path, 3, 10), COLOUR)


def test_only_tiles_that_rows_touch_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16×32 in 75×50: two in each of five rows of tiles. Those of the last row of tiles are kept."""
    image, decoded = open_image(write_tiff(tmp_path / "a.tif", **TILED)), []
    decode = TiffRows._decode
    monkeypatch.setattr(TiffRows, "_decode", lambda rows, plane, i: (decoded.append(i), decode(rows, plane, i))[1])
    counts = []
    for start, stop in [(0, 10), (10, 20), (20, 32), (32, 40), (60, 75)]:
        image[start:stop]
        counts.append(len(decoded))
    assert counts == [2, 4, 4, 6, 10]
    assert decoded == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_zarr(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "one.zarr", data=COLOUR, chunks=(16, 16, 3))
    group = zarr.create_group(tmp_path / "levels.zarr")
    group.create_array("0", data=DEEP)
    group.create_array("1", data=DEEP[::2, ::2])
    assert np.array_equal(read_in_parts(tmp_path / "one.zarr", 3, 10), COLOUR)
    assert np.array_equal(read_in_parts(tmp_path / "levels.zarr", 1, 10, 1), DEEP[::2, ::2, None])
    with pytest.raises(ValueError, match=r"levels.zarr has no level 2; its arrays are 0, 1"):
        open_image(tmp_path / "levels.zarr", 1, level=2)
    with pytest.raises(ValueError, match=r"one.zarr has no level 1; its arrays are one, of level 0"):
        open_image(tmp_path / "one.zarr", level=1)


@pytest.fixture
def chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First and last row of all that is read of a zarr array; x.zarr is one with chunks of 32 rows."""
    zarr.create_array(tmp_path / "x.zarr", data=COLOUR, chunks=(32, 16, 3))
    reads, read = [], zarr.Array.__getitem__

    def counted(array: Any, rows: slice) -> Any:
        reads.append((rows.start, rows.stop))
        return read(array, rows)

    monkeypatch.setattr(zarr.Array, "__getitem__", counted)
    return reads


def test_a_row_of_zarr_chunks_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: list[tuple[int, int]]
) -> None:
    """And the files looked at once for each, beside once when the array is opened."""
    looks, stamp = [], reading._stamp
    monkeypatch.setattr(reading, "_stamp", lambda file: (looks.append(file), stamp(file))[1])
    image = open_image(tmp_path / "x.zarr")
    for start in range(75):
        assert np.array_equal(image[start : start + 2], COLOUR[start : start + 2])
    assert chunks == [(0, 32), (32, 64), (64, 75), (64, 75)]  # all rows were read, then the last one again
    assert len(looks) == 1 + 4
    assert np.array_equal(image[10:70], COLOUR[10:70])


@pytest.mark.parametrize(("limit", "read"), [(32 * 50 * 3, [(0, 32)]), (32 * 50 * 3 - 1, [(0, 10), (10, 20)])])
def test_a_large_row_of_zarr_chunks_is_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[tuple[int, int]],
    limit: int,
    read: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(reading, "KEPT_BYTES", limit)
    image = open_image(tmp_path / "x.zarr")
    assert np.array_equal(np.concatenate([image[0:10], image[10:20]]), COLOUR[:20])
    assert chunks == read


def test_photos(tmp_path: Path) -> None:
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    Image.fromarray(COLOUR).save(tmp_path / "a.jpg")
    assert np.array_equal(read_in_parts(tmp_path / "a.png", 3, 10), COLOUR)
    assert np.array_equal(read_in_parts(tmp_path / "a.jpg", 3, 10), np.asarray(Image.open(tmp_path / "a.jpg")))
    grey = np.asarray(Image.fromarray(COLOUR).convert("L"))
    assert np.array_equal(read_in_parts(tmp_path / "a.png", 1, 10)[..., 0], grey)
    with pytest.raises(ValueError, match=r"a.png is not a pyramid; level is 1, but it must be 0"):
        open_image(tmp_path / "a.png", level=1)


def test_the_limit_of_photos_can_be_lifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 75 * 50 - 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"a.png is refused as a decompression bomb"):
        open_image(tmp_path / "a.png")
    assert np.array_equal(open_image(tmp_path / "a.png", allow_large=True)[:], COLOUR)
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", COLOUR)
    assert np.array_equal(read_in_parts(tmp_path / "a.npy", 3, 10), COLOUR)
    assert np.array_equal(open_image(COLOUR)[3:5], COLOUR[3:5])
    grey = open_image(DEEP, 3)
    assert grey.shape == (75, 50, 3)
    assert np.array_equal(grey[3:5], np.stack([DEEP[3:5]] * 3, -1))


def test_numpy_files_of_any_order(tmp_path: Path) -> None:
    np.save(tmp_path / "colour.npy", np.asfortranarray(COLOUR))
    np.save(tmp_path / "grey.npy", np.asfortranarray(DEEP))
    assert np.array_equal(read_in_parts(tmp_path / "colour.npy", 3, 10), COLOUR)
    assert np.array_equal(read_in_parts(tmp_path / "grey.npy", 1, 10), DEEP[..., None])


def test_a_file_streams_as_its_numbers_do(tmp_path: Path) -> None:
    """Of uint16, white is 65535: pixels are the number of 1/65535, then normalised."""
    model = model_of(longformer())
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    deep = RNG.integers(0, 65536, (41, 27, 3), dtype=np.uint16)
    scaled = torch.from_numpy(deep.astype(np.float64)).div(65535).sub(torch.tensor(mean)).div(torch.tensor(std))
    expected = model(scaled.permute(2, 0, 1)[None])[0]
    got = stream(model, write_tiff(tmp_path / "deep.tif", deep, **TILED), rows=2, mean=mean, std=std)
    assert torch.allclose(got.logits, expected, atol=1e-6)


# Bad input


def truncated(path: Path) -> Path:
    write_tiff(path, rowsperstrip=15, compression="deflate")
    with tifffile.TiffFile(path) as file:
        end = file.pages[0].dataoffsets[3] + 5
    path.write_bytes(path.read_bytes()[:end])
    return path


def damaged(path: Path) -> Path:
    write_tiff(path, rowsperstrip=15, compression="deflate")
    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[3]
    data = bytearray(path.read_bytes())
    data[offset : offset + 40] = bytes(40)
    path.write_bytes(data)
    return path


def unknown_compression(path: Path) -> Path:
    """The compression's tag (259) holds a number that nobody uses."""
    write_tiff(path, **TILED)
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages[0].tags[259].overwrite(4711)
    return path


def palette(path: Path) -> Path:
    Image.fromarray(COLOUR).convert("P").save(path)
    return path


def cut_head(path: Path) -> Path:
    path.write_bytes(write_tiff(path).read_bytes()[:12])
    return path


def turned(path: Path) -> Path:
    write_tiff(path, extratags=[(274, "H", 1, 6, True)], **TILED)
    return path


def numpy_floats(path: Path) -> Path:
    np.save(path.with_suffix(".npy"), np.ones((8, 8), np.float32))
    return path.with_suffix(".npy")


def zarr_floats(path: Path) -> Path:
    zarr.create_array(path, data=np.ones((8, 8), np.float64))
    return path


def spread(path: Path) -> Path:
    """An OME-TIFF of two channels, the second of which is in another file."""
    names = [path.with_suffix(f".{number}.ome.tif") for number in range(2)]
    planes = "".join(
        f'<TiffData IFD="0" FirstC="{number}" PlaneCount="1"><UUID FileName="{name.name}">urn:uuid:{number}</UUID>'
        "</TiffData>"
        for number, name in enumerate(names)
    )
    for number, name in enumerate(names):
        ome = (
            f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{number}"><Image '
            'ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="50" SizeY="75" SizeC="2" '
            f'SizeZ="1" SizeT="1"><Channel ID="Channel:0:0"/><Channel ID="Channel:0:1"/>{planes}</Pixels></Image></OME>'
        )
        tifffile.imwrite(name, COLOUR[..., number], photometric="minisblack", metadata=None, description=ome)
    return names[0]


BAD: list[tuple[Callable[[Path], Path], str]] = [
    (truncated, r"x.tif at rows 40 to 49 cannot be read: the file ends too early"),
    (damaged, r"x.tif at rows 40 to 49 cannot be read: "),
    (unknown_compression, r"x.tif has compression 4711 \(unknown\), .* imagecodecs: pip install 'vision-longformer\["),
    (palette, r"x.tif has numbers of kind PALETTE; save it as grey or RGB"),
    (turned, r"^.*x.tif has orientation 6: it is stored turned or mirrored, .*; save it upright, with orientation 1$"),
    (cut_head, r"x.tif cannot be read as TIFF: "),
    (
        lambda path: write_tiff(path, np.zeros((8, 8, 4), np.uint8), photometric="rgb"),
        r"x.tif is of shape .8, 8, 4., with 4 channels; the",
    ),
    (lambda path: write_tiff(path, np.zeros((5, 8, 8), np.uint8)), r"x.tif has axes QYX; one image is asked for"),
    (
        lambda path: write_tiff(path, np.zeros((8, 8), np.int32)),
        r"x.tif stores int32 numbers of 32 bits; save it as uint8 or",
    ),
    (lambda path: write_tiff(path, np.ones((8, 8), np.float32)), r"x.tif stores float32 numbers of 32 bits; save it"),
    (
        lambda path: write_tiff(path, np.ones((8, 8), np.uint8), bitspersample=4),
        r"x.tif stores uint8 numbers of 4 bits; save it as uint8 or uint16, or pass a normalised array",
    ),
    (
        lambda path: write_tiff(path, COLOUR, photometric="ycbcr", compression="deflate"),
        r"x.tif has numbers of kind YCBCR; save it as grey or RGB$",
    ),
    (numpy_floats, r"^.*x.npy stores float32 numbers; save it as uint8 or uint16, or pass a normalised array to"),
    (zarr_floats, r"^.*x.tif stores float64 numbers; save it as uint8 or uint16, or pass a normalised array to"),
    (spread, r"^.*x.0.ome.tif is spread over several files; save it as one$"),
    (lambda path: path, r"there is no image file .*x.tif"),
    (lambda path: path.mkdir() or path, r"x.tif is a folder, but not a zarr store"),
]


@pytest.mark.parametrize(("make", "sentence"), BAD, ids=[sentence[:40] for _, sentence in BAD])
def test_bad_files(tmp_path: Path, make: Callable[[Path], Path], sentence: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as error:
        read_in_parts(make(tmp_path / "x.tif"), 3, 10)
    assert "\n" not in str(error.value)


def test_arrays_with_numbers_that_are_not_finite() -> None:
    pixels = np.ones((60, 8), np.float32)
    pixels[45, 3] = np.nan
    image = open_image(pixels)
    assert np.array_equal(image[0:45], np.ones((45, 8, 3)))
    with pytest.raises(
        ImageError,
        match=r"^the image at rows 40 to 49 has values that are NaN or infinite; replace them, by 0 for instance$",
    ):
        image[40:50]


def test_a_file_that_changes(tmp_path: Path) -> None:
    image = open_image(write_tiff(tmp_path / "x.tif", **TILED))
    image[0:10]
    write_tiff(tmp_path / "x.tif", COLOUR[:60], **TILED)
    with pytest.raises(
        ImageError, match=r"x.tif at rows 10 to 19 cannot be read: the file has changed since it was opened"
    ):
        image[10:20]


def test_upright_tiff(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "x.tif", extratags=[(274, "H", 1, 1, True)], **TILED)
    assert np.array_equal(read_in_parts(path, 3, 10), COLOUR)


@pytest.mark.parametrize("level", [None, "1"])
def test_a_zarr_array_that_changes(tmp_path: Path, level: str | None) -> None:
    """Chunks that are replaced or added change no time of the folder; those of another array do not matter."""
    path = tmp_path / "x.zarr"
    options = {"shape": COLOUR.shape, "chunks": (16, 16, 3), "dtype": np.uint8}
    if level:
        zarr.create_group(path).create_array("1", **options)
    array = zarr.open_array(path / level) if level else zarr.create_array(path, **options)
    array[:32] = COLOUR[:32]
    for rows in (slice(0, 16), slice(32, 48)):
        image = open_image(path, level=int(level or 0))
        before = image.identity
        if level:
            (path / "other").write_text(str(rows))
        assert np.array_equal(image[0:10], array[0:10])
        array[rows] = COLOUR[rows] // 2
        with pytest.raises(
            ImageError, match=r"x.zarr at rows 16 to 31 cannot be read: the file has changed since it was opened"
        ):
            image[10:20]
        assert open_image(path, level=int(level or 0)).identity != before


def test_a_numpy_file_that_is_cut_off(tmp_path: Path) -> None:
    """Before it is opened, or later: of 75·50·3 bytes and a header all but the last."""
    path = tmp_path / "x.npy"
    np.save(path, COLOUR)
    image = open_image(path)
    assert np.array_equal(image[0:10], COLOUR[0:10])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        ImageError, match=r"x.npy at rows 74 to 74 cannot be read: the file has changed since it was opened"
    ):
        image[74:75]
    with pytest.raises(
        ImageError,
        match=r"x.npy cannot be read as a NumPy array: mmap length is greater than file size; if it was cut off, save "
        "or copy it again$",
    ):
        open_image(path)
    os.truncate(path, 0)
    with pytest.raises(
        ImageError, match=r"x.npy at rows 0 to 9 cannot be read: the file has changed since it was opened"
    ):
        image[0:10]


@pytest.mark.parametrize("package", ["tifffile", "zarr"])
def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path = tmp_path / "x"
    write_tiff(path) if package == "tifffile" else zarr.create_array(path, data=COLOUR)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ValueError, match=rf"x needs the package {package}; .*: pip install 'vision-longformer\[large\]'"
    ):
        open_image(path)
