"""Exported files: they compute what their model does, at any size, and are used like a checkpoint."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from builders import SMALL_MODELS, assert_close, build, image, small_config
from PIL import Image

from vision_longformer import ModelConfig, VisionLongformer, load, model_config, save
from vision_longformer.classification.evaluate import evaluate
from vision_longformer.classification.export import export_model, load_exported_classifier
from vision_longformer.classification.predict import predict
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.cli.export import export as export_command
from vision_longformer.cli.parser import Group, run_command
from vision_longformer.data.images import decode_image
from vision_longformer.errors import CheckpointError
from vision_longformer.export import ExportedModel, load_exported, writers
from vision_longformer.export.quantise import quantise
from vision_longformer.export.verify import ExportError
from vision_longformer.models import config as cfg

CLASSES = ("ant", "bee", "cat", "dog", "eel")
PREPARE = Preprocessing((32, 32), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 0.9, "bicubic", CLASSES)
LOCAL = cfg.Longformer(window=2)


def _model(*mechanisms: cfg.AttentionConfig, **options: Any) -> VisionLongformer:
    """A small model whose tables are large enough to matter."""
    return _drawn(small_config(*mechanisms, **{"img_size": (32, 32), **options}))


def _drawn(config: ModelConfig) -> VisionLongformer:
    model = VisionLongformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local attention with relative position, then full attention with absolute position."""
    torch.manual_seed(1)
    config = small_config(LOCAL, cfg.Full(), img_size=(32, 32))
    config = replace(config, stages=(replace(config.stages[0], position="relative"), config.stages[1]))
    path = tmp_path_factory.mktemp("export") / "model.safetensors"
    return save(_drawn(config), path, info={"preprocessing": PREPARE.to_dict()})


@pytest.fixture(scope="module", params=["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def any_size(request: pytest.FixtureRequest, checkpoint: Path) -> Path:
    """The checkpoint as a file for any size, written by the command."""
    _vil("export", checkpoint, "--format", request.param, "--dynamic")
    return checkpoint.with_suffix(f".{request.param}")


@pytest.fixture(scope="module")
def exported_model(any_size: Path) -> ExportedModel:
    return load_exported(any_size)


def _vil(*argv: object) -> None:
    run_command("vil", Group("", {"export": export_command}), [str(word) for word in argv], "0")


# What a file computes


def test_one_file_for_any_size(exported_model: ExportedModel, checkpoint: Path) -> None:
    model = load(checkpoint)
    for size in [(32, 32), (33, 45), (91, 68), (1, 1), (8, 200)]:
        for batch in (1, 3):
            images = image(*size, batch=batch)
            with torch.no_grad():
                assert_close(exported_model(images), model(images), 1e-5, f"logits of {batch} images of {size}")


@pytest.mark.slow
def test_other_mechanisms_at_a_fixed_size(tmp_path: Path) -> None:
    """One of each after another, and not at the size that tables and projections were made for."""
    mechanisms = (cfg.Full(), cfg.GlobalMemory(), cfg.Linformer(6), cfg.SpatialReduction(4), cfg.Performer(8))
    model = _model(*mechanisms, patches=(4, 1, 1, 1, 1))
    exported = export_model(model, tmp_path / "model.onnx", size=(40, 28))
    images = image(40, 28, batch=3)
    with torch.no_grad():
        assert_close(load_exported(exported.path)(images), model(images), 1e-5)


def test_backbone(tmp_path: Path) -> None:
    """Two stages, the second of one chunk; the maps of both come out, and the model stays as it was."""
    model = _model(LOCAL, LOCAL, position="relative").train()
    exported = export_model(model, tmp_path / "maps.onnx", backbone=True, size=16)
    images = image(16, 16)
    maps = load_exported(exported.path)(images)
    with torch.no_grad():
        expected = model.eval().forward_intermediates(images, intermediates_only=True)
    for got, wanted in zip(maps, expected, strict=True):
        assert_close(got, wanted, 1e-5)
    assert exported.metadata["strides"] == [4, 8]
    session = onnxruntime.InferenceSession(exported.path)
    assert [one.name for one in session.get_outputs()] == ["stage_1", "stage_2"]
    assert model.config.img_size == (32, 32)


@pytest.mark.parametrize("any_size", ["onnx"], indirect=True)
def test_names_in_onnx(any_size: Path) -> None:
    session = onnxruntime.InferenceSession(any_size)
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.shape) == ("images", ["batch", 3, "height", "width"])
    assert (logits.name, logits.shape) == ("logits", ["batch", 5])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)


def test_the_documented_names_are_those_of_a_file(any_size: Path, tmp_path: Path) -> None:
    """All that the page has for classifiers, and nothing else; one more in a quantised file."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| ([a-z, ]+) \| .+ \|$", page, re.MULTILINE)
    documented: dict[str, set[str]] = {"quantised": set()}
    for names, kinds in rows:
        for kind in kinds.split(", "):
            documented.setdefault(kind, set()).update(re.findall(r"`(\w+)`", names))
    assert documented["all"] | documented["classifiers"] == set(load_exported(any_size).metadata)
    if any_size.suffix == ".onnx":
        stored = onnxruntime.InferenceSession(any_size).get_modelmeta().custom_metadata_map
        assert set(stored) == documented["all"] | documented["classifiers"]
        assert (stored["alpha"], json.loads(stored["background"])) == ("composite", [255, 255, 255])
        smaller = quantise(any_size, "int8", tmp_path / "int8.onnx")
        assert set(load_exported(smaller).metadata) - set(stored) == documented["quantised"]


def test_the_background_in_the_metadata_is_what_images_are_composed_with(exported_model: ExportedModel) -> None:
    """A red pixel of half alpha on white is pink, and a pixel without alpha is the background."""
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 128))
    file = io.BytesIO()
    image.save(file, "PNG")
    seen = decode_image(file)
    assert list(seen.getpixel((0, 0))) == exported_model.metadata["background"]
    assert seen.getpixel((1, 0)) == (255, 127, 127)


def test_metadata(exported_model: ExportedModel, checkpoint: Path) -> None:
    data = exported_model.metadata
    assert (data["kind"], data["dynamic"], data["version"]) == ("classifier", True, "0.1.0")
    assert Preprocessing.from_dict(data, "file") == PREPARE
    assert ModelConfig.from_dict(data["config"]) == load(checkpoint).config


def test_a_file_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(cfg.Full())
    run = torch.export.ExportedProgram.module
    monkeypatch.setattr(torch.export.ExportedProgram, "module", lambda self: lambda x: run(self)(x) + 0.01)
    with pytest.raises(ExportError, match=r"differs from its model by 0\.01 on an input of \(2, 3, 32, 32\)"):
        export_model(model, tmp_path / "model.pt2", format="pt2")
    assert list(tmp_path.iterdir()) == []


# A file in place of a checkpoint


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos") / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(path)
    return path


def test_predict_as_the_checkpoint_does(any_size: Path, checkpoint: Path, photo: Path) -> None:
    for size in (45, (24, 41)):
        (got,), (expected,) = (predict(file, [photo], size=size) for file in (any_size, checkpoint))
        assert got.labels == expected.labels
        assert got.probabilities == pytest.approx(expected.probabilities, rel=1e-5)


def test_evaluate_as_the_checkpoint_does(any_size: Path, checkpoint: Path, tmp_path: Path) -> None:
    drawn = np.random.default_rng(1)
    images, labels = drawn.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8), np.arange(10) % 4
    np.savez(tmp_path / "data.npz", test_x=images, test_y=labels, classes=np.array(CLASSES))
    options = {"data": str(tmp_path / "data.npz"), "batch_size": 4, "workers": 0}
    got, expected = (evaluate(file, **options) for file in (any_size, checkpoint))
    assert got[:3] == expected[:3]
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    with pytest.raises(ValueError, match="computes in the precision that it was exported with"):
        evaluate(any_size, **options, precision="bf16")


def test_a_fixed_size_is_kept_to(checkpoint: Path, photo: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "fixed.pt2"
    _vil("export", checkpoint, output, "--format", "pt2", "--size", "24x40")
    lines = capsys.readouterr().out.splitlines()
    compared = [line.split("  ")[1] for line in lines if "24×40" in line]
    assert compared == ["2 images of 24×40", "1 image of 24×40"]
    assert lines[-1].startswith(f"wrote {output}: 0.")
    classifier = load_exported_classifier(output)
    assert classifier.preprocessing == Preprocessing(**{**PREPARE.to_dict(), "size": (24, 40)})
    assert classifier.model.metadata["config"]["img_size"] == [24, 40]
    with torch.no_grad():
        images = image(24, 40)
        assert_close(classifier.model(images), load(checkpoint)(images), 1e-5)
    targets = {str(node.target) for node in torch.export.load(output).graph.nodes}
    assert "aten.linear.default" in targets
    assert not [name for name in targets if "vision_longformer" in name], "a file must run without this package"
    with pytest.raises(ValueError, match=r"fixed\.pt2 takes images of 24×40 only; export with --dynamic"):
        predict(output, [photo], size=32)
    with pytest.raises(FileExistsError, match=r"fixed\.pt2 exists; .* or replace it with --overwrite"):
        _vil("export", checkpoint, output, "--format", "pt2")


@pytest.mark.parametrize(
    ("checkpoint", "output"),
    [
        ("runs/trees-1/best.safetensors", "runs/trees-1/best.onnx"),
        ("runs/trees-v1.5", "runs/trees-v1.5.onnx"),
        ("cifar10", "cifar10.onnx"),
        ("hf-hub:somebody/trees-v1.5", "trees-v1.5.onnx"),
        ("hf-hub:somebody/trees@v2.0", "trees.onnx"),
    ],
)
def test_where_the_file_is_by_default(checkpoint: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: Path, overwrite: bool) -> None:
        raise FileExistsError(path)

    monkeypatch.setattr("vision_longformer.cli.export.check_free", stop)
    with pytest.raises(FileExistsError, match=f"^{re.escape(output)}$"):
        _vil("export", checkpoint)


# Mistakes


@pytest.mark.parametrize(
    ("mechanisms", "part"),
    [
        ((LOCAL, cfg.Linformer(6)), "stage 2 cannot be exported for any size: its linformer attention projects"),
        ((cfg.SpatialReduction(4),), "stage 1 cannot be exported for any size: its spatial_reduction attention"),
    ],
)
def test_what_cannot_be_for_any_size(mechanisms: Any, part: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{part}.*export it for one size instead"):
        export_model(_model(*mechanisms), tmp_path / "model.onnx", dynamic=True)


def test_wrong_input(checkpoint: Path, tmp_path: Path) -> None:
    for argv, sentence in [
        ((checkpoint, "--format", "tflite"), "unknown format 'tflite'"),
        ((checkpoint, "model.pt2"), r"model\.pt2 should end in \.onnx, as the format is onnx"),
        ((checkpoint, "--size", "32", "--dynamic"), "a file for any size has no size of its own"),
        (("vision_longformer_tiny",), "vision_longformer_tiny is a model without weights; give a .safetensors file"),
        ((tmp_path / "none.safetensors",), "there is no file"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            _vil("export", *argv, "--overwrite")
    (tmp_path / "model.onnx").write_bytes(b"a graph")
    with pytest.raises(
        CheckpointError, match=r"model\.onnx is an exported file, .* give the \.safetensors file or run"
    ):
        _vil("export", tmp_path / "model.onnx", tmp_path / "again.onnx")
    headless = save(VisionLongformer(SMALL_MODELS["two_stages"], num_classes=0), tmp_path / "headless.safetensors")
    with pytest.raises(CheckpointError, match="has no classes"):
        _vil("export", headless)
    with pytest.raises(ValueError, match="no classification head; export it as a backbone"):
        export_model(load(headless), tmp_path / "headless.onnx")


def test_files_that_are_no_exported_models(tmp_path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As :mod:`test_runtime` tests it of the files themselves, and before anything is traced."""
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"broken\.onnx is not a valid \.onnx file"):
        predict(tmp_path / "broken.onnx", [photo])
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ONNX needs onnx, onnxscript, onnxruntime; install with: pip install"):
        export_model(build("flat"), tmp_path / "model.onnx")


# Slow: more of what a file for any size may hold, and full size


MECHANISMS = ["vil", "vil_exact", "vil_cyclic", "vil_no_tokens", "global", "performer", "flat_1d"]
ONE_TOKEN = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="torch.export ties a Performer to maps of more than one token"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[ONE_TOKEN] if (name, format) == ("performer", "pt2") else [])
        for name in MECHANISMS
        for format in ("onnx", "pt2")
    ],
)
def test_mechanisms_at_any_size(name: str, format: str, tmp_path: Path) -> None:
    model = build(name).eval()
    exported = export_model(model, tmp_path / f"model.{format}", format=format, dynamic=True)
    images = image(57, 20, batch=3)
    with torch.no_grad():
        assert_close(load_exported(exported.path)(images), model(images), 1e-4)


def _shallow(name: str) -> VisionLongformer:
    """A named model with one block per stage: tracing takes long, and further blocks are like the first."""
    config = model_config(name)
    return _drawn(config.override(stages=[replace(stage, depth=1) for stage in config.stages]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "format"), [("tiny", "onnx"), ("tiny_ape", "pt2"), ("small", "pt2"), ("small_ape", "onnx")]
)
def test_full_width_and_size(size: str, format: str, tmp_path: Path) -> None:
    model = _shallow(f"vision_longformer_{size}")
    exported = export_model(model, tmp_path / f"model.{format}", format=format, dynamic=True)
    assert [one.shape[2:] for one in exported.differences] == [(224, 224), (225, 301), (640, 480), (32, 32)]
    assert max(one.difference / one.largest for one in exported.differences) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["full", "global", "linformer", "sra64", "performer", "partial_vil"])
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_other_mechanisms_at_full_size(mechanism: str, format: str, tmp_path: Path) -> None:
    model = _shallow(f"msvit_tiny_1_1_9_1_{mechanism}")
    exported = export_model(model, tmp_path / f"model.{format}", format=format)
    assert max(one.difference / one.largest for one in exported.differences) <= 1e-4
