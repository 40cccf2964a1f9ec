"""An exported file, running: called on tensors like the module that it was made from, by onnxruntime, OpenVINO or
PyTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, first_line
from .writers import BESIDE, METADATA_FILE, OPENVINO_METADATA, check_packages, decode_metadata

Run = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""From the inputs of a file to its outputs, all on the CPU."""


class ExportedModel(nn.Module):
    """A file with its ``metadata``; tensors in, a tensor out, or a tuple of them if the file has several outputs.

    It computes on the CPU, in the precision of the file, and leaves its results where the inputs were. There is
    nothing to train in it.
    """

    def __init__(self, run: Run, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.metadata = metadata
        self._run = run

    def forward(self, *inputs: Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            outputs = tuple(x.to(inputs[0].device) for x in self._run(tuple(x.cpu() for x in inputs)))
        return outputs[0] if len(outputs) == 1 else outputs


def is_exported(path: str | Path) -> bool:
    """Whether the name is that of an exported file."""
    return Path(path).suffix in LOADERS


def load_exported(path: str | Path) -> ExportedModel:
    """The model of a ``.onnx``, ``.xml`` or ``.pt2`` file that was exported here."""
    path = Path(path)
    if not is_exported(path):
        raise ValueError(f"{path.name} should end in {' or '.join(LOADERS)}")
    for file in (path, *map(path.with_suffix, BESIDE.get(path.suffix, ()))):
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
    check_packages(path.suffix, to_write=False)
    try:
        return LOADERS[path.suffix](path)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # readers of damaged files raise nearly anything
        reason = first_line(error)
        if operator := _unknown_operator(str(error)):
            raise CheckpointError(
                f"the installed runtime of {path.suffix} files does not know an operator of {path} ({operator}); "
                "update it, or export in another format: onnx, openvino or pt2"
            ) from error
        raise CheckpointError(f"{path} is not a valid {path.suffix} file ({reason}); nothing was loaded") from error


def file_bytes(path: Path) -> int:
    """The length of a file, with what belongs to it."""
    return sum(one.stat().st_size for one in (path, *map(path.with_suffix, BESIDE.get(path.suffix, ()))))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """One tensor or several as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _load_onnx(path: Path) -> ExportedModel:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only; warnings are about the order of its own optimisations
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(x) for x in session.run(None, feed))

    return ExportedModel(run, decode_metadata(session.get_modelmeta().custom_metadata_map, path))


def _load_pt2(path: Path) -> ExportedModel:
    texts = {METADATA_FILE: ""}
    with _parsing_sizes_once():
        module = torch.export.load(path, extra_files=texts).module()

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return as_tuple(module(*inputs))

    return ExportedModel(run, decode_metadata(json.loads(texts[METADATA_FILE] or "{}"), path))


@contextmanager
def _parsing_sizes_once() -> Iterator[None]:
    """torch parses the expression of a symbolic size for each tensor that has it, ten times on average in ViL-Tiny."""
    from sympy import Symbol
    from torch._export.serde.serialize import GraphModuleDeserializer

    parse = GraphModuleDeserializer._parse_sym_expr

    def parse_once(self: Any, text: Any, hint: Any = None) -> Any:
        parsed = self.__dict__.setdefault("_parsed_sizes", {})
        if text not in parsed:
            size = parse(self, text, hint)
            if isinstance(size, Symbol):  # its first occurrence may have no hint
                return size
            parsed[text] = size
        return parsed[text]

    with patch.object(GraphModuleDeserializer, "_parse_sym_expr", parse_once):
        yield


@cache
def openvino_core() -> Any:
    """One for the whole process, never dropped: of two that are dropped in the order in which they were made, the
    second leaves a signal stack behind that the first has freed, and the next signal is a crash (OpenVINO 2026.4).
    """
    import openvino

    return openvino.Core()


def _load_openvino(path: Path) -> ExportedModel:
    core = openvino_core()
    model = core.read_model(path)
    text = model.get_rt_info(OPENVINO_METADATA).astype(str) if model.has_rt_info(OPENVINO_METADATA) else "{}"
    metadata = decode_metadata(json.loads(text), path)
    precision = "bf16" if metadata.get("precision") == "bf16" else "f32"
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"})

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = compiled([x.numpy() for x in inputs])
        return tuple(torch.from_numpy(results[output].copy()) for output in compiled.outputs)

    return ExportedModel(run, metadata)


UNKNOWN_OPERATOR = (
    r"implementation for (?P<operator>\w+\(\d+\)) node with name '(?P<node>[^']*)'",  # onnxruntime, of these types
    r"In Node, \(\"(?P<node>[^\"]*)\", .* No Op registered for (?P<operator>\w+)",  # onnxruntime
    r"(?P<operator>\S+)\(-?\d+\) is not a registered function/op",  # onnxruntime, of another domain
    r"Opset \w+ doesn't contain the operation with type: (?P<operator>\w+)",  # OpenVINO
    r"Cannot create (?P<operator>\S+) layer (?P<node>.*) id:",  # OpenVINO, of another opset
)
"""What runtimes say of an operator that they do not know: its name, and most of them that of the node."""


def _unknown_operator(message: str) -> str:
    """``Sin(22) of node node_9``, or without the node; empty if the error is another."""
    found = next(filter(None, (re.search(pattern, message) for pattern in UNKNOWN_OPERATOR)), None)
    names = {} if found is None else found.groupdict()
    return " of node ".join(filter(None, (names.get("operator"), names.get("node"))))


LOADERS: dict[str, Callable[[Path], ExportedModel]] = {".onnx": _load_onnx, ".pt2": _load_pt2, ".xml": _load_openvino}
"""What reads a file, by the end of its name."""
