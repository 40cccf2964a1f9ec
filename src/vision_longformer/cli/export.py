"""``vil export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import counting, parse_size, print_line, print_table, size_text

if TYPE_CHECKING:
    from ..export import Exported


def export(
    checkpoint: str,
    output: str | None = None,
    /,
    *,
    format: str = "onnx",
    size: str | None = None,
    dynamic: bool = False,
    backbone: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a model as a file that runs without this package, and compare what it computes with the model.

    The file takes any number of images at a time, a detector's one. It carries the names of the classes and how images
    are prepared, so that 'vil predict', 'vil evaluate' and 'vil detect predict' take it in place of the checkpoint.

    Args:
        checkpoint: a .safetensors file of a classifier or a detector.
        output: the file to write; the checkpoint's name with another ending by default.
        format: onnx, for onnxruntime and others, or pt2, for torch.export.load.
        size: HEIGHTxWIDTH of the images, or one number; what the model was trained with by default.
        dynamic: images of any height and width instead.
        backbone: the maps of all stages instead of the classes.
        overwrite: replace an existing file.
    """
    from ..export.verify import check_target

    path = check_target(output or Path(checkpoint).with_suffix(f".{format}"), format)
    options: dict[str, Any] = {"format": format, "size": None if size is None else parse_size(size)}
    with counting("exporting") as progress:
        exported = _export(checkpoint, path, dynamic, backbone, overwrite=overwrite, progress=progress, **options)
    _print_differences(exported)


def _export(checkpoint: str, path: Path, dynamic: bool, backbone: bool, **options: Any) -> Exported:
    """Read what the checkpoint holds, and export it."""
    from ..checkpoint import load
    from ..checkpoint.native import DETECTOR, describe
    from ..classification.export import export_model
    from ..classification.model import load_classifier
    from ..models.zoo import MODELS

    if checkpoint in MODELS:
        raise ValueError(
            f"{checkpoint} is a model without weights; give a .safetensors file that 'vil train' or 'vil convert' wrote"
        )
    description = describe(checkpoint)
    if description.format == DETECTOR:
        return _export_detector(checkpoint, path, dynamic, backbone, **options)
    if backbone:
        info = description.info.get("preprocessing")
        return export_model(load(checkpoint), path, dynamic=dynamic, backbone=True, info=info, **options)
    model, preprocessing, named = load_classifier(checkpoint)
    info = {**preprocessing.to_dict(), "named": named}
    return export_model(model, path, dynamic=dynamic, info=info, **options)


def _export_detector(checkpoint: str, path: Path, dynamic: bool, backbone: bool, **options: Any) -> Exported:
    from ..detection.checkpoint import load_named
    from ..detection.export import export_detector

    if dynamic:
        raise ValueError(f"{checkpoint} is a detector, which is exported for one size; give --size HEIGHTxWIDTH")
    if backbone:
        raise ValueError(f"{checkpoint} is a detector, which is exported whole; leave out --backbone")
    detector = load_named(checkpoint)
    categories = [category._asdict() for category in detector.categories]
    return export_detector(detector.model, path, info={"categories": categories, "named": detector.named}, **options)


def _print_differences(exported: Exported) -> None:
    rows = [
        (size_text((one.shape[-2], one.shape[-1])), f"{one.difference:.1e}", f"{one.largest:.3g}")
        for one in exported.differences
    ]
    print_table("Compared with the model", ("images", "largest difference", "of values up to"), rows)
    print_line(f"wrote {exported.path}: {exported.path.stat().st_size / 1e6:.1f} MB")
