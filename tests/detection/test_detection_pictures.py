"""Detections drawn into images."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from vision_longformer.detection.detections import Detection, MaskCrop, Target, annotated_objects
from vision_longformer.detection.pictures import COLOURS, DRAWN, _stroke, draw_detections, draw_pair, page, save_image


def _mask(top: int, left: int, height: int, width: int) -> MaskCrop:
    return MaskCrop(top, left, np.ones((height, width), dtype=bool))


def test_objects_are_drawn_where_they_are() -> None:
    """The mask is tinted, the box has its colour, the name is above it, and the rest is as it was."""
    image = Image.new("RGB", (1000, 800), (100, 100, 100))
    drawn = np.asarray(
        draw_detections(image, [Detection((400, 300, 600, 500), 2, 0.87, _mask(320, 420, 160, 160))], "ab")
    )
    colour = np.array(COLOURS[1])
    assert drawn.shape == (800, 1000, 3)
    assert drawn[400, 401].tolist() == colour.tolist()
    assert drawn[400, 398:405].tolist() == [[100] * 3, [255] * 3, *[colour.tolist()] * 3, [255] * 3, [100] * 3]
    assert drawn[400, 500].tolist() == pytest.approx((0.42 * colour + 0.58 * 100).tolist(), abs=2)
    assert drawn[310, 410].tolist() == [100, 100, 100]
    name = drawn[278:299, 400:450].reshape(-1, 3)
    assert (name > 200).all(1).sum() > 20
    assert (name == colour).all(1).sum() > 100
    untouched = np.ones((800, 1000), dtype=bool)
    untouched[270:510, 395:610] = False
    assert (drawn[untouched] == 100).all()
    assert np.asarray(image).min() == 100


def test_small_images_are_enlarged_and_names_do_not_cover_each_other() -> None:
    image = Image.new("RGB", (90, 60), "black")
    twice = [Detection((30, 30, 60, 50), 1, 0.9), Detection((30, 30, 60, 50), 2, 0.8)]
    drawn = draw_detections(image, twice, ["cat", "dog"])
    assert drawn.size == (DRAWN, DRAWN * 2 // 3)
    pixels = np.asarray(drawn).reshape(-1, 3)
    assert all((pixels == COLOURS[label]).all(1).sum() > 300 for label in (0, 1))


def test_names_stay_inside_the_picture() -> None:
    """At the border as much of a name is seen as in the middle."""
    image = Image.new("RGB", (900, 900), "black")
    seen = []
    for box in ((400, 400, 420, 420), (0, 0, 20, 20), (890, 880, 900, 900), (880, 0, 900, 20)):
        whites = []
        for name in ("a rather long name", " " * 18):  # the outline of the box is white, too
            drawn = np.asarray(draw_detections(image, [Detection(box, 1, nan)], [name]))
            whites.append(int((drawn > 200).all(2).sum()))
        seen.append(whites[0] - whites[1])
    assert seen[0] > 100
    assert seen[1:] == pytest.approx([seen[0]] * 3, rel=0.1)


def test_annotated_and_found_side_by_side() -> None:
    """Equal halves below a heading; what is annotated has a name without a score, and "nothing found" is red."""
    image = Image.new("RGB", (900, 600), "black")
    target = Target(
        1,
        torch.tensor([[300.0, 200, 500, 400], [0, 0, 900, 600]]),
        torch.tensor([2, 1]),
        None,
        torch.tensor([False, True]),
        torch.tensor([40000.0, 1]),
    )
    annotated = annotated_objects(target)
    assert [(one.box, one.label, isnan(one.score)) for one in annotated] == [((300, 200, 500, 400), 2, True)]
    sheet = np.asarray(draw_pair(image, annotated, [], ["cat", "dog"]))
    gap, head = 15, sheet.shape[0] - 600
    assert sheet.shape[1] == 2 * 900 + gap
    assert sheet[head + 300, 301].tolist() == list(COLOURS[1])
    right = sheet[head:, 900 + gap :]
    assert not right.any()
    reddish = (sheet[:head, 900 + gap :, 0] > 150) & (sheet[:head, 900 + gap :, 1] < 100)
    assert reddish.sum() > 50
    found = np.asarray(draw_pair(image, annotated, [Detection((300, 200, 500, 400), 1, 0.5)], ["cat", "dog"]))
    assert found[head + 300, 900 + gap + 301].tolist() == list(COLOURS[0])
    assert not ((found[:head, 900 + gap :, 0] > 150) & (found[:head, 900 + gap :, 1] < 100)).any()


def test_headings_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: written.append(text))
    one = Detection((1, 1, 5, 5), 1, 0.5)
    annotated = [replace(one, score=nan)]
    draw_pair(Image.new("RGB", (9, 9)), [], [], ["cat"])
    draw_pair(Image.new("RGB", (9, 9)), annotated, [], ["cat"])
    draw_pair(Image.new("RGB", (9, 9)), annotated, [one, one], ["cat"])
    assert written[:2] == ["annotated: 0", "nothing found: correct"]
    assert written[2:5] == ["cat", "annotated: 1", "nothing found"]
    assert written[5:] == ["cat", "cat 50%", "cat 50%", "annotated: 1", "found: 2"]


def test_nothing_found_where_there_is_nothing_is_not_red() -> None:
    sheet = np.asarray(draw_pair(Image.new("RGB", (900, 600), "black"), [], [], ["cat"]))
    assert not ((sheet[..., 0] > 150) & (sheet[..., 1] < 100)).any()


def test_only_the_best_of_many_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: written.append(text))
    many = [Detection((1, 1, 5, 5), 1, 1 - number / 100) for number in range(60)]
    draw_detections(Image.new("RGB", (9, 9)), many, ["cat"])
    assert (len(written), written[0], written[-1]) == (50, "cat 100%", "cat 51%")


def test_page() -> None:
    pictures = [Image.new("RGB", (100 + 50 * index, 200), (0, 0, 255)) for index in range(4)]
    sheet = np.asarray(page(pictures, "four pictures", columns=3, width=600))
    blue = (sheet == (0, 0, 255)).all(2)
    assert sheet.shape[1] == 600
    assert blue.sum() > 4 * 90 * 180
    assert not blue[:50].any()
    assert (sheet[:50] < 100).all(2).any()


def test_pictures_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "red")
    for name, format in (("new/a.png", "PNG"), ("b.jpg", "JPEG"), ("c.JPEG", "JPEG")):
        with Image.open(save_image(image, tmp_path / name)) as written:
            assert (written.format, written.size) == (format, (20, 10))
    with pytest.raises(FileExistsError, match=r"b\.jpg exists"):
        save_image(image, tmp_path / "b.jpg")
    save_image(image, tmp_path / "b.jpg", overwrite=True)
    with pytest.raises(ValueError, match=r"a\.gif should end in \.png, \.jpg, \.jpeg"):
        save_image(image, tmp_path / "a.gif")


@pytest.mark.parametrize(
    ("side", "sides", "expected"),
    [
        (900, [], (3, 13)),  # 900 / 300; letters have 13 pixels at least
        (2400, [600.0, 900.0], (8, 35)),  # 2400 / 300 and 2400 / 68
        (2400, [48.0, 36.0, 900.0], (4, 24)),  # the median of 48 divided by 12 and by 2
        (2400, [5.0], (2, 13)),
    ],
)
def test_lines_and_letters_suit_picture_and_objects(side: int, sides: list[float], expected: tuple[int, int]) -> None:
    assert _stroke(side, sides) == expected
