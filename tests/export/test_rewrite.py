"""Graphs after rewriting: which operators are left, and that they compute what the module does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnx_ir
import openvino
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision_longformer.export import load_exported
from vision_longformer.export.rewrite import rewrite_onnx
from vision_longformer.export.writers import Graph, trace, write_onnx, write_openvino

METADATA = {"format": "vision_longformer_export/1"}


class Packed(nn.Module):
    """Attention of two heads of 2 channels from one projection; ``used`` is what else uses the queries."""

    def __init__(self, *, bias: bool = True, used: bool = False) -> None:
        super().__init__()
        self.qkv, self.used = nn.Linear(3, 12, bias=bias), used

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unflatten(2, (3, 2, 2)).unbind(2)
        count = tokens.shape[1]
        mask = torch.arange(count**2).view(1, 1, count, count) / 10
        rows = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=0.25)
        return rows.transpose(1, 2) + q if self.used else 2 * rows.transpose(1, 2)


def _write(module: nn.Module, path: Path, inputs: Tensor) -> Path:
    outputs = ["queries", "rows"] if isinstance(module, Results) else ["rows"]
    graph = Graph(trace(module, (inputs,)), ["tokens"], outputs)
    (write_onnx if path.suffix == ".onnx" else write_openvino)(graph, path, METADATA)
    return path


def _attributes(node: Any) -> dict[str, Any]:
    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


class Idle(nn.Module):
    """x + x.double() through dropout and conversions; the second output is a dropout's own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(x.to(torch.float32), 0.5, training=False)
        return x + x.to(torch.float64), F.dropout(x, 0.5, training=False)


def test_operations_without_effect() -> None:
    program = trace(Idle().eval(), (torch.tensor([1.0, 3.0]),))
    operations = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert operations == ["aten.to.dtype", "aten.add.Tensor", "aten.dropout.default"]
    total, dropped = program.module()(torch.tensor([2.0, 5.0]))
    assert total.tolist() == [4.0, 10.0]
    assert total.dtype == torch.float64
    assert dropped.tolist() == [2.0, 5.0]


def test_dropout_in_training_stays() -> None:
    program = trace(nn.Sequential(nn.Dropout(0.5), nn.ReLU()).train(), (torch.ones(4),))
    assert "aten.dropout.default" in [str(node.target) for node in program.graph.nodes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_a_packed_projection(bias: bool, used: bool, tmp_path: Path) -> None:
    """Three products and no split; attention takes (B, tokens, channels), and its scale is in the queries' weights,
    unless something else uses them."""
    module, tokens = Packed(bias=bias, used=used).eval(), torch.randn(2, 5, 3)
    path = _write(module, tmp_path / "packed.onnx", tokens)
    model = onnx.load(path)
    operators = Counter(node.op_type for node in model.graph.node)
    assert set(operators) <= {"MatMul", "Add", "Mul", "Reshape", "Attention"}
    assert (operators["MatMul"], operators["Attention"], operators["Add"]) == (3, 1, 3 * bias + used)
    (attention,) = (_attributes(node) for node in model.graph.node if node.op_type == "Attention")
    assert attention == {"q_num_heads": 2, "kv_num_heads": 2, "scale": 0.25 if used else 1.0}
    weights = {one.name: torch.tensor(onnx.numpy_helper.to_array(one)) for one in model.graph.initializer}
    products = [weights[node.input[1]] for node in model.graph.node if node.op_type == "MatMul"]
    queries, keys, values = module.qkv.weight.detach().T.split(4, 1)
    for found, expected in zip(products, (queries * (1 if used else 0.25), keys, values), strict=True):
        assert torch.equal(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(load_exported(path)(tokens), module(tokens))


class Results(Packed):
    """Queries and rows are results of the graph."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(tokens).unflatten(2, (3, 2, 2)).unbind(2)
        return q, F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=0.25).transpose(1, 2)


class Otherwise(nn.Module):
    """Projections and attention in other forms."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        packed = self.qkv(tokens).unflatten(2, (3, 2, 2))
        heads = packed.transpose(1, 3)
        rows = F.scaled_dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], scale=0.25)
        return rows.flatten(1) + packed[:, :, 0:2].flatten(1).sum(1, keepdim=True)


def test_a_slice_whose_end_is_not_constant() -> None:
    """As in files for any size; the graph stays as it is."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
    cut (float[2, 5, 6] x, int64[1] end) => (float[2, 5, n, 1, 2] y)
      <int64[5] shape = {2, 5, 3, 1, 2}, int64[1] start = {0}, int64[1] axis = {2}>
    {
      split = Reshape(x, shape)
      y = Slice(split, start, end, axis)
    }"""
    model = onnx_ir.from_proto(onnx.parser.parse_model(text))
    rewrite_onnx(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Slice"]


@pytest.mark.parametrize("module", [Results(), Otherwise()])
def test_other_forms_stay(module: nn.Module, tmp_path: Path) -> None:
    tokens = torch.randn(2, 5, 3)
    path = _write(module.eval(), tmp_path / "otherwise.onnx", tokens)
    (attention,) = (node for node in onnx.load(path).graph.node if node.op_type == "Attention")
    assert _attributes(attention)["scale"] == 0.25
    with torch.no_grad():
        torch.testing.assert_close(load_exported(path)(tokens), module(tokens))


@pytest.mark.parametrize("used", [True, False])
def test_attention_in_openvino(used: bool, tmp_path: Path) -> None:
    """Two products and a softmax; queries are multiplied only where their weights could not be (else the result is)."""
    module, tokens = Packed(used=used).eval(), torch.randn(2, 9, 3)
    path = _write(module, tmp_path / "packed.xml", tokens)
    operators = Counter(node.get_type_name() for node in openvino.Core().read_model(path).get_ops())
    assert (operators["MatMul"], operators["Softmax"], operators["Multiply"]) == (3 + 2, 1, 1)
    assert not operators.keys() & {"ScaledDotProductAttention", "IsNaN", "Select", "VariadicSplit"}
    with torch.no_grad():
        torch.testing.assert_close(load_exported(path)(tokens), module(tokens))


@pytest.mark.parametrize(("count", "transposed"), [(8, 3), (9, 4)])
def test_few_queries_in_openvino(count: int, transposed: int, tmp_path: Path) -> None:
    """Up to 16 queries of all heads, of 2 here, meet the keys as they are: only the scores are transposed."""
    module, tokens = Packed(used=True).eval(), torch.randn(2, count, 3)
    path = _write(module, tmp_path / "packed.xml", tokens)
    operators = Counter(node.get_type_name() for node in openvino.Core().read_model(path).get_ops())
    assert (operators["MatMul"], operators["Softmax"]) == (3 + 2, 1)
    assert operators["Transpose"] == transposed  # queries, keys, values and rows; or queries, scores and rows
    with torch.no_grad():
        torch.testing.assert_close(load_exported(path)(tokens), module(tokens))


class Patches(nn.Module):
    """Tokens of patches of an image, then of patches of their map, as stages have them."""

    def __init__(self, *first: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, *first), nn.Conv2d(4, 5, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        image = self.first(image)
        tokens = image.flatten(2).transpose(1, 2).relu()
        image = tokens.transpose(1, 2).unflatten(2, image.shape[2:]).contiguous()
        return self.second(image).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(
    ("first", "size", "products"),
    [
        ((2, 2), (12, 20), 2),
        ((3, 3), (12, 18), 2),
        ((3, 3), (13, 18), 1),  # a row is left over
        ((2, 2), (14, 20), 1),  # of the 7 rows after the first patches one is left over
        ((3, 2), (13, 21), 1),  # patches overlap
        ((2, 2, 1), (10, 18), 1),  # with a border of zeros
        ((2, 2, 0, 2), (13, 21), 1),  # with holes
    ],
)
def test_patches_in_openvino(first: tuple[int, ...], size: tuple[int, int], products: int, tmp_path: Path) -> None:
    """Convolutions of whole patches become products; others stay."""
    module, image = Patches(*first).eval(), torch.randn(2, 3, *size)
    path = _write(module, tmp_path / "patches.xml", image)
    operators = Counter(node.get_type_name() for node in openvino.Core().read_model(path).get_ops())
    assert (operators["MatMul"], operators["Convolution"]) == (products, 2 - products)
    with torch.no_grad():
        torch.testing.assert_close(load_exported(path)(image), module(image), rtol=1e-4, atol=1e-5)
