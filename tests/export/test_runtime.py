"""Exported files, running; and files that are none."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from vision_longformer.errors import CheckpointError
from vision_longformer.export import ExportedModel, is_exported, load_exported


def test_outputs_of_a_file() -> None:
    """One output comes as it is, several as a tuple."""
    one = ExportedModel(lambda inputs: (inputs[0] + inputs[1],), {})
    assert one(torch.tensor([1.0]), torch.tensor([2.0])).tolist() == [3.0]
    two = ExportedModel(lambda inputs: (inputs[0], -inputs[0]), {})
    assert [output.tolist() for output in two(torch.tensor([5.0]))] == [[5.0], [-5.0]]


def test_a_file_computes_in_its_own_precision() -> None:
    """Whatever the surroundings ask for, and without gradients."""
    seen: list[tuple[torch.dtype, bool]] = []

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(((inputs[0] @ inputs[0]).dtype, torch.is_grad_enabled()))
        return inputs

    with torch.autocast("cpu", torch.bfloat16):
        ExportedModel(run, {})(torch.ones(2, 2))
    assert seen == [(torch.float32, False)]


def test_names_of_exported_files() -> None:
    names = ("a.onnx", Path("b.pt2"), "c.safetensors", "onnx", "d.xml")
    assert [is_exported(name) for name in names] == [True, True, False, False, True]


def test_files_that_are_no_exported_models(tmp_path: Path) -> None:
    (tmp_path / "broken.bin").write_bytes(b"")
    for suffix in ("onnx", "pt2", "xml"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            load_exported(tmp_path / f"none.{suffix}")
        broken = tmp_path / f"broken.{suffix}"
        broken.write_bytes(b"not a model")
        with pytest.raises(CheckpointError, match=rf"broken\.{suffix} is not a valid \.{suffix} file"):
            load_exported(broken)
    torch.export.save(torch.export.export(nn.Identity(), (torch.ones(1),)), tmp_path / "foreign.pt2")
    with pytest.raises(CheckpointError, match=r"foreign\.pt2 was not written by 'vil export'"):
        load_exported(tmp_path / "foreign.pt2")
    with pytest.raises(ValueError, match=r"photo\.png should end in \.onnx or \.pt2 or \.xml"):
        load_exported(tmp_path / "photo.png")


@pytest.mark.parametrize(
    ("operator", "domain", "dtype", "said"),
    [
        ("Telepathy", "", onnx.TensorProto.FLOAT, "Telepathy of node node_7"),
        ("Telepathy", "elsewhere", onnx.TensorProto.FLOAT, "elsewhere:Telepathy"),
        ("Sin", "", onnx.TensorProto.BFLOAT16, "Sin(22) of node node_7"),
    ],
)
def test_an_operator_that_onnxruntime_does_not_know(
    operator: str, domain: str, dtype: int, said: str, tmp_path: Path
) -> None:
    """The operator is named, and its node where onnxruntime names it; and what to do."""
    value = [onnx.helper.make_tensor_value_info(name, dtype, [1]) for name in "xy"]
    node = onnx.helper.make_node(operator, ["x"], ["y"], "node_7", domain=domain)
    graph = onnx.helper.make_graph([node], "graph", value[:1], value[1:])
    opsets = [onnx.helper.make_opsetid("elsewhere", 1), onnx.helper.make_opsetid("", 23)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "strange.onnx")
    message = rf"does not know an operator of .*strange\.onnx \({re.escape(said)}\); update it"
    with pytest.raises(CheckpointError, match=message):
        load_exported(tmp_path / "strange.onnx")


@pytest.mark.parametrize(("opset", "said"), [("opset1", "Telepathy"), ("elsewhere", "Telepathy of node node_7")])
def test_an_operator_that_openvino_does_not_know(opset: str, said: str, tmp_path: Path) -> None:
    """OpenVINO names the node of an unknown set of operators only."""
    openvino = pytest.importorskip("openvino")
    operators, path = pytest.importorskip("openvino.opset13"), tmp_path / "strange.xml"
    images = operators.parameter([1], dtype=openvino.Type.f32, name="images")
    openvino.save_model(openvino.Model([operators.relu(images, name="node_7")], [images], "strange"), path)
    text = path.read_text()
    assert text.count('type="ReLU" version="opset1"') == 1
    path.write_text(text.replace('type="ReLU" version="opset1"', f'type="Telepathy" version="{opset}"'))
    with pytest.raises(CheckpointError, match=rf"does not know an operator of .*strange\.xml \({said}\); update it"):
        load_exported(path)
