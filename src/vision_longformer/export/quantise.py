"""Smaller ONNX files: weights in bf16, or linear layers in int8."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import check_choice
from ..files import atomic_write
from .runtime import load_exported
from .writers import encode_metadata

PRECISIONS = ("int8", "bf16")

LINEAR = ("MatMul", "Gemm")
"""Operators of linear layers; those whose second factor is a weight are quantised."""


def quantise(path: str | Path, to: str, output: str | Path | None = None, *, overwrite: bool = False) -> Path:
    """Write an exported ``.onnx`` file with smaller weights, as ``NAME_int8.onnx`` by default.

    Its metadata stay as they are, with ``precision`` added, so that the file is used as before.

    Args:
        path: the file, of a classifier, backbone or detector.
        to: int8: linear layers multiply 8-bit integers, weights scaled per output, inputs per batch, so that an image's
            result depends a little on its batch. bf16: weights are stored in 16 bits and cast to float32 to compute,
            since onnxruntime has no bf16 matrix products on CPUs; this halves the file and nothing else.
        output: where to write.
        overwrite: replace an existing file.
    """
    check_choice("precision", to, PRECISIONS)
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"{path.name} should end in .onnx; 'vil export --format onnx' writes such a file")
    output = path.with_stem(f"{path.stem}_{to}") if output is None else Path(output)
    if output.suffix != ".onnx":
        raise ValueError(f"{output.name} should end in .onnx")
    metadata = load_exported(path).metadata
    if "precision" in metadata:
        raise ValueError(f"{path} is in {metadata['precision']} already; quantise the file that it was made from")
    with atomic_write(output, overwrite=overwrite) as temporary:
        _write(_to_int8(path) if to == "int8" else _to_bf16(path), {**metadata, "precision": to}, temporary)
        load_exported(temporary)
    return output


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
