"""A module as a traced program, the program as a file, and what the file says about itself."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic

from ..data.images import BACKGROUND
from ..errors import CheckpointError, first_line
from .rewrite import rewrite_onnx, rewrite_openvino, rewrite_program

FORMAT = "vision_longformer_export/1"

METADATA_FILE = "metadata.json"
"""The name of the metadata inside a ``.pt2`` file."""

OPSET = 23
"""The version of ONNX's operators: the first with ``Attention`` as one of them, beside ``Gelu`` and layer norms."""

OPSET_WITH_ROI_ALIGN = 20
"""For Mask R-CNN: onnxruntime has no kernel for ``RoiAlign`` as it is from version 22 on."""

OPENVINO_METADATA = ["vision_longformer", "metadata"]
"""Where an OpenVINO file keeps the metadata, as the text of one JSON object."""

SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "openvino": ".xml"}
"""How the names of the files of a format end."""

BESIDE = {".xml": (".bin",)}
"""Files of the same name that belong to one: OpenVINO's weights."""

PACKAGES = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".xml": ("onnx", "onnxscript", "openvino")}
"""What writes and runs a file beside PyTorch, by the end of its name; the last one suffices to run it."""

EXTRAS = {".onnx": ("ONNX", "export"), ".xml": ("OpenVINO", "openvino")}
"""What a file is called, and which extra of this package has its packages."""

Shapes = tuple[dict[int, Dim], ...] | None
"""For each input, the axes that may vary, as named dimensions; None if none may."""


class Graph(NamedTuple):
    """A traced program, the names of its inputs and outputs, and the axes that may vary."""

    program: ExportedProgram
    input_names: Sequence[str]
    output_names: Sequence[str]
    dynamic_shapes: Shapes = None


def trace(module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: Shapes = None) -> ExportedProgram:
    """The operations of ``module`` on ``inputs``, for all sizes that ``dynamic_shapes`` admits.

    Sizes of 1 are traced like any other ones: usually they are assumed to be constant, as they may be broadcast, and a
    file for any size would then refuse a map of one chunk or an image alone in its batch.
    """
    any_size = symbolic.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]  # as torch.onnx does
    with torch.no_grad(), any_size, _without_shape_cache():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    rewrite_program(program)
    return program


def write_onnx(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a program as ONNX, weights included; axes that may vary keep their names."""
    names = tuple({axis: dim.__name__ for axis, dim in one.items()} for one in graph.dynamic_shapes or ())
    with _without_details(), _without_shape_cache():
        converted = torch.onnx.export(
            graph.program,
            input_names=graph.input_names,
            output_names=graph.output_names,
            dynamic_shapes=names,
            opset_version=_opset(graph),
            verbose=False,
            dynamo=True,
            optimize=False,
        )
        assert converted is not None
        _share_constants(converted.model)  # first: optimising takes half as long without repeated nodes
        converted.optimize()
    rewrite_onnx(converted.model)
    for node in converted.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose file system the operation was traced
    converted.model.metadata_props.update(encode_metadata(metadata))
    converted.save(path, external_data=False)


def _share_constants(model: Any) -> None:
    """Nodes that compute the same become one."""
    from onnx_ir.passes import common

    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.CommonSubexpressionEliminationPass()(model)


def _without_shape_cache() -> AbstractContextManager[None]:
    """Shapes of symbolic sizes take torch longer to look up than to compute again."""
    return dynamo.patch(fake_tensor_cache_enabled=False)


@contextmanager
def _without_details() -> Iterator[None]:
    """Without warnings about details of the conversion, which the comparison afterwards judges."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _opset(graph: Graph) -> int:
    names = (str(node.target) for node in graph.program.graph.nodes)
    return OPSET_WITH_ROI_ALIGN if any("roi_align" in name for name in names) else OPSET


def write_pt2(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a program as ``torch.export.load`` reads it."""
    torch.export.save(graph.program, path, extra_files={METADATA_FILE: json.dumps(encode_metadata(metadata))})


def write_openvino(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a program as OpenVINO's ``.xml``, with its weights in a ``.bin`` file beside it."""
    import openvino

    with TemporaryDirectory() as folder:
        onnx = Path(folder) / "model.onnx"
        write_onnx(graph, onnx, metadata)
        model = openvino.convert_model(onnx)
        rewrite_openvino(model)
        save_openvino(model, path, metadata)


def save_openvino(model: Any, path: Path, metadata: Mapping[str, Any]) -> None:
    """Save a model of OpenVINO in float32, with metadata."""
    import openvino

    model.set_rt_info(json.dumps(encode_metadata(metadata)), OPENVINO_METADATA)
    openvino.save_model(model, path, compress_to_fp16=False)


WRITERS: dict[str, Callable[[Graph, Path, Mapping[str, Any]], None]] = {
    ".onnx": write_onnx,
    ".pt2": write_pt2,
    ".xml": write_openvino,
}
"""What writes a file, by the end of its name."""


def check_packages(suffix: str, *, to_write: bool) -> None:
    """Refuse, unless the packages for files of this suffix can be imported."""
    if suffix in PACKAGES:
        name, extra = EXTRAS[suffix]
        check_importable(name, PACKAGES[suffix][0 if to_write else -1 :], extra, ", or use .pt2 files")


def check_importable(what: str, packages: Sequence[str], extra: str, otherwise: str = "") -> None:
    """Refuse, unless the packages that ``what`` needs, of this ``extra``, are installed and can be imported."""
    command = f"pip install 'vision-longformer[{extra}]'"
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}; install with: {command}{otherwise}")
    for name in packages:
        try:
            import_module(name)
        except Exception as error:  # packages that do not fit one another raise nearly anything
            raise ValueError(
                f"{name} cannot be imported ({first_line(error)}); reinstall it with: {command}{otherwise}"
            ) from error


def file_metadata(model_type: str, config: Mapping[str, Any], *, dynamic: bool, **details: Any) -> dict[str, Any]:
    """What a file says about itself: JSON values by name, the same in all formats.

    Every file has ``format``, ``version`` (of this package), ``kind`` (``model_type``: "classifier", "backbone" or
    "detector"), ``config`` (of the model), ``dynamic`` (whether it takes images of any size), ``alpha`` ("composite":
    transparent pixels are composed with what is behind them) and ``background`` (what that is, in RGB). ``details`` are
    the task's own.
    """
    common = {"format": FORMAT, "version": version("vision-longformer"), "kind": model_type, "dynamic": dynamic}
    transparency = {"alpha": "composite", "background": BACKGROUND}
    return {**common, "config": dict(config), **transparency, **details}


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """JSON text by name, as ONNX has it. Text that is not JSON itself stays as it is, for other programs to read."""
    return {
        name: value if isinstance(value, str) and _decode(value) == value else json.dumps(value)
        for name, value in metadata.items()
    }


class Metadata(dict[str, Any]):
    """What the file ``path`` says about itself; to use a name that it lacks is a CheckpointError, not a KeyError."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"the metadata of {self._path} has no {name!r}; export its checkpoint again")


def decode_metadata(texts: Mapping[str, str], path: Path) -> Metadata:
    """The inverse of :func:`encode_metadata`; a file that was not written here is refused."""
    written = texts.get("format", "")
    if written.split("/")[0] != FORMAT.split("/")[0]:
        raise CheckpointError(f"{path} was not written by 'vil export', and does not say what its outputs mean")
    if written != FORMAT:
        raise CheckpointError(
            f"{path} has the format {written}, of vision-longformer {texts.get('version', 'of an unknown version')}; "
            f"this is {version('vision-longformer')}, which reads {FORMAT}: use that version, or export again with this"
        )
    return Metadata({name: _decode(text) for name, text in texts.items()}, path)


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
