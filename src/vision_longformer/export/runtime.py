"""An exported file, running: called on tensors like the module that it was made from, by onnxruntime or PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, first_line
from .writers import METADATA_FILE, check_onnx, decode_metadata

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
    """The model of a ``.onnx`` or ``.pt2`` file that was exported here."""
    path = Path(path)
    if not is_exported(path):
        raise ValueError(f"{path.name} should end in {' or '.join(LOADERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".onnx":
        check_onnx(["onnxruntime"])
    try:
        return LOADERS[path.suffix](path)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # readers of damaged files raise nearly anything
        reason = first_line(error)
        raise CheckpointError(f"{path} is not a valid {path.suffix} file ({reason}); nothing was loaded") from error


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
    module = torch.export.load(path, extra_files=texts).module()

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return as_tuple(module(*inputs))

    return ExportedModel(run, decode_metadata(json.loads(texts[METADATA_FILE] or "{}"), path))


LOADERS: dict[str, Callable[[Path], ExportedModel]] = {".onnx": _load_onnx, ".pt2": _load_pt2}
"""What reads a file, by the end of its name."""
