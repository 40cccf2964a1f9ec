"""What classifiers say about single images, and the command."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import SMALL_MODELS, build
from PIL import Image
from timm.data import create_transform

from vision_longformer import VisionLongformer, model_config, save
from vision_longformer.classification.model import load_classifier
from vision_longformer.classification.predict import predict
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.cli.main import main
from vision_longformer.cli.parser import Group, run_command
from vision_longformer.cli.predict import predict as predict_command
from vision_longformer.data.images import ImageError, decode_image
from vision_longformer.errors import CheckpointError
from vision_longformer.large import memory
from vision_longformer.large.memory import free_memory
from vision_longformer.large.stream import Streamed

predict_module = importlib.import_module("vision_longformer.classification.predict")

CLASSES = ("ant", "bee", "cat", "dog", "eel")
PREPARE = Preprocessing((64, 64), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 0.9, "bicubic", CLASSES)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build("two_stages"), tmp_path / "model.safetensors", info={"preprocessing": PREPARE.to_dict()})


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return _photo(tmp_path / "photo.png")


def _photo(path: Path, height: int = 80, width: int = 100, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_predict_is_the_model_by_hand(checkpoint: Path, photo: Path) -> None:
    (prediction,) = predict(checkpoint, [photo], top=3)
    with torch.no_grad():
        logits = build("two_stages").eval()(PREPARE.transform()(decode_image(photo))[None])[0]
    chances = logits.double().softmax(0).tolist()
    order = sorted(range(5), key=lambda index: -chances[index])[:3]
    assert prediction.file == str(photo)
    assert prediction.labels == tuple(CLASSES[index] for index in order)
    assert prediction.probabilities == pytest.approx([chances[index] for index in order], rel=1e-5)


def test_an_image_that_would_not_fit_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ViL-Nano's first map has 256×256 tokens of 32 channels: at 15 numbers of 4 bytes for each channel 126 MB, and
    about 70 more for tokens, headroom and libraries."""
    config = model_config("vision_longformer_nano")
    photo, path = _photo(tmp_path / "photo.png"), save(VisionLongformer(config), tmp_path / "nano.safetensors")
    (plain,) = predict(path, [photo], size=1024)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(predict_module, "free_memory", lambda device: 100_000_000)
    main(["predict", str(path), str(photo), "--size", "1024", "--json"])
    output, errors = capsys.readouterr()
    assert re.fullmatch(
        r"1024×1024 pixels at once would need about (19|20)\dMB, but only 100MB is free: computing strip by strip\n",
        errors,
    )
    (streamed,) = json.loads(output)
    assert tuple(streamed["labels"]) == plain.labels
    assert streamed["probabilities"] == pytest.approx(plain.probabilities, rel=1e-4)
    monkeypatch.setattr(predict_module, "free_memory", lambda device: 30_000_000)
    with pytest.raises(
        ValueError, match=r"^30MB of memory is too little for an image of 1024×1024; at least 37MB is needed, 9MB"
    ):
        predict(path, [photo], size=1024)


@pytest.mark.parametrize(("machine", "limit"), [(10**9, 50_000_000 + 8_388_608), (40_000_000, 40_000_000)])
def test_tokens_take_the_machines_memory_and_strips_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch, machine: int, limit: int
) -> None:
    """256×256 tokens of 32 numbers of 4 bytes are 8,388,608, for a model on another device with 50 MB."""
    seen = []

    def note(model: VisionLongformer, image: torch.Tensor, memory: int) -> Streamed:
        seen.append(memory)
        return Streamed(torch.zeros(5), torch.zeros(1), {})

    monkeypatch.setattr(predict_module, "free_memory", lambda device: {"meta": 50_000_000, "cpu": machine}[device.type])
    monkeypatch.setattr(predict_module, "stream", note)
    model = VisionLongformer(model_config("vision_longformer_nano")).eval()
    assert len(predict_module._logits(model, torch.zeros(3, 1024, 1024), torch.device("meta"))) == 5
    assert seen == [limit]


def test_free_memory_is_that_of_the_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 10**7 < free_memory(torch.device("cpu")) <= total


@pytest.mark.parametrize(
    ("limit", "cached", "free"),
    [("5000000", 1_000_000, 3_000_000), ("max", 1_000_000, None), ("2000000", 0, 0), (None, 0, None)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, limit: str | None, cached: int, free: int | None
) -> None:
    """Of which 3 MB are in use; of those, what is ``cached`` is given back when needed."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    cached_name = {1: "total_inactive_file", 2: "inactive_file"}[version]
    if limit is not None:
        for name, text in zip(names, (limit, "3000000"), strict=True):
            (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / "memory.stat").write_text(f"anon 7\n{cached_name} {cached}\nfile 9\n")
    files = [(tmp_path / names[0], tmp_path / names[1], cached_name)]
    monkeypatch.setattr(memory, "CONTAINER_FILES", files)
    got = free_memory(torch.device("cpu"))
    assert got == free if free is not None else got > 10**7


def test_all_probabilities_sum_to_one(checkpoint: Path, photo: Path) -> None:
    (prediction,) = predict(checkpoint, [photo], top=100)
    assert set(prediction.labels) == set(CLASSES)
    assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-12)
    assert list(prediction.probabilities) == sorted(prediction.probabilities, reverse=True)


def test_a_photo_taken_sideways_is_turned(checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = tmp_path / "turned.png"
    Image.open(photo).rotate(90, expand=True).save(turned, exif=exif)
    upright, sideways = predict(checkpoint, [photo, turned])
    assert sideways.probabilities == upright.probabilities


def test_another_resolution(checkpoint: Path, photo: Path) -> None:
    (small,), (own,) = predict(checkpoint, [photo], size=32, top=5), predict(checkpoint, [photo], size=64, top=5)
    assert own == predict(checkpoint, [photo])[0]
    with torch.no_grad():
        logits = build("two_stages").eval()(PREPARE.transform((32, 32))(decode_image(photo))[None])[0]
    best = logits.softmax(0).max().item()
    assert small.probabilities[0] == pytest.approx(best, rel=1e-5)
    assert small.probabilities != own.probabilities


def test_a_rectangle(checkpoint: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """48 high and 96 wide, in Python and by the command; with timm's own preprocessing for such an input."""
    transform = create_transform((3, 48, 96), interpolation="bicubic", mean=PREPARE.mean, std=PREPARE.std, crop_pct=0.9)
    pixels = transform(decode_image(photo))[None]
    assert pixels.shape == (1, 3, 48, 96)
    with torch.no_grad():
        best = build("two_stages").eval()(pixels)[0].softmax(0).max().item()
    (prediction,) = predict(checkpoint, [photo], size=(48, 96))
    assert prediction.probabilities[0] == pytest.approx(best, rel=1e-5)
    argv = ["predict", str(checkpoint), str(photo), "--size", "48x96", "--json"]
    run_command("vil", Group("", {"predict": predict_command}), argv, "0")
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["probabilities"] == list(prediction.probabilities)


def test_a_folder_is_its_images(checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "album"
    folder.mkdir()
    (folder / "notes.txt").write_text("no image")
    files = [_photo(folder / name, seed=seed) for seed, name in enumerate(["b.JPG", "a.png"])]
    assert predict(checkpoint, [folder, photo]) == predict(checkpoint, [files[1], files[0], photo])


def test_without_preprocessing_imagenets_is_used_and_classes_are_numbers(photo: Path, tmp_path: Path) -> None:
    path = save(build("two_stages"), tmp_path / "converted.safetensors")
    _, prepare, named = load_classifier(path)
    assert prepare.classes == ("0", "1", "2", "3", "4")
    assert (prepare.size, prepare.crop_pct, named) == ((64, 64), 0.875, False)
    assert prepare.mean == (0.485, 0.456, 0.406)
    assert set(predict(path, [photo])[0].labels) == set("01234")


def test_wrong_input_of_predict(checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no image .*nowhere\.jpg"):
        predict(checkpoint, [photo, "nowhere.jpg"])
    broken = tmp_path / "broken.png"
    broken.write_bytes(photo.read_bytes()[:500])
    with pytest.raises(ImageError, match=r"broken\.png"):
        predict(checkpoint, [broken])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the folder .*empty has no images in it"):
        predict(checkpoint, [tmp_path / "empty"])
    with pytest.raises(ValueError, match="top is 0; it must be an integer of at least 1"):
        predict(checkpoint, [photo], top=0)
    with pytest.raises(ValueError, match="size is 0"):
        predict(checkpoint, [photo], size=0)


def test_checkpoints_that_are_no_classifiers(photo: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        predict(tmp_path / "none.safetensors", [photo])
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        predict(photo, [photo])
    headless = save(VisionLongformer(SMALL_MODELS["two_stages"], num_classes=0), tmp_path / "headless.safetensors")
    with pytest.raises(CheckpointError, match="is not a classifier: its model has no classes"):
        predict(headless, [photo])
    few = {**PREPARE.to_dict(), "classes": ["ant", "bee"]}
    other = save(build("two_stages"), tmp_path / "few.safetensors", info={"preprocessing": few})
    with pytest.raises(CheckpointError, match="names 2 classes, but its model has 5"):
        predict(other, [photo])


# The command


def _vil(*argv: object) -> None:
    run_command("vil", Group("", {"predict": predict_command}), [str(word) for word in argv], "0")


def test_predict_command(checkpoint: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = _photo(tmp_path / "second.jpg", 30, 200, seed=3)
    expected = predict(checkpoint, [photo, second], top=2)
    _vil("predict", checkpoint, photo, second, "--top", 2)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for prediction in expected:
        at = rows.index([prediction.file])
        printed = [row for row in rows[at : at + 6] if row and row[0] in CLASSES]
        pairs = zip(prediction.labels, prediction.probabilities, strict=True)
        assert printed == [[label, f"{100 * probability:.2f}"] for label, probability in pairs]
    _vil("predict", checkpoint, photo, second, "--top", 1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if str(tmp_path) in line]
    assert rows == [[one.file, one.labels[0], f"{100 * one.probabilities[0]:.2f}"] for one in expected]
    _vil("predict", checkpoint, "--json", photo, second, "--top=2", "--picture", tmp_path / "out")
    data = json.loads(capsys.readouterr().out)
    assert [(row["file"], tuple(row["labels"]), tuple(row["probabilities"])) for row in data] == [
        (prediction.file, prediction.labels, prediction.probabilities) for prediction in expected
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["photo.png", "second.png"]


def test_images_must_be_given(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="the following arguments are required: images"):
        _vil("predict", checkpoint)


def test_pictures_are_refused_before_the_work(checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"photo\.png exists"):
        _vil("predict", checkpoint, photo, "--picture", tmp_path)
    twin = tmp_path / "photo.jpg"
    _photo(twin)
    with pytest.raises(ValueError, match=r"photo\.png and .*photo\.jpg would both be written to .*photo\.png"):
        _vil("predict", "missing.safetensors", photo, twin, "--picture", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_images_are_skipped_if_asked(
    checkpoint: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.png").write_text("no image")
    (folder / "b.png").write_bytes(photo.read_bytes())
    with pytest.raises(ImageError, match=r"a\.png cannot be read as an image: it is of no known format"):
        predict(checkpoint, [folder])
    main(["predict", str(checkpoint), str(folder), "--skip-bad-images", "--picture", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert str(folder / "b.png") in output.out
    assert f"skipped: {folder / 'a.png'} cannot be read" in output.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.png"]
    main(["predict", str(checkpoint), str(photo), "--picture", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main(["predict", str(checkpoint), str(photo), "--picture", str(tmp_path / "out")])
    main(["predict", str(checkpoint), str(photo), "--picture", str(tmp_path / "out"), "--overwrite"])
