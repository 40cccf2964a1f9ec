"""``vil detect evaluate``."""

from __future__ import annotations

import json as json_format
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import atomic_write
from ..output import print_json, print_line, print_table, progress_bar, warn_if_outdated

if TYPE_CHECKING:
    from ...detection.evaluate import DetectionResult


def detect_evaluate(
    checkpoint: str,
    *,
    data: str | None = None,
    split: str | None = None,
    workers: int = 2,
    precision: str = "fp32",
    skip_bad: bool | None = None,
    per_category: bool = False,
    results: str | None = None,
    json: bool = False,
) -> None:
    """Show how good a detector is on a data set: COCO's average precision and recall, of boxes and of masks.

    Under torchrun, the processes share the images; each image is counted once.

    Args:
        checkpoint: a run directory, a .safetensors file of a detector, a folder or hub name of 'vil hub', the
            built-in garments, or a file from 'vil export'.
        data: a folder in COCO's format, or the built-in garments (a synthetic composition of real images); by default
            what the checkpoint's run was evaluated on.
        split: name of the split; the run's by default, with the images that it held out, else validation.
        workers: data-loading processes.
        precision: fp32, bf16 or fp16.
        skip_bad: skip invalid images and annotations, instead of stopping; by default only on the run's own data, and
            only if the run did so.
        per_category: also print the average precision of each category.
        results: a .json file to write all detections to, in COCO's results format.
        json: print JSON.
    """
    from accelerate import PartialState

    from ...detection.evaluate import eval_images, evaluate

    if results is not None and Path(results).exists():
        raise FileExistsError(f"{results} exists; choose another name or remove it first")
    with progress_bar("evaluating") as progress:
        result = evaluate(
            checkpoint,
            data,
            split,
            workers=workers,
            precision=precision,
            skip_bad=skip_bad,
            progress=progress,
        )
    PartialState().destroy_process_group()
    if not PartialState().is_main_process:
        return
    warn_if_outdated(checkpoint)
    if results is not None:
        with atomic_write(results) as temporary:
            temporary.write_text(json_format.dumps(result.detections))
    where = eval_images(checkpoint, data, split)
    if json:
        named = {"checkpoint": checkpoint, "data": where.data, "split": where.split}
        print_json({**named, **_plain(result, per_category)})
        return
    print_line(f"{checkpoint} on {where.data}, {'images that the run held out' if where.names else where.split}")
    _print_result(result, per_category)
    if results is not None:
        print_line(f"wrote {results}: {len(result.detections)} detections")


def _print_result(result: DetectionResult, per_category: bool) -> None:
    from ...data.loading import describe_skipped

    rows = [("boxes", *map(_number, result.boxes.overall.values()))]
    if result.masks is not None:
        rows.append(("masks", *map(_number, result.masks.overall.values())))
    print_table("", (f"{result.images} images, %", *result.boxes.overall), rows)
    if result.skipped:
        print_line(describe_skipped(result.skipped))
    missing = [name for name, (boxes, _) in result.per_category.items() if isnan(boxes)]
    if missing:
        print_line(f"not in the evaluation images: {', '.join(missing)}")
    if per_category:
        table = [(name, *(_number(ap) for ap in aps if ap is not None)) for name, aps in result.per_category.items()]
        print_table("", ("category", "box AP", *(["mask AP"] if result.masks else [])), table)


def _number(percent: float) -> str:
    return "–" if isnan(percent) else f"{percent:.1f}"


def _plain(result: DetectionResult, per_category: bool) -> dict[str, Any]:
    """The result as JSON data; what there are no objects for is null."""
    data: dict[str, Any] = {"images": result.images, "skipped": len(result.skipped)}
    for name, measured in (("boxes", result.boxes), ("masks", result.masks)):
        data[name] = measured and {key: _json_number(value) for key, value in measured.overall.items()}
    if per_category:
        data["categories"] = [
            {"category": name, "boxes": _json_number(boxes), "masks": _json_number(masks)}
            for name, (boxes, masks) in result.per_category.items()
        ]
    return data


def _json_number(percent: float | None) -> float | None:
    return None if percent is None or isnan(percent) else percent
