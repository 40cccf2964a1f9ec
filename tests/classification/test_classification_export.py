"""Checkpoints exported and read again, and two exported files compared: in turn, on the same images."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import IMAGE_CLASSES, grey_arrays, small_config, write_npz
from torch import Tensor

from vision_longformer import VisionLongformer, save
from vision_longformer.classification import evaluate, export
from vision_longformer.classification.export import (
    ExportedClassifier,
    compare_exports,
    export_checkpoint,
    load_exported_classifier,
)
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.cli.main import main
from vision_longformer.errors import CheckpointError
from vision_longformer.export import ExportedModel
from vision_longformer.export.writers import FORMAT, decode_metadata, encode_metadata
from vision_longformer.models.config import Full

PREPARE = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic", IMAGE_CLASSES)


class _Files:
    """Stand-ins for exported files, by name: what they predict of images of grey values, and the calls in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def load(self, path: Path) -> ExportedClassifier:
        def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            (images,) = inputs
            self.calls.append((path.name, len(images)))
            values = (images[:, 0, 0, 0] * 127.5 + 127.5).round().long()
            right = values % 3
            predicted = torch.where(values < 2, (right + 1) % 3, right) if path.name == "worse.onnx" else right
            return (torch.eye(3)[predicted],)

        return ExportedClassifier(ExportedModel(run, {}), PREPARE, named=True)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Files:
    for name, length in (("good.onnx", 30), ("worse.onnx", 20)):
        (tmp_path / name).write_bytes(bytes(length))
    files = _Files()
    monkeypatch.setattr(export, "load_exported_classifier", files.load)
    return files


@pytest.fixture
def data(tmp_path: Path) -> str:
    arrays: dict[str, Any] = {"test_x": grey_arrays(14, 3), "test_y": np.arange(14) % 3}
    return str(write_npz(tmp_path / "grey.npz", **arrays, classes=np.array(IMAGE_CLASSES)))


def test_each_file_is_first_on_every_other_batch(files: _Files, data: str, tmp_path: Path) -> None:
    """Fourteen images in batches of four: a warm-up of each, then four batches, the last of two images."""
    progress: list[tuple[int, int]] = []
    compare_exports(
        tmp_path / "good.onnx",
        tmp_path / "worse.onnx",
        data,
        batch_size=4,
        workers=0,
        progress=lambda *done: progress.append(done),
    )
    warm_up, timed = files.calls[:2], files.calls[2:]
    assert warm_up == [("good.onnx", 4), ("worse.onnx", 4)]
    assert timed == [
        *[("good.onnx", 4), ("worse.onnx", 4)],
        *[("worse.onnx", 4), ("good.onnx", 4)],
        *[("good.onnx", 4), ("worse.onnx", 4)],
        *[("worse.onnx", 2), ("good.onnx", 2)],
    ]
    assert progress == [(4, 14), (8, 14), (12, 14), (14, 14)]


def test_what_is_compared(files: _Files, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file is wrong about two of fourteen images. Batches of 8 and 6 take 1 s each by a clock of seconds."""
    clock = itertools.count()
    monkeypatch.setattr(export, "perf_counter", lambda: float(next(clock)))
    comparison = compare_exports(tmp_path / "good.onnx", tmp_path / "worse.onnx", data, batch_size=8, workers=0)
    good, worse = comparison.before, comparison.after
    assert comparison.changed == 2
    assert (good.path, good.bytes, worse.path, worse.bytes) == (tmp_path / "good.onnx", 30, tmp_path / "worse.onnx", 20)
    assert (good.result.samples, good.result.top1, worse.result.top1) == (14, 100, pytest.approx(100 * 12 / 14))
    assert good.seconds == worse.seconds == pytest.approx((1 / 8 + 1 / 6) / 2)
    assert worse.result.loss > good.result.loss


@pytest.mark.parametrize("named", [True, False])
def test_an_exported_checkpoint_says_whether_its_classes_have_names(named: bool, tmp_path: Path) -> None:
    """A checkpoint without names, as converted ones are, takes those of the data it is evaluated on."""
    model = VisionLongformer(small_config(Full(), img_size=(16, 16), num_classes=3))
    info = {"preprocessing": PREPARE.to_dict()} if named else None
    checkpoint = save(model, tmp_path / "model.safetensors", info=info)
    path = export_checkpoint(checkpoint, tmp_path / "model.pt2", format="pt2").path
    classifier = load_exported_classifier(path)
    assert classifier.named == named
    assert classifier.preprocessing.classes == (IMAGE_CLASSES if named else ("0", "1", "2"))
    assert classifier.preprocessing.mean == ((0.5,) * 3 if named else (0.485, 0.456, 0.406))
    classes = ("ant", "bee", "cow")
    arrays: dict[str, Any] = {"test_x": grey_arrays(4, 3), "test_y": np.arange(4) % 3, "classes": np.array(classes)}
    data = str(write_npz(tmp_path / "others.npz", **arrays))
    if named:
        with pytest.raises(ValueError, match="lacks class 'cat', which the model has"):
            evaluate(path, data, workers=0)
    else:
        assert evaluate(path, data, workers=0).classes == classes


def test_files_that_were_exported_before_their_run_went_on_are_told(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = VisionLongformer(small_config(Full(), img_size=(16, 16), num_classes=3))
    checkpoint = save(model, tmp_path / "best.safetensors", info={"preprocessing": PREPARE.to_dict()})
    path = export_checkpoint(checkpoint, tmp_path / "best.pt2", format="pt2").path
    command = ["evaluate", str(path), "--data", data, "--workers", "0"]
    main(command)
    assert capsys.readouterr().err == ""
    os.utime(path, (1000, 1000))
    main(command)
    assert capsys.readouterr().err.startswith(f"{path} is older than best.safetensors beside it")


def test_an_exported_backbone_is_no_classifier(tmp_path: Path) -> None:
    model = VisionLongformer(small_config(Full(), img_size=(16, 16), num_classes=0))
    checkpoint = save(model, tmp_path / "model.safetensors")
    path = export_checkpoint(checkpoint, tmp_path / "model.pt2", backbone=True, format="pt2").path
    with pytest.raises(CheckpointError, match=r"model\.pt2 is an exported backbone; a classifier is needed here"):
        load_exported_classifier(path)


def test_a_file_that_does_not_say_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither which kind of model it holds, nor whether it takes images of any size."""
    texts = encode_metadata({"format": FORMAT, "kind": "classifier", **PREPARE.to_dict()})
    for missing, options in (("kind", {}), ("dynamic", {"size": 32})):
        metadata = decode_metadata({name: text for name, text in texts.items() if name != missing}, Path("x.onnx"))
        monkeypatch.setattr(
            export, "load_exported", lambda path, has=metadata: ExportedModel(lambda images: images, has)
        )
        with pytest.raises(
            CheckpointError, match=rf"the metadata of x\.onnx has no '{missing}'; export its checkpoint"
        ):
            load_exported_classifier("x.onnx", **options)


def test_bad_settings(files: _Files, data: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        compare_exports(tmp_path / "good.onnx", tmp_path / "worse.onnx", data, batch_size=0)
    with pytest.raises(FileNotFoundError, match="there is no data nowhere"):
        compare_exports(tmp_path / "good.onnx", tmp_path / "worse.onnx", "nowhere")
