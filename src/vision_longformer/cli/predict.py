"""``vil predict``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .output import print_json, print_line, print_table


def predict(
    checkpoint: str,
    images: list[str],
    *,
    top: int = 5,
    size: int | None = None,
    picture: str | None = None,
    json: bool = False,
) -> None:
    """Show what a classifier takes images for: the likeliest classes and their probabilities.

    Args:
        checkpoint: a .safetensors file that 'vil train' or 'vil convert' wrote, or one of 'vil export'.
        images: image files of any kind and size; a folder stands for the images inside.
        top: how many classes to show.
        size: side of the square images that the model sees; the one it was trained with by default.
        picture: a folder to write each image into, with its classes beside it, as NAME.png.
        json: as JSON.
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
    """Where the pictures of ``files`` go; each must be free, which is known before the work begins."""
    from ..classification.pictures import check_picture

    sources: dict[Path, Path] = {}
    for file in files:
        path = check_picture(folder / f"{file.stem}.png")
        if path in sources:
            raise ValueError(f"{sources[path]} and {file} would both become {path}; predict them into two folders")
        sources[path] = file
    return list(sources)
