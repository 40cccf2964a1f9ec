"""Decoding: any image file comes out upright, in 8 bits and three colours; damaged ones are named."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vision_longformer.data.images import MAX_PIXELS, ImageError, decode_image, image_files

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def _file(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def _row(*pixels: Any, mode: str) -> Image.Image:
    image = Image.new(mode, (len(pixels), 1))
    for x, pixel in enumerate(pixels):
        image.putpixel((x, 0), pixel)
    return image


def _pixels(image: Image.Image) -> list[tuple[int, ...]]:
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def _palette_with_transparency() -> bytes:
    image = _row(0, 1, 2, mode="P")
    image.putpalette([*RED, *GREEN, *BLUE])
    return _file(image, transparency=1)


def _animation() -> bytes:
    first, second = Image.new("RGB", (2, 1), RED), Image.new("RGB", (2, 1), BLUE)
    return _file(first, "GIF", save_all=True, append_images=[second])


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (_file(_row(RED, GREEN, mode="RGB")), [RED, GREEN]),
        (_file(_row(0, 128, 255, mode="L")), [BLACK, (128, 128, 128), WHITE]),
        (_file(_row(0, 1, mode="1")), [BLACK, WHITE]),
        (_file(_row((0, 255), (0, 0), mode="LA")), [BLACK, WHITE]),
        (_file(_row((*RED, 255), (*RED, 0), (0, 0, 0, 51), mode="RGBA")), [RED, WHITE, (204, 204, 204)]),
        (_palette_with_transparency(), [RED, WHITE, BLUE]),
        (_file(_row(*[RED] * 2, mode="RGB"), transparency=RED), [WHITE] * 2),
        (_file(_row((0, 255, 255, 0), (0, 0, 0, 255), mode="CMYK"), "TIFF"), [RED, BLACK]),
        (_animation(), [RED, RED]),
    ],
    ids=["rgb", "grey", "1-bit", "grey-alpha", "rgba", "palette", "colour-key", "cmyk", "gif"],
)
def test_modes(file: bytes, expected: list[tuple[int, ...]]) -> None:
    assert _pixels(decode_image(file)) == expected


@pytest.mark.parametrize(
    ("levels", "format", "expected"),
    [
        (np.array([[0, 257, 32768, 65535]], np.uint16), "PNG", [0, 1, 128, 255]),
        (np.array([[0, 257, 32768, 65535]], np.uint16), "TIFF", [0, 1, 128, 255]),
        (np.array([[0, 300, 1000]], np.uint16), "PNG", [0, 1, 4]),
        (np.array([[-5, 0, 65535]], np.int32), "TIFF", [0, 0, 255]),
        (np.array([[0, 500_000, 1_000_000]], np.int32), "TIFF", [0, 128, 255]),
        (np.array([[0, 0.5, 1.0]], np.float32), "TIFF", [0, 128, 255]),
        (np.array([[0, 100, 200]], np.float32), "TIFF", [0, 100, 200]),
        (np.array([[np.nan, 0, 65535]], np.float32), "TIFF", [0, 0, 255]),
    ],
)
def test_deep_levels_are_scaled(levels: np.ndarray, format: str, expected: list[int]) -> None:
    assert _pixels(decode_image(_file(Image.fromarray(levels), format))) == [(grey, grey, grey) for grey in expected]


def test_cmyk_jpeg_is_not_inverted() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red, green, blue = _pixels(decode_image(_file(image, "JPEG", quality=100)))[0]
    assert red > 250
    assert max(green, blue) < 5


@pytest.mark.parametrize(
    ("orientation", "expected"), [(1, [RED, GREEN, BLUE]), (3, [BLUE, GREEN, RED]), (6, [RED, GREEN, BLUE])]
)
def test_exif_orientation(orientation: int, expected: list[tuple[int, ...]]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode_image(_file(_row(RED, GREEN, BLUE, mode="RGB"), exif=exif))
    assert image.size == ((1, 3) if orientation == 6 else (3, 1))
    assert _pixels(image) == expected


def test_damaged_exif_says_nothing() -> None:
    assert _pixels(decode_image(_file(_row(RED, GREEN, mode="RGB"), exif=b"Exif\0\0damaged"))) == [RED, GREEN]


def test_kinds_of_files(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(_file(_row(RED, mode="RGB")))
    with path.open("rb") as file:
        assert [_pixels(decode_image(given)) for given in (path, str(path), file)] == [[RED]] * 3


def test_damaged_files_are_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = _file(Image.fromarray(noise), "JPEG")
    contents = {"cut.jpg": whole[: len(whole) // 2], "empty.png": b"", "text.png": b"no image at all"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=f"{name} cannot be read as an image: ."):
            decode_image(tmp_path / name)
    with pytest.raises(ImageError, match=r"sample 7 cannot be read as an image: image file is truncated"):
        decode_image(contents["cut.jpg"], name="sample 7")
    with pytest.raises(FileNotFoundError, match=r"there is no image file .*missing.png"):
        decode_image(tmp_path / "missing.png")
    with pytest.raises(ImageError, match="cannot be read as an image"):
        decode_image(tmp_path)


def _bomb(width: int, height: int) -> bytes:
    """A PNG file whose header claims a size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0")
    chunks = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data))
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PIXELS < 16_000 * 16_000
    with pytest.raises(ImageError, match=r"bomb.png is refused as a decompression bomb: .*256000000 pixels"):
        decode_image(_bomb(16_000, 16_000), name="bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ImageError, match=r"bomb.png is refused as a decompression bomb: 16000×16000 pixels"):
        decode_image(_bomb(16_000, 16_000), name="bomb.png")


def test_large_images_below_the_limit_are_no_bombs() -> None:
    """Pillow would warn; the file is merely cut short."""
    with pytest.raises(ImageError, match="truncated"):
        decode_image(_bomb(10_000, 10_000))


def test_files_that_paths_stand_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a folder all images in it and its folders, whatever the case of their names' ends, in order of the names."""
    folder = tmp_path / "album"
    (folder / "inner").mkdir(parents=True)
    (folder / ".trash").mkdir()
    for name in ("b.JPG", "a.png", "notes.txt", "inner/c.png", ".trash/d.png", ".e.png"):
        (folder / name).write_bytes(b"")
    single = tmp_path / "single.weird"
    single.write_bytes(b"")
    with caplog.at_level("INFO"):
        assert image_files([single, folder]) == [single, *(folder / name for name in ("a.png", "b.JPG", "inner/c.png"))]
    assert caplog.messages == [f"ignored in {folder}: 1 .txt"]
    with pytest.raises(FileNotFoundError, match=r"there is no image .*nowhere\.jpg"):
        image_files([folder, "nowhere.jpg"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the folder .*empty has no images in it \(\.jpg, "):
        image_files([tmp_path / "empty"])
