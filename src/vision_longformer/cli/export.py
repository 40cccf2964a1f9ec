"""``vil export``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..training.callbacks import counted
from .output import check_free, print_line, print_table, size_text, step_status
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
    """Write a model as a file that runs without this package, and compare its outputs with the model's.

    An exported classifier takes batches of any size, an exported detector one image at a time. The file carries the
    names of the classes and how images are prepared, so that 'vil predict', 'vil evaluate', 'vil detect predict' and
    'vil detect evaluate' accept it in place of the checkpoint.

    Args:
        checkpoint: a run directory, for its best model, a .safetensors file of a classifier or a detector, a folder or
            hub name (hf-hub:OWNER/NAME) of 'vil hub', or a built-in one: cifar10, cifar10_micro, cifar10_nano,
            fashion_mnist, garments.
        output: the file to write; the checkpoint's name with another ending by default, and for a hub name that of the
            repository, in the working folder.
        format: onnx, for onnxruntime and others; openvino, as .xml with a .bin file beside it; or pt2, for
            torch.export.load.
        size: height and width of images as 480x640, or one number for a square; as in training by default. A detector's
            default is a square, to which images are padded; to get its checkpoint's results for images of one shape,
            give the size that it scales them to.
        dynamic: accept images of any height and width instead.
        backbone: output the feature maps of all stages instead of classes.
        overwrite: replace an existing file.
    """
    from ..export.verify import check_target

    path = check_target(output or _default_output(checkpoint, format), format)
    check_free(path, overwrite)
    options: dict[str, Any] = {"format": format, "size": size}
    with step_status(("tracing the model", "writing the file", "comparing the file with the model")) as progress:
        exported = _export(checkpoint, path, dynamic, backbone, overwrite=overwrite, progress=progress, **options)
    _print_differences(exported)
    if exported.metadata["kind"] == "detector":
        print_line(_padding_note(exported.metadata))


def _default_output(checkpoint: str, format: str) -> Path:
    """Beside the checkpoint, or in the working folder if that is on the hub: its name with the ending of the format."""
    from ..checkpoint.native import HUB, resolve_checkpoint
    from ..export.writers import SUFFIXES

    on_hub = checkpoint.startswith(HUB)
    path = Path(Path(checkpoint.partition("@")[0]).name) if on_hub else resolve_checkpoint(checkpoint)
    return path.parent / f"{path.name.removesuffix('.safetensors')}{SUFFIXES.get(format, '')}"


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
        (_images(one.shape, number), f"{one.difference:.1e}", f"{one.largest:.3g}")
        for number, one in enumerate(exported.differences, 1)
    ]
    if rows:
        print_table("Compared with the model", ("images", "largest difference", "largest value of an output"), rows)
    print_line(f"wrote {exported.path}: {exported.bytes / 1e6:.1f} MB")
    if not rows:
        print_line(NOT_COMPARED)


NOT_COMPARED = (
    "its detections could not be compared with the detector's: neither finds anything in the photos that come with "
    "this package. Compare what 'vil detect predict' finds in photos of your own with the file and with the checkpoint"
)


def _padding_note(metadata: Mapping[str, Any]) -> str:
    """What a file for one size does with images of other shapes, and how there is one for theirs."""
    least, most = metadata["config"]["min_size"][-1], metadata["config"]["max_size"]
    shorter = f"{least} on the shorter and " if least < most else ""
    return (
        f"the file takes images of {size_text(metadata['size'])}; images of another shape are padded, so their scores "
        "differ slightly from the checkpoint's. If all your images have the same shape, export with --size "
        f"HEIGHTxWIDTH: their size after scaling to at most {shorter}{most} on the longer side"
    )


def _images(shape: tuple[int, ...], number: int) -> str:
    """``2 images of 128×128`` of a batch (b, C, H, W); ``photo 1, 384×384`` of an image (C, H, W) for a detector."""
    size = size_text((shape[-2], shape[-1]))
    return f"{counted(shape[0], 'image')} of {size}" if len(shape) == 4 else f"photo {number}, {size}"
