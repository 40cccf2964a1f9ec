"""``vil detect predict``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...training.callbacks import counted
from ..output import log_lines, print_json, print_line, print_table, progress_bar, warn_if_outdated
from ..predict import picture_paths

if TYPE_CHECKING:
    from ...detection.config import DetectorConfig
    from ...detection.predict import Prediction


def detect_predict(
    checkpoint: str,
    images: list[str],
    *,
    threshold: float = 0.5,
    output: str | None = None,
    tile: int | None = None,
    scale: float | None = None,
    detections: int | None = None,
    proposals: int | None = None,
    memory: str | None = None,
    storage: str | None = None,
    level: int = 0,
    allow_large: bool = False,
    data: str | None = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Detect objects in images: print categories, scores and boxes, and draw pictures of them.

    An image that would not fit in memory is streamed, with the same detections. With --tile, objects that are cut by
    the border of a tile are merged from their pieces in neighbouring tiles.

    Args:
        checkpoint: a run directory, a .safetensors file of a detector, a folder or hub name of 'vil hub', the
            built-in garments, or a file from 'vil export'.
        images: image files of any format and size, or folders of them, including subfolders; also the large TIFF, zarr
            and .npy files that 'vil encode' takes.
        threshold: report only objects with at least this score.
        output: a folder to write each image to as NAME.png, with boxes, masks, names and scores.
        tile: side in pixels of overlapping tiles into which to cut large images; by default, images are processed
            whole.
        scale: the factor by which images are resized; 1 leaves them as they are; by default, they are resized as in
            training.
        detections: the maximum number of objects per image; as in training by default.
        proposals: the maximum number of regions per image that Mask R-CNN classifies, or of candidates per level of
            RetinaNet; as in training by default.
        memory: memory limit, on top of the model and a decoded photo; what is free by default.
        storage: a folder for the tokens of streamed images, instead of memory; a run that was killed is resumed.
        level: level of a pyramid; 0 is the largest image.
        allow_large: decode a JPEG or PNG of any size; refused above 179 megapixels by default.
        data: the data set in COCO's format that the images belong to, whose image ids are used in the JSON; by default,
            images are numbered from 1.
        overwrite: replace pictures that exist.
        json: print JSON in COCO's results format, with file and category added; boxes are [left, top, width, height].
    """
    import torch

    from ...detection.detections import coco_result
    from ...detection.export import open_detector
    from ...detection.pictures import draw_detections, save_image
    from ...detection.predict import input_files, predict

    warn_if_outdated(checkpoint)
    with log_lines():
        files = input_files(images)
    ids = _image_ids(files, data)
    pictures = [None] * len(files) if output is None else picture_paths(files, Path(output), overwrite)
    asked = {"scale": scale, "detections": detections, "proposals": proposals}
    detector = open_detector(checkpoint, **{name: value for name, value in asked.items() if value is not None})
    model = detector.model.to("cuda" if torch.cuda.is_available() else "cpu")
    names = [category.name for category in detector.categories]
    options: dict[str, Any] = {"memory": memory, "storage": storage, "level": level, "allow_large": allow_large}
    results: list[dict[str, Any]] = []
    small = 0
    predictions = predict(
        model, files, threshold=threshold, tile=tile, progress=lambda done, total: bar(done, total), **options
    )
    for number, file, path in zip(ids, files, pictures, strict=True):
        with log_lines(), progress_bar(f"detecting in {file.name}") as bar:
            prediction = next(predictions)
        if path is not None:
            save_image(draw_detections(*prediction.picture(), names), path, overwrite=overwrite)
        if json:
            for one in prediction.detections:
                result = coco_result(one, number, detector.categories, prediction.size)
                results.append({"file": prediction.file, "category": names[one.label - 1], **result})
        else:
            _print_objects(prediction, names, path, threshold)
        small += tile is None and _is_shrunk(prediction.size, detector.config)
    if json:
        print_json(results)
    if small:
        side = detector.config.max_size
        print(
            f"{small} of {counted(len(files), 'image')} shrunk to less than half size ({side} pixels, as in "
            f"training), so small objects may be missed; --tile {side} processes such images in parts, --scale 1 at "
            "full size",
            file=sys.stderr,
        )


def _is_shrunk(size: tuple[int, int], config: DetectorConfig) -> bool:
    """Whether an image of ``size`` (height, width) loses more than half of its sides before the detector sees it."""
    from ...detection.backbone import resized_size

    return 2 * max(resized_size(*size, config.min_sizes[-1], config.max_size, config.scale)) < max(size)


def _image_ids(files: Sequence[Path], data: str | None) -> list[int]:
    """A number for each image: its id in the data set, or its place in the list."""
    if data is None:
        return list(range(1, 1 + len(files)))
    from ...detection.coco import image_ids

    ids = image_ids(data)
    for file in files:
        if file.resolve() not in ids:
            raise ValueError(f"{file} is not an image of {data}; leave out --data, or give images of that data set")
    return [ids[file.resolve()] for file in files]


MOST_ROWS = 20
"""Objects of an image that are printed, the best ones."""


def _print_objects(prediction: Prediction, names: Sequence[str], picture: Path | None, threshold: float) -> None:
    found = f"{len(prediction.detections) or 'nothing'} found with a score of {threshold:g} or more"
    print_line(f"{prediction.file}: {found}{'' if prediction.detections else '; give a lower --threshold'}")
    if prediction.detections:
        rows = [
            (names[one.label - 1], f"{100 * one.score:.1f}", *(f"{value:.0f}" for value in one.box))
            for one in prediction.detections[:MOST_ROWS]
        ]
        print_table("", ("category", "%", "left", "top", "right", "bottom"), rows)
    if (more := len(prediction.detections) - MOST_ROWS) > 0:
        print_line(f"  … and {more} more (--json prints all)")
    if picture is not None:
        print_line(f"wrote {picture}")
