"""``vil detect predict``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import print_json, print_line, print_table
from ..predict import picture_paths

if TYPE_CHECKING:
    from ...detection.predict import Prediction


def detect_predict(
    checkpoint: str,
    images: list[str],
    *,
    threshold: float = 0.5,
    output: str | None = None,
    tile: int | None = None,
    data: str | None = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Detect objects in images: print categories, scores and boxes, and draw pictures of them.

    With --tile, objects that the border of a tile cuts are merged from the pieces in neighbouring tiles.

    Args:
        checkpoint: a run directory, a .safetensors file of a detector, or a .onnx or .pt2 file exported from one.
        images: image files of any format and size, or folders of them.
        threshold: lowest score of an object.
        output: a folder to write each image to as NAME.png, with boxes, masks, names and scores.
        tile: side in pixels of the overlapping tiles in which to look at large images; whole images by default.
        data: the data set in COCO's format that the images are of, for its image ids in the JSON; they are counted
            from 1 by default.
        overwrite: replace pictures that exist.
        json: print JSON in COCO's results format, with file and category added; boxes are [left, top, width, height].
    """
    import torch

    from ...data.images import image_files
    from ...detection.detections import coco_result
    from ...detection.export import open_detector
    from ...detection.pictures import draw_detections, save_image
    from ...detection.predict import predict

    files = image_files(images)
    ids = _image_ids(files, data)
    pictures = [None] * len(files) if output is None else picture_paths(files, Path(output), overwrite)
    detector = open_detector(checkpoint)
    model = detector.model.to("cuda" if torch.cuda.is_available() else "cpu")
    names = [category.name for category in detector.categories]
    predictions = predict(model, files, threshold=threshold, tile=tile)
    results: list[dict[str, Any]] = []
    for number, prediction, path in zip(ids, predictions, pictures, strict=True):
        image = prediction.image
        if path is not None:
            save_image(draw_detections(image, prediction.detections, names), path, overwrite=overwrite)
        if json:
            for one in prediction.detections:
                result = coco_result(one, number, detector.categories, (image.height, image.width))
                results.append({"file": prediction.file, "category": names[one.label - 1], **result})
        else:
            _print_objects(prediction, names, path, threshold)
    if json:
        print_json(results)


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


def _print_objects(prediction: Prediction, names: Sequence[str], picture: Path | None, threshold: float) -> None:
    found = f"{len(prediction.detections) or 'nothing'} found with a score of {threshold:g} or more"
    print_line(f"{prediction.file}: {found}{'' if prediction.detections else '; --threshold lowers it'}")
    if prediction.detections:
        rows = [
            (names[one.label - 1], f"{100 * one.score:.1f}", *(f"{value:.0f}" for value in one.box))
            for one in prediction.detections
        ]
        print_table("", ("category", "%", "left", "top", "right", "bottom"), rows)
    if picture is not None:
        print_line(f"wrote {picture}")
