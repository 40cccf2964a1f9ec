"""``vil quantise``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .output import print_line, print_table, progress_bar

if TYPE_CHECKING:
    from ..classification.export import Comparison


def quantise(
    model: str,
    output: str | None = None,
    /,
    *,
    to: str = "int8",
    data: str | None = None,
    split: str = "validation",
    batch_size: int = 64,
    workers: int = 2,
    overwrite: bool = False,
) -> None:
    """Write a copy of an exported ONNX or OpenVINO file with smaller weights, and measure on data what changes.

    int8 makes linear layers multiply 8-bit integers. bf16 stores weights in half the space; onnxruntime still computes
    in float32, OpenVINO in bf16 on processors that can. 'vil predict' and 'vil evaluate' accept the new file in place
    of the old one.

    Args:
        model: a .onnx or .xml file from 'vil export'.
        output: the file to write, as MODEL_int8.onnx by default.
        to: int8 or bf16.
        data: images on which to compare both files of a classifier, given as in 'vil evaluate'; none by default. They
            are required for int8 in OpenVINO (classifiers only), which is first calibrated on 256 images of the split
            "train".
        split: name of the split.
        batch_size: images per batch.
        workers: data-loading processes.
        overwrite: replace an existing file.
    """
    from ..export.quantise import quantise as quantise_file
    from ..export.runtime import file_bytes

    calibration, calibrated = [], to == "int8" and Path(model).suffix == ".xml"
    if calibrated or data is not None:
        _check_classifier(model, calibrated)
    if calibrated and data is not None:
        from ..classification.export import calibration_batches

        calibration = calibration_batches(model, data, workers=workers)
    path = quantise_file(model, to, output, calibration=calibration, overwrite=overwrite)
    before, after = file_bytes(Path(model)), file_bytes(path)
    print_line(f"wrote {path}: {_megabytes(before)} → {_megabytes(after)} MB, {after / before:.0%} of the size")
    if data is not None:
        from ..classification.export import compare_exports

        with progress_bar("comparing") as progress:
            comparison = compare_exports(
                model, path, data, split, batch_size=batch_size, workers=workers, progress=progress
            )
        _print_comparison(comparison, f"{data}, {split}")


def _check_classifier(model: str, calibrated: bool) -> None:
    """Refuse other models where images are needed, ``calibrated`` or compared, before any is read."""
    from ..export.runtime import load_exported

    kind = load_exported(model).metadata["kind"]
    if kind == "classifier":
        return
    if calibrated:
        raise ValueError(
            f"{model} is a {kind}, and int8 in OpenVINO is for classifiers only; give --to bf16, or the .onnx file"
        )
    raise ValueError(f"{model} is a {kind}, and --data compares classifiers only; leave it out")


def _print_comparison(comparison: Comparison, data: str) -> None:
    rows = [
        (
            one.path.name,
            _megabytes(one.bytes),
            f"{1000 * one.seconds:.3f}",
            f"{one.result.top1:.2f}",
            f"{one.result.loss:.4f}",
        )
        for one in (comparison.before, comparison.after)
    ]
    print_table(f"On {data}", ("file", "MB", "ms per image", "top-1 %", "loss"), rows)
    speed = comparison.before.seconds / comparison.after.seconds
    print_line(
        f"{comparison.changed} of {comparison.after.result.samples} predictions changed; {speed:.2f} times as fast"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"
