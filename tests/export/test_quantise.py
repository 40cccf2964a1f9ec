"""Smaller ONNX files: what is in them, how near they stay to the original, and the command."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from vision_longformer import ModelConfig, StageConfig, VisionLongformer
from vision_longformer.classification import evaluate
from vision_longformer.classification.dataset import build_eval_set
from vision_longformer.classification.export import Comparison, calibration_batches, compare_exports, export_model
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.cli.quantise import quantise as command
from vision_longformer.data.sources import FASHION_MNIST_CLASSES, fashion_mnist
from vision_longformer.export import load_exported, writers
from vision_longformer.export.quantise import quantise
from vision_longformer.models.config import Full


def _trained() -> tuple[VisionLongformer, Preprocessing]:
    """A small model after 2,000 of the built-in images; nearly all of its weights are linear layers'."""
    torch.manual_seed(0)
    stage = StageConfig(128, 1, 4, 7, Full(), 1, "absolute")
    model = VisionLongformer(ModelConfig((stage,), img_size=(28, 28), in_chans=1, num_classes=10))
    prepare = Preprocessing.for_model(model.config, FASHION_MNIST_CLASSES, mean=(0.286,), std=(0.353,), crop_pct=1.0)
    train_set = build_eval_set(fashion_mnist("train"), prepare, batch_size=32, workers=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for images, labels in islice(train_set.batches(), 63):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval(), prepare


@pytest.fixture(scope="module")
def trained() -> tuple[VisionLongformer, Preprocessing]:
    return _trained()


def _export(trained: tuple[VisionLongformer, Preprocessing], path: Path, **options: Any) -> Path:
    model, prepare = trained
    return export_model(model, path, info={**prepare.to_dict(), "named": True}, **options).path


@pytest.fixture(scope="module")
def exported(trained: tuple[VisionLongformer, Preprocessing], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(trained, tmp_path_factory.mktemp("exported") / "garments.onnx")


@pytest.fixture(scope="module")
def int8(exported: Path) -> Path:
    return quantise(exported, "int8")


@pytest.fixture(scope="module")
def bf16(exported: Path) -> Path:
    return quantise(exported, "bf16")


def test_int8_has_integer_linear_layers(exported: Path, int8: Path) -> None:
    """Queries, keys, values and three more of the block, and the head; products of tokens with tokens stay."""
    before, after = (Counter(node.op_type for node in onnx.load(path).graph.node) for path in (exported, int8))
    linear = 6 + 1
    assert after["MatMulInteger"] == linear
    assert before["MatMul"] + before["Gemm"] == linear
    assert after["MatMul"] + after["Gemm"] == 0
    assert after["Attention"] == before["Attention"] == 1
    assert int8.name == "garments_int8.onnx"
    assert int8.stat().st_size < 0.4 * exported.stat().st_size


def test_int8_weights_use_seven_bits_for_each_output(int8: Path) -> None:
    weights = [onnx.numpy_helper.to_array(w) for w in onnx.load(int8).graph.initializer if w.data_type == 3]
    matrices = [weight for weight in weights if weight.ndim == 2]
    assert len(matrices) == 7
    for weight in matrices:  # (inputs, outputs), each output scaled by its own largest weight
        assert np.abs(weight.astype(int)).max(0).tolist() == [64] * weight.shape[1]


def test_bf16_rounds_the_weights(exported: Path, bf16: Path) -> None:
    before, after = ({w.name: w for w in onnx.load(path).graph.initializer} for path in (exported, bf16))
    stored = [name for name in after if name.endswith("_bf16")]
    assert len(stored) >= 4 + 2
    for name in stored:
        original = torch.from_numpy(onnx.numpy_helper.to_array(before[name.removesuffix("_bf16")]).copy())
        got = onnx.numpy_helper.to_array(after[name]).astype(np.float32)
        assert np.array_equal(got, original.bfloat16().float().numpy())
    assert bf16.stat().st_size < 0.6 * exported.stat().st_size


@pytest.fixture(scope="module")
def compared(exported: Path, int8: Path) -> Comparison:
    return compare_exports(exported, int8, "fashion-mnist", workers=0)


def test_what_int8_changes(compared: Comparison, exported: Path, int8: Path) -> None:
    before, after = compared.before, compared.after
    assert before.result.top1 > 50
    assert abs(after.result.top1 - before.result.top1) <= 1
    assert (before.path, after.path, after.bytes) == (exported, int8, int8.stat().st_size)
    alone = evaluate(int8, "fashion-mnist", workers=0)
    assert (alone.samples, alone.top1, alone.loss) == pytest.approx((1000, after.result.top1, after.result.loss))


def test_changed_predictions_are_counted(compared: Comparison, exported: Path, int8: Path) -> None:
    """As they are when both files run on their own, on the same batches."""
    prepare = Preprocessing.from_dict(load_exported(exported).metadata, "")
    eval_set = build_eval_set(fashion_mnist("validation"), prepare, batch_size=64, workers=0)
    batches = [images for images, _ in eval_set.batches()]
    models = (load_exported(path) for path in (exported, int8))
    before, after = (torch.cat([model(images).argmax(1) for images in batches]) for model in models)
    assert compared.changed == int((before != after).sum())
    assert 0 < compared.changed <= 20


@pytest.mark.parametrize(("precision", "nearness"), [("int8", 0.05), ("bf16", 0.01)])
def test_outputs_stay_near(precision: str, nearness: float, exported: Path, request: pytest.FixtureRequest) -> None:
    before, after = load_exported(exported), load_exported(request.getfixturevalue(precision))
    images = torch.randn(50, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    wanted = before(images)
    assert 0 < (after(images) - wanted).abs().max() < nearness * wanted.abs().max()
    assert after.metadata == {**before.metadata, "precision": precision}


def test_the_command(compared: Comparison, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "small.onnx"
    command(str(exported), str(output), to="int8", data="fashion-mnist", workers=0)
    printed = capsys.readouterr().out
    assert f"wrote {output}" in printed
    assert f"{output.stat().st_size / exported.stat().st_size:.0%} of the size" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if ".onnx  " in line}
    for name, one in (("garments.onnx", compared.before), ("small.onnx", compared.after)):
        assert rows[name][1] == f"{one.bytes / 1e6:.2f}"
        assert rows[name][3:] == [f"{one.result.top1:.2f}", f"{one.result.loss:.4f}"]
    assert f"{compared.changed} of 1000 predictions changed" in printed


def test_bf16_by_openvino_needs_no_images_for_calibration(
    trained: tuple[VisionLongformer, Preprocessing], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data without a split "train" are enough."""
    images, labels = np.zeros((10, 28, 28), np.uint8), np.arange(10)
    np.savez(tmp_path / "own.npz", validation_x=images, validation_y=labels, classes=np.array(FASHION_MNIST_CLASSES))
    path = _export(trained, tmp_path / "garments.xml", format="openvino")
    command(str(path), to="bf16", data=str(tmp_path / "own.npz"), workers=0)
    assert " of 10 predictions changed" in capsys.readouterr().out


@pytest.mark.slow
def test_int8_by_openvino(trained: tuple[VisionLongformer, Preprocessing], tmp_path: Path) -> None:
    """Calibrated on images of the split that it is not measured on."""
    path = _export(trained, tmp_path / "garments.xml", format="openvino")
    command(str(path), to="int8", data="fashion-mnist", workers=0)
    after = tmp_path / "garments_int8.xml"
    batches = calibration_batches(path, "fashion-mnist", count=12, workers=0)
    assert [tuple(images.shape) for images in batches] == [(8, 1, 28, 28)] * 2
    compared = compare_exports(path, after, "fashion-mnist", workers=0)
    assert compared.before.result.top1 > 50
    assert abs(compared.after.result.top1 - compared.before.result.top1) <= 2
    assert 0 < compared.changed <= 100  # of 1,000; 73 were measured
    assert compared.after.bytes == sum((tmp_path / f"garments_int8.{end}").stat().st_size for end in ("xml", "bin"))
    assert compared.after.bytes < 0.6 * compared.before.bytes
    assert load_exported(after).metadata == {**load_exported(path).metadata, "precision": "int8"}


@pytest.mark.parametrize(
    ("file", "to", "missing", "message"),
    [
        ("m.onnx", "int8", "onnx", r"int8 in ONNX needs onnx; install with: pip .*\[export\]'$"),
        ("m.onnx", "bf16", "ml_dtypes", r"bf16 in ONNX needs ml_dtypes; install with: pip .*\[export\]'$"),
        ("m.xml", "int8", "nncf", r"int8 in OpenVINO needs nncf; install with: pip .*\[openvino\]'$"),
        ("m.xml", "bf16", "openvino", r"bf16 in OpenVINO needs openvino; install with: pip .*\[openvino\]'$"),
    ],
)
def test_packages_that_are_missing(
    file: str, to: str, missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ValueError, match=message):
        quantise(file, to)


def test_mistakes(exported: Path, int8: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown precision 'int4'; did you mean 'int8'"):
        quantise(exported, "int4")
    with pytest.raises(ValueError, match=r"garments\.pt2 should end in \.onnx or \.xml; 'vil export --format onnx'"):
        quantise(exported.with_suffix(".pt2"), "int8")
    with pytest.raises(ValueError, match=r"_int8\.onnx is in int8 already; quantise the file that it was made from"):
        quantise(int8, "bf16")
    with pytest.raises(FileExistsError, match=r"garments_int8\.onnx exists"):
        quantise(exported, "int8")
    with pytest.raises(ValueError, match=r"small\.bin should end in \.onnx"):
        quantise(exported, "int8", tmp_path / "small.bin")
    before = exported.read_bytes()
    for same in (exported, exported.parent / ".." / exported.parent.name / exported.name):
        with pytest.raises(ValueError, match=r"garments\.onnx is the file to quantise, which is kept; give another"):
            quantise(exported, "bf16", same, overwrite=True)
    assert exported.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="there is no file"):
        quantise(tmp_path / "nowhere.onnx", "int8")
    assert list(tmp_path.iterdir()) == []
