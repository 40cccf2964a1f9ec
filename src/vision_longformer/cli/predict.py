"""``vil predict``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .output import log_lines, print_json, print_line, print_table, warn_if_outdated
from .parser import Size


def predict(
    checkpoint: str,
    images: list[str],
    *,
    top: int = 5,
    size: Size | None = None,
    skip_bad_images: bool = False,
    picture: str | None = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Classify images: print the most likely classes and their probabilities.

    Args:
        checkpoint: a run directory, a .safetensors file of a classifier, a folder or hub name of 'vil hub', a
            built-in one (cifar10, cifar10_micro, cifar10_nano, fashion_mnist), or a file from 'vil export'.
        images: image files of any format and size, or folders of them, including subfolders.
        top: number of classes to print.
        size: height and width of the input image, as 480x640, or one number for a square; as in training by default.
        skip_bad_images: skip images that cannot be read, and say so, instead of stopping.
        picture: a folder to write each image to as NAME.png, with its classes beside it.
        overwrite: replace pictures that exist.
        json: print JSON.
    """
    from ..classification.pictures import draw_prediction
    from ..classification.predict import predict as predict_files
    from ..data.images import decode_image, image_files

    warn_if_outdated(checkpoint)
    with log_lines():
        files = image_files(images)
    paths = [] if picture is None else picture_paths(files, Path(picture), overwrite)
    pictures = dict(zip(map(str, files), paths, strict=False))
    with log_lines():
        predictions = predict_files(checkpoint, files, top=top, size=size, skip_bad_images=skip_bad_images)
    if json:
        print_json([asdict(prediction) for prediction in predictions])
    else:
        if top == 1 and len(predictions) > 1:
            rows = [(one.file, one.labels[0], f"{100 * one.probabilities[0]:.2f}") for one in predictions]
            print_table("", ("image", "class", "%"), rows, left=2)
        for prediction in predictions if top > 1 or len(predictions) == 1 else ():
            shares = (f"{100 * probability:.2f}" for probability in prediction.probabilities)
            print_line(prediction.file)
            print_table("", ("class", "%"), zip(prediction.labels, shares, strict=True))
    for prediction in predictions if pictures else []:
        path = pictures[prediction.file]
        draw_prediction(decode_image(prediction.file), prediction, path, overwrite=overwrite)
        if not json:
            print_line(f"wrote {path}")


def picture_paths(files: Sequence[Path], folder: Path, overwrite: bool = False) -> list[Path]:
    """Where the pictures of ``files`` go, after a check that no two are the same and, unless so asked, none exists."""
    from ..classification.pictures import check_picture

    sources: dict[Path, Path] = {}
    for file in files:
        path = check_picture(folder / f"{file.stem}.png", overwrite=True)
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; choose another folder, or replace pictures with --overwrite")
        if path in sources:
            raise ValueError(f"{sources[path]} and {file} would both be written to {path}; use separate folders")
        sources[path] = file
    return list(sources)
