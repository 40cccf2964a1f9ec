"""``vil export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import print_line, print_table, progress_bar, size_text
from .parser import Size

if TYPE_CHECKING:
    from ..export import ExportedFile


def export(
    checkpoint: str,
    output: str | None = None,
    /,
    *,
    format: str = "onnx",
    size: Size | None = None,
    dynamic: bool = False,
    backbone: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a model as a file that runs without this package, and compare what it computes with the model.

    An exported classifier takes batches of any size, an exported detector one image at a time. The file carries the
    names of the classes and how images are prepared, so that 'vil predict', 'vil evaluate' and 'vil detect predict'
    accept it in place of the checkpoint.

    Args:
        checkpoint: a .safetensors file of a classifier or a detector, or a run directory, for its best one.
        output: the file to write; the checkpoint's name with another ending by default.
        format: onnx, for onnxruntime and others, or pt2, for torch.export.load.
        size: image size as 480x640, or one number for a square; as in training by default.
        dynamic: accept images of any height and width instead.
        backbone: output the feature maps of all stages instead of classes.
        overwrite: replace an existing file.
    """
    from ..checkpoint import resolve_checkpoint
    from ..export.verify import check_target

    path = check_target(output or resolve_checkpoint(checkpoint).with_suffix(f".{format}"), format)
    options: dict[str, Any] = {"format": format, "size": size}
    with progress_bar("exporting") as progress:
        exported = _export(checkpoint, path, dynamic, backbone, overwrite=overwrite, progress=progress, **options)
    _print_differences(exported)


def _export(checkpoint: str, path: Path, dynamic: bool, backbone: bool, **options: Any) -> ExportedFile:
    """Read what the checkpoint holds, and export it."""
    from ..checkpoint.native import DETECTOR, describe
    from ..classification.export import export_checkpoint
    from ..models.zoo import MODELS

    if checkpoint in MODELS:
        raise ValueError(
            f"{checkpoint} is a model without weights; give a .safetensors file from 'vil train' or 'vil convert'"
        )
    if describe(checkpoint).format == DETECTOR:
        return _export_detector(checkpoint, path, dynamic, backbone, **options)
    return export_checkpoint(checkpoint, path, dynamic=dynamic, backbone=backbone, **options)


def _export_detector(checkpoint: str, path: Path, dynamic: bool, backbone: bool, **options: Any) -> ExportedFile:
    from ..detection.export import export_checkpoint

    if dynamic:
        raise ValueError(f"{checkpoint} is a detector, which is exported for one size; give --size HEIGHTxWIDTH")
    if backbone:
        raise ValueError(f"{checkpoint} is a detector, which is exported whole; leave out --backbone")
    return export_checkpoint(checkpoint, path, **options)


def _print_differences(exported: ExportedFile) -> None:
    rows = [
        (size_text((one.shape[-2], one.shape[-1])), f"{one.difference:.1e}", f"{one.largest:.3g}")
        for one in exported.differences
    ]
    print_table("Compared with the model", ("images", "largest difference", "of values up to"), rows)
    print_line(f"wrote {exported.path}: {exported.path.stat().st_size / 1e6:.1f} MB")
