"""What is in an exported file: metadata, names of inputs, outputs and axes, and nothing of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from vision_longformer import __version__
from vision_longformer.errors import CheckpointError
from vision_longformer.export import load_exported, writers
from vision_longformer.export.writers import (
    Graph,
    decode_metadata,
    encode_metadata,
    file_metadata,
    trace,
    write_onnx,
    write_pt2,
)

METADATA = {"format": "vision_longformer_export/1", "kind": "toy", "size": [2, 3], "named": True, "about": "1e5 trees"}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images * self.factor, images.sum(1)


def test_metadata_of_a_file() -> None:
    metadata = file_metadata("detector", {"backbone": "vil"}, dynamic=False, size=(2, 3))
    assert metadata == {
        "alpha": "composite",
        "background": (255, 255, 255),
        "format": "vision_longformer_export/1",
        "version": __version__,
        "kind": "detector",
        "dynamic": False,
        "config": {"backbone": "vil"},
        "size": (2, 3),
    }


def test_metadata_as_text() -> None:
    """Text stays as it is; everything else is JSON."""
    texts = {
        "format": "vision_longformer_export/1",
        "kind": "toy",
        "size": "[2, 3]",
        "named": "true",
        "about": "1e5 trees",
    }
    assert encode_metadata(METADATA) == texts
    assert decode_metadata(texts, Path("x.onnx")) == METADATA
    for foreign in ({}, {"format": "other/1"}):
        with pytest.raises(CheckpointError, match=r"x\.onnx was not written by 'vil export'"):
            decode_metadata(foreign, Path("x.onnx"))


def test_a_file_of_another_version() -> None:
    """Its format, the version that wrote it, and what is installed."""
    message = (
        rf"has the format vision_longformer_export/2, of vision-longformer 9\.1; this is {__version__}, which reads"
    )
    with pytest.raises(CheckpointError, match=message):
        decode_metadata({"format": "vision_longformer_export/2", "version": "9.1"}, Path("x.onnx"))


def test_metadata_that_are_missing() -> None:
    """Whoever needs them says which; whoever can do without them is not told."""
    metadata = decode_metadata({"format": "vision_longformer_export/1", "kind": "toy"}, Path("x.onnx"))
    assert (metadata["kind"], metadata.get("dynamic"), "dynamic" in metadata) == ("toy", None, False)
    with pytest.raises(CheckpointError, match=r"the metadata of x\.onnx has no 'dynamic'; export its checkpoint"):
        metadata["dynamic"]


def test_the_page_has_the_versions_of_operators() -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    assert re.search(rf"ONNX files use version {writers.OPSET} ", page)
    assert re.search(rf"Mask R-CNN use version {writers.OPSET_WITH_ROI_ALIGN},", page)


def test_text_that_is_json_comes_back_as_text() -> None:
    values = {"format": METADATA["format"], "version": "1.0", "note": "true", "quoted": '"a"', "plain": "0.1.0"}
    texts = encode_metadata(values)
    assert (texts["version"], texts["note"], texts["plain"]) == ('"1.0"', '"true"', "0.1.0")
    assert decode_metadata(texts, Path("x.onnx")) == values


def test_onnx_has_names_metadata_and_no_paths(tmp_path: Path) -> None:
    """The batch may vary, and be 1; where the program was traced is not in the file."""
    path, shapes = tmp_path / "scale.onnx", ({0: Dim("batch", min=1)},)
    program = trace(Scale().eval(), (torch.ones(2, 3),), shapes)
    write_onnx(Graph(program, ["images"], ["scaled", "sums"], shapes), path, METADATA)
    session = onnxruntime.InferenceSession(path)
    assert [(one.name, one.shape) for one in session.get_inputs()] == [("images", ["batch", 3])]
    assert [(one.name, one.shape) for one in session.get_outputs()] == [("scaled", ["batch", 3]), ("sums", ["batch"])]
    assert json.loads(session.get_modelmeta().custom_metadata_map["size"]) == [2, 3]
    scaled, sums = load_exported(path)(torch.tensor([[1.0, 1.0, 2.0]]))
    assert (scaled.tolist(), sums.tolist()) == ([[1.0, 2.0, 6.0]], [4.0])
    assert Path(__file__).name.encode() not in path.read_bytes()


def test_pt2_has_metadata(tmp_path: Path) -> None:
    graph = Graph(trace(Scale().eval(), (torch.ones(2, 3),)), ["images"], ["scaled", "sums"])
    write_pt2(graph, tmp_path / "scale.pt2", METADATA)
    exported = load_exported(tmp_path / "scale.pt2")
    assert exported.metadata == METADATA
    assert exported(torch.ones(2, 3))[1].tolist() == [3.0, 3.0]


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are needed are named, with the extra that has them: one to read, three to write."""
    monkeypatch.setattr(writers, "find_spec", lambda name: None if name.startswith(("onnx", "openvino")) else name)
    for name in ("model.onnx", "model.xml", "model.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"ONNX needs onnxruntime; install with: pip install 'vision-longformer\[export\]'"
    ):
        load_exported(tmp_path / "model.onnx")
    with pytest.raises(
        ValueError, match=r"OpenVINO needs openvino; install with: pip .*\[openvino\]', or use \.pt2 files"
    ):
        load_exported(tmp_path / "model.xml")
    with pytest.raises(ValueError, match=r"ONNX needs onnx, onnxscript, onnxruntime; install .* or use \.pt2 files"):
        writers.check_packages(".onnx", to_write=True)
    writers.check_packages(".pt2", to_write=True)


def _broken(*packages: str) -> Any:
    """Python's ``import_module``, for which these packages are broken."""

    def import_module(name: str) -> Any:
        if name in packages:
            raise ImportError("libgomp.so.1: cannot open shared object file\nin full: …")
        return __import__(name)

    return import_module


def test_packages_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is at fault, not the file that it should read."""
    for name in ("model.onnx", "model.xml", "model.bin"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(writers, "import_module", _broken("onnxruntime", "openvino", "onnxscript"))
    for suffix, package, extra in ((".onnx", "onnxruntime", "export"), (".xml", "openvino", "openvino")):
        message = f"^{package} cannot be imported \\(libgomp.* file\\); reinstall it with: pip .*\\[{extra}\\]', or use"
        with pytest.raises(ValueError, match=message):
            load_exported(tmp_path / f"model{suffix}")
    with pytest.raises(ValueError, match=r"^onnxscript cannot be imported \(libgomp.*\[export\]'"):
        writers.check_packages(".onnx", to_write=True)
