"""Smaller exported files: weights in bf16, or linear layers in int8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..errors import check_choice
from ..files import atomic_write
from .runtime import load_exported, openvino_core
from .writers import BESIDE, EXTRAS, check_importable, encode_metadata, save_openvino

PRECISIONS = ("int8", "bf16")

LINEAR = ("MatMul", "Gemm")
"""Operators of linear layers; those whose second factor is a weight are quantised."""

PACKAGES = {
    (".onnx", "int8"): ("onnx", "onnxruntime"),
    (".onnx", "bf16"): ("onnx", "onnxruntime", "ml_dtypes"),
    (".xml", "int8"): ("openvino", "nncf"),
    (".xml", "bf16"): ("openvino",),
}
"""What quantises a file, by the end of its name and the precision."""


def quantise(
    path: str | Path,
    to: str,
    output: str | Path | None = None,
    *,
    calibration: Sequence[Tensor] = (),
    overwrite: bool = False,
) -> Path:
    """Write an exported ``.onnx`` or ``.xml`` file with smaller weights, as ``NAME_int8.onnx`` by default.

    Its metadata stay as they are, with ``precision`` added, so that the file is used as before.

    Args:
        path: the file, of a classifier, backbone or detector.
        to: int8: linear layers multiply 8-bit integers, weights scaled per output. onnxruntime scales inputs per batch,
            so that an image's result depends a little on its batch; OpenVINO has fixed scales for them, from
            ``calibration``. bf16: weights are stored in 16 bits, which halves the file. onnxruntime has no bf16 matrix
            products on CPUs and casts them to float32; OpenVINO computes in bf16 on processors that can.
        output: where to write.
        calibration: batches of images (B, C, H, W), prepared as the model takes them, for OpenVINO's int8.
        overwrite: replace an existing file.
    """
    check_choice("precision", to, PRECISIONS)
    path = Path(path)
    _check_source(path, to, calibration)
    output = path.with_stem(f"{path.stem}_{to}") if output is None else Path(output)
    if output.suffix != path.suffix:
        raise ValueError(f"{output.name} should end in {path.suffix}")
    if output.resolve() == path.resolve():
        raise ValueError(f"{output} is the file to quantise, which is kept; give another name for the smaller one")
    metadata = load_exported(path).metadata
    if "precision" in metadata:
        raise ValueError(f"{path} is in {metadata['precision']} already; quantise the file that it was made from")
    metadata = {**metadata, "precision": to}
    with atomic_write(output, overwrite=overwrite, beside=BESIDE.get(path.suffix, ())) as temporary:
        if path.suffix == ".xml":
            model = _openvino_int8(path, calibration) if to == "int8" else _openvino_bf16(path)
            save_openvino(model, temporary, metadata)
        else:
            _write(_to_int8(path) if to == "int8" else _to_bf16(path), metadata, temporary)
        load_exported(temporary)
    return output


def _check_source(path: Path, to: str, calibration: Sequence[Tensor]) -> None:
    if path.suffix not in (".onnx", ".xml"):
        raise ValueError(f"{path.name} should end in .onnx or .xml; 'vil export --format onnx' writes such a file")
    name, extra = EXTRAS[path.suffix]
    check_importable(f"{to} in {name}", PACKAGES[path.suffix, to], extra)
    if path.suffix == ".xml" and to == "int8" and not calibration:
        raise ValueError("int8 in OpenVINO needs images for calibration; give --data DATA")


def _openvino_int8(path: Path, calibration: Sequence[Tensor]) -> Any:
    """Linear layers, convolutions and products of attention in int8, by OpenVINO's own tool."""
    import nncf

    model = openvino_core().read_model(path)
    dataset = nncf.Dataset([images.numpy() for images in calibration])
    size = max(len(calibration), 1)
    return nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=size)


def _openvino_bf16(path: Path) -> Any:
    """Matrices, kernels and tables in bf16, each with a cast to float32 behind it; vectors are small and stay."""
    import openvino
    from openvino import opset13 as operators

    model = openvino_core().read_model(path)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_element_type() == openvino.Type.f32 and len(node.shape) > 1:
            rounded = torch.from_numpy(node.data.copy()).bfloat16()
            stored = openvino.Tensor(openvino.Type.bf16, openvino.Shape(rounded.shape))
            stored.data[:] = rounded.view(torch.int16).numpy().view(stored.data.dtype)
            cast = operators.convert(openvino.op.Constant(stored), "f32")
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(cast.output(0))
    return model


def _write(model: Any, metadata: dict[str, Any], path: Path) -> None:
    import onnx

    del model.metadata_props[:]
    onnx.helper.set_model_props(model, encode_metadata(metadata))
    onnx.save(model, path)


def _to_int8(path: Path) -> Any:
    """Linear layers in int8.

    The weights use seven of the eight bits: processors without VNNI add products in pairs of 16 bits, which eight
    would overflow, so that results would depend on the machine.
    """
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    model = onnx.load(path)
    del model.graph.value_info[:]  # shapes are inferred again; those of transposed weights would be wrong
    add_pre_process_metadata(model)  # the exporter has optimised the graph, and no warning asks for it
    with TemporaryDirectory() as folder:
        quantised = Path(folder) / path.name
        quantize_dynamic(model, quantised, op_types_to_quantize=LINEAR, per_channel=True, reduce_range=True)
        return onnx.load(quantised)


def _to_bf16(path: Path) -> Any:
    """Matrices, kernels and tables in bf16, each with a cast to float32 behind it; vectors are small and stay."""
    import ml_dtypes
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(path)
    casts = []
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT and len(weight.dims) > 1:
            name, stored = weight.name, f"{weight.name}_bf16"
            rounded = numpy_helper.to_array(weight).astype(ml_dtypes.bfloat16)
            weight.CopyFrom(numpy_helper.from_array(rounded, stored))
            casts.append(helper.make_node("Cast", [stored], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model
