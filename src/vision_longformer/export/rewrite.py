"""Graphs in the form that runtimes compute fastest, with the same results: of torch's operators, ONNX's and OpenVINO's.

What is rewritten has exactly the form in which torch writes our models; anything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

TO_HEADS = (0, 2, 1, 3)
"""From (B, tokens, heads, dim) to (B, heads, tokens, dim), and back."""


def rewrite_program(program: ExportedProgram) -> None:
    """Erase operations without effect, in place: a sixth of our models', each of which takes torch time to handle.

    They are dropout in evaluation, conversions of tensors to the type that they have, and the assertions beside them.
    """
    aten, graph = torch.ops.aten, program.graph
    outputs = graph.output_node().all_input_nodes
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif _changes_nothing(node) and node not in outputs:  # outputs are known by their names
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _changes_nothing(node: Node) -> bool:
    aten = torch.ops.aten
    if node.target is aten.dropout.default:
        return node.args[2] is False
    if node.target is aten.to.dtype and len(node.args) == 2:  # more of them may ask for a copy
        return bool(node.all_input_nodes[0].meta["val"].dtype == node.meta["val"].dtype)
    return False


def rewrite_onnx(model: Any) -> None:
    """Rewrite a model of onnx_ir in place."""
    from onnx_ir.passes import common

    for node in list(model.graph):
        if node.op_type == "Reshape":
            _unpack_projection(model.graph, node)
        elif node.op_type == "Attention":
            _attend_in_rows(model.graph, node)
    common.RemoveUnusedNodesPass()(model)


def _unpack_projection(graph: Any, reshape: Any) -> None:
    """Queries, keys and values from three products instead of one whose result is split, which copies it.

    ``reshape`` has the result of one product, to (B, tokens, 3, heads, dim).
    """
    shape, users = _constant(reshape.inputs[1]), _users(reshape)
    parts = [part for part in map(_taken_part, users) if part is not None]
    product, bias = _linear(reshape.inputs[0])
    if product is None or shape is None or len(shape) != 5 or shape[2] != 3 or len(parts) < len(users):
        return
    weights = np.split(_constant(product.inputs[1]), 3, 1)
    for part, taken in parts:
        add, scale = _Builder(graph, taken), np.float32(_take_scale(taken) if part == 0 else 1)
        rows = add("MatMul", product.inputs[0], weights[part] * scale)
        if bias is not None:
            rows = add("Add", rows, np.split(bias, 3)[part] * scale)
        add.replace(taken.outputs[0], add("Reshape", rows, np.array([0, 0, *shape[3:]])))


def _take_scale(queries: Any) -> float:
    """The factor of the scores of the queries that a node gives, which then is one; it costs nothing in a weight."""
    from onnx_ir import AttrFloat32

    attentions = list(_attentions(queries))
    scales = {0.0 if node is None else node.attributes.get_float("scale", 0.0) for node in attentions}
    if len(scales) != 1 or 0.0 in scales:
        return 1.0
    for node in attentions:
        node.attributes.add(AttrFloat32("scale", 1.0))
    return scales.pop()


def _attentions(queries: Any) -> Iterator[Any]:
    """The attention nodes that the result of a node reaches as their queries; None for whatever else it reaches."""
    for user, place in (use for output in queries.outputs for use in output.uses()):
        if user.op_type in ("Reshape", "Gather", "Slice", "Split", "Transpose") and place == 0:
            yield from _attentions(user)
        else:
            yield user if user.op_type == "Attention" and place == 0 else None


def _taken_part(piece: Any) -> tuple[int, Any] | None:
    """Which of the parts along axis 2 a ``Slice`` takes, and the ``Squeeze`` after it."""
    bounds = [_constant(value) for value in piece.inputs[1:]]
    if piece.op_type != "Slice" or len(bounds) != 3 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    start, end, axis = (int(bound[0]) for bound in bounds)
    users = _users(piece)
    if axis != 2 or end != start + 1 or [user.op_type for user in users] != ["Squeeze"] or _is_result(users[0]):
        return None
    return start, users[0]


def _linear(value: Any) -> tuple[Any, np.ndarray | None]:
    """The ``MatMul`` by a constant of which ``value`` is the result, and the constant added to it, if any."""
    product, bias = value.producer(), None
    if product is not None and product.op_type == "Add":
        product, bias = product.inputs[0].producer(), _constant(product.inputs[1])
    if product is None or product.op_type != "MatMul" or _constant(product.inputs[1]) is None:
        return None, None
    return product, bias


def _attend_in_rows(graph: Any, attention: Any) -> None:
    """Attention that takes and gives (B, tokens, heads · dim), where its inputs and its result are transposed."""
    transposed, after = [value.producer() for value in attention.inputs[:3]], _users(attention)
    if len(after) != 1 or _is_result(after[0]) or not all(_permutes(node, TO_HEADS) for node in (*transposed, *after)):
        return
    heads, add = int(attention.inputs[0].shape[1]), _Builder(graph, attention)
    rows = (add("Reshape", node.inputs[0], np.array([0, 0, -1])) for node in transposed)
    scale = attention.attributes["scale"].as_float()
    out = add("Attention", *rows, *attention.inputs[3:], q_num_heads=heads, kv_num_heads=heads, scale=scale)
    add.replace(after[0].outputs[0], add("Reshape", out, np.array([0, 0, heads, -1])))


def rewrite_openvino(model: Any) -> None:
    """Rewrite a model of OpenVINO in place: attention as two products, which it fuses into one kernel, and patches as
    rows of one product.

    Of its own operator for attention it makes the same, but also transposes keys and looks for results that are not a
    number. Around a convolution it changes the layout of the map before and after, where the number of images is free.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention" and node.get_input_size() >= 5:
            _attend_by_products(node)
        elif node.get_type_name() == "Convolution":
            _embed_patches(node)
    model.validate_nodes_and_infer_types()


def _attend_by_products(attention: Any) -> None:
    import openvino.opset13 as operators

    q, k, v, mask, scale = (attention.input_value(index) for index in range(5))
    if scale.get_node().get_data() != 1:
        q = operators.multiply(q, scale).output(0)
    rows = _attend_few(q, k, v, mask)
    if rows is None:
        scores = operators.add(operators.matmul(q, k, False, True), mask)
        rows = operators.matmul(operators.softmax(scores, -1), v, False, False)
    for user in attention.output(0).get_target_inputs():
        if user.get_node().get_type_name() == "Select":
            user.get_node().output(0).replace(rows.output(0))


MOST_ROWS = 16
"""Of queries times heads, up to which keys of all heads are multiplied by queries that are zero in other heads."""


def _attend_few(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention of the few global queries (B, heads, n, dim) without transposing the keys and values of a map.

    Queries are (B, heads · n, heads · dim), zero but for their own head, and each product reads whole tokens.
    """
    import openvino.opset13 as operators

    keys, values = _rows_of_heads(k), _rows_of_heads(v)
    heads, count, dim = list(q.get_partial_shape())[1:]
    if keys is None or values is None or count.is_dynamic or heads.get_length() * count.get_length() > MOST_ROWS:
        return None
    heads, count, dim = heads.get_length(), count.get_length(), dim.get_length()
    own = operators.constant(np.eye(heads, dtype=np.float32).reshape(1, heads, 1, heads, 1))
    wide = operators.multiply(operators.reshape(q, [0, heads, count, 1, dim], True), own)
    wide = operators.reshape(wide, [0, heads * count, heads * dim], True)
    scores = operators.transpose(operators.matmul(keys, wide, False, True), [0, 2, 1])
    scores = operators.add(operators.reshape(scores, [0, heads, count, -1], True), mask)
    weights = operators.reshape(operators.softmax(scores, -1), [0, heads * count, -1], True)
    rows = operators.matmul(weights, values, False, False)
    rows = operators.multiply(operators.reshape(rows, [0, heads, count, heads, dim], True), own)
    return operators.reduce_sum(rows, operators.constant(np.array([3])), False)


def _rows_of_heads(heads: Any) -> Any:
    """Rows (B, n, heads · dim) of what is transposed to (B, heads, n, dim); None for others."""
    import openvino.opset13 as operators

    node = heads.get_node()
    if _permutation(node) != TO_HEADS:
        return None
    return operators.reshape(node.input_value(0), [0, 0, -1], True)


def _embed_patches(convolution: Any) -> None:
    """Rows (B, n, dim) from a product, where a convolution of whole patches has a bias added and gives them."""
    import openvino.opset13 as operators

    add, image = _only_user(convolution), convolution.input_value(0)
    kernel, rows = _constant_input(convolution, 1), _as_tokens(add)
    if kernel is None or rows is None or not _of_whole_patches(convolution, image):
        return
    dim, channels, patch, _ = kernel.shape
    height, width = (side.get_length() // patch for side in list(image.get_partial_shape())[2:])
    tokens = _tokens_of(image.get_node())
    if tokens is None:
        split, order = [0, channels, height, patch, width, patch], [0, 2, 4, 1, 3, 5]
        source, kernel = image, kernel.reshape(dim, -1)
    else:
        split, order = [0, height, patch, width, patch * channels], [0, 1, 3, 2, 4]
        source, kernel = tokens, kernel.transpose(0, 2, 3, 1).reshape(dim, -1)
    patches = operators.transpose(operators.reshape(source, split, True), order)
    patches = operators.reshape(patches, [0, height * width, kernel.shape[1]], True)
    product = operators.matmul(patches, operators.constant(np.ascontiguousarray(kernel.T)), False, False)
    bias = operators.constant(_constant_input(add, 1).reshape(1, 1, dim))
    rows.output(0).replace(operators.add(product, bias).output(0))


def _of_whole_patches(convolution: Any, image: Any) -> bool:
    """Whether a convolution without padding steps by its kernel's side, a square that divides the image's sides."""
    _, _, *kernel = convolution.input_value(1).get_partial_shape()
    attributes, shape = convolution.get_attributes(), image.get_partial_shape()
    patch = kernel[0].get_length()
    return (
        attributes["strides"] == [patch, patch] == [kernel[1].get_length()] * 2
        and not any((*attributes["pads_begin"], *attributes["pads_end"]))
        and attributes["auto_pad"] in ("explicit", "valid")
        and all(side.is_static and side.get_length() % patch == 0 for side in list(shape)[2:])
    )


def _as_tokens(add: Any) -> Any:
    """The transposition to (B, h · w, dim) of a map (B, dim, h, w) that is the sum with a constant; None for others."""
    if add is None or add.get_type_name() != "Add" or _constant_input(add, 1) is None:
        return None
    reshape = _only_user(add)
    transpose = None if reshape is None or reshape.get_type_name() != "Reshape" else _only_user(reshape)
    return transpose if transpose is not None and _permutation(transpose) == (0, 2, 1) else None


def _tokens_of(reshape: Any) -> Any:
    """The tokens (B, h · w, channels) that are transposed and reshaped to a map; None for an image."""
    before = reshape.input_value(0).get_node() if reshape.get_type_name() == "Reshape" else reshape
    return before.input_value(0) if _permutation(before) == (0, 2, 1) else None


def _permutation(node: Any) -> tuple[int, ...] | None:
    order = _constant_input(node, 1) if node.get_type_name() == "Transpose" else None
    return None if order is None else tuple(map(int, order))


def _constant_input(node: Any, index: int) -> Any:
    """The numbers of an input of a node of OpenVINO, if they are constant."""
    source = node.input_value(index).get_node()
    return source.get_data() if source.get_type_name() == "Constant" else None


def _only_user(node: Any) -> Any:
    """The node that takes the result of another, if it is one only."""
    users = list(node.output(0).get_target_inputs())
    return users[0].get_node() if len(users) == 1 else None


def _permutes(node: Any, order: tuple[int, ...]) -> bool:
    return node is not None and node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == order


def _is_result(node: Any) -> bool:
    """Whether a node gives a result of the whole graph, which has a name to keep."""
    return bool(node.outputs[0].is_graph_output())


def _constant(value: Any) -> Any:
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _users(node: Any) -> list[Any]:
    return [user for user, _ in node.outputs[0].uses()]


class _Builder:
    """Adds nodes to a graph before one that it has."""

    def __init__(self, graph: Any, before: Any) -> None:
        self._graph, self._before, self._count = graph, before, 0

    def __call__(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        """The result of an operator; arrays among its inputs become constants."""
        import onnx_ir

        values = [self._initializer(value) if isinstance(value, np.ndarray) else value for value in inputs]
        node = onnx_ir.node(operator, values, attributes)
        node.outputs[0].name = self._name()
        self._graph.insert_before(self._before, node)
        return node.outputs[0]

    def replace(self, old: Any, new: Any) -> None:
        """Let all that use a value use another."""
        import onnx_ir

        onnx_ir.convenience.replace_all_uses_with(old, new)

    def _initializer(self, array: np.ndarray) -> Any:
        import onnx_ir

        tensor = onnx_ir.tensor(np.ascontiguousarray(array), name=self._name())
        type, shape = onnx_ir.TensorType(tensor.dtype), onnx_ir.Shape(array.shape)
        value = onnx_ir.Value(name=tensor.name, shape=shape, type=type, const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _name(self) -> str:
        self._count += 1
        return f"{self._before.outputs[0].name}/{self._count}"
