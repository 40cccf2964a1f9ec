"""``vil explain``."""

from __future__ import annotations

import re
from pathlib import Path

from .output import check_free, print_line, progress_bar
from .parser import Size
from .predict import picture_paths


def explain(
    checkpoint: str,
    image: str,
    *,
    point: str | None = None,
    stage: int | None = None,
    head: int | None = None,
    size: Size | None = None,
    output: str = "explained",
    overwrite: bool = False,
) -> None:
    """Show what a classifier attends to in an image: a picture, and a page to explore with the mouse.

    Args:
        checkpoint: a run directory, a .safetensors file of a classifier, a folder or hub name of 'vil hub', or a
            built-in one: cifar10, cifar10_micro, cifar10_nano, fashion_mnist.
        image: an image file of any format and size.
        point: the pixel X,Y of the image whose token the picture explains; the middle by default.
        stage: show all layers of this stage, counted from 1; the last layer of every stage by default.
        head: show this head, counted from 1; all by default.
        size: height and width of the input image, as 480x640, or one number for a square; as in training by default.
        output: a folder to write NAME.png and NAME.html to.
        overwrite: replace a picture and a page that exist.
    """
    from ..explain import draw, write_page
    from ..explain import explain as explain_image

    chosen = None if point is None else parse_point(point)
    (picture,) = picture_paths([Path(image)], Path(output), overwrite)
    page = picture.with_suffix(".html")
    check_free(page, overwrite)
    with progress_bar("tracing attention") as progress:
        explanation = explain_image(checkpoint, image, point=chosen, size=size, progress=progress)
    draw(explanation, picture, stage=stage, head=head, overwrite=overwrite)
    print_line(f"wrote {picture}")
    with progress_bar("writing weights") as progress:
        write_page(explanation, page, stage=stage, head=head, overwrite=overwrite, progress=progress)
    print_line(f"wrote {page}; open it in a browser")


def parse_point(text: str) -> tuple[int, int]:
    """``"120,80"`` as (x, y)."""
    match = re.fullmatch(r"\s*(-?\d+)\s*,\s*(-?\d+)\s*", text)
    if match is None:
        raise ValueError(f"point is {text!r}; write X,Y in pixels of the image, such as 120,80")
    return int(match[1]), int(match[2])
