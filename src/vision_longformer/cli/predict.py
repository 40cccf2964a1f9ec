"""``vil predict``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .output import print_json, print_line, print_table
from .parser import Size


def predict(
    checkpoint: str,
    images: list[str],
    *,
    top: int = 5,
    size: Size | None = None,
    picture: str | None = None,
    json: bool = False,
) -> None:
    """Classify images: print the most likely classes and their probabilities.

    Args:
        checkpoint: a .safetensors file from 'vil train' or 'vil convert', or a file from 'vil export'.
        images: image files of any format and size, or folders of them.
        top: number of classes to print.
        size: height and width of the input image, as 480x640, or one number for a square; as in training by default.
        picture: a folder to write each image to as NAME.png, with its classes beside it.
        json: print JSON.
    """
    from ..classification.pictures import draw_prediction
    from ..classification.predict import predict as predict_files
    from ..data.images import decode_image, image_files

    files = image_files(images)
    pictures = [] if picture is None else picture_paths(files, Path(picture))
    predictions = predict_files(checkpoint, files, top=top, size=size)
    if json:
        print_json([asdict(prediction) for prediction in predictions])
    else:
        for prediction in predictions:
            shares = (f"{100 * probability:.2f}" for probability in prediction.probabilities)
            print_line(prediction.file)
            print_table("", ("class", "%"), zip(prediction.labels, shares, strict=True))
    for prediction, path in zip(predictions, pictures, strict=False):
        draw_prediction(decode_image(prediction.file), prediction, path)
        if not json:
            print_line(f"wrote {path}")


def picture_paths(files: Sequence[Path], folder: Path) -> list[Path]:
    """Where the pictures of ``files`` go, after a check that none of them exists and no two are the same."""
    from ..classification.pictures import check_picture

    sources: dict[Path, Path] = {}
    for file in files:
        path = check_picture(folder / f"{file.stem}.png")
        if path in sources:
            raise ValueError(f"{sources[path]} and {file} would both become {path}; predict them into two folders")
        sources[path] = file
    return list(sources)
