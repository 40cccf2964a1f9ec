"""Pictures of results, as PNG files: confusions, a page of predictions, and one image with its likeliest classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image
from torch import Tensor

from ..files import atomic_write
from .predict import Prediction

RIGHT, WRONG, QUIET = "#2e7d4f", "#c62828", "#5f6b7a"
MOST_NUMBERED = 40
"""Classes up to which a confusion matrix has room for names and numbers."""

COLUMNS = 8
"""Images in a row of a page."""

MOST_BARS = 10
"""Classes that there is room for beside an image."""

LARGEST_DRAWN = 1200
"""Pixels along an image's longer side that a picture has use for."""


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: str | Path, *, overwrite: bool = False) -> Path:
    """Counts (classes, classes) of true × predicted classes as a heat map of each true class's shares.

    With names, numbers and each class's accuracy at the right; with many classes, colours only.
    """
    count = len(classes)
    seen = confusion.sum(1, keepdim=True)
    shares = confusion / seen.clamp(min=1)
    numbered = count <= MOST_NUMBERED
    side = 3.2 + 0.46 * count if numbered else 9.0
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.subplots()
    heat = axes.imshow(shares.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    if numbered:
        _name_classes(axes, classes, shares.diagonal().tolist())
        _write_counts(axes, confusion, shares)
    bar = figure.colorbar(heat, ax=axes, shrink=0.7, pad=0.02, format=PercentFormatter(1, decimals=0))
    bar.set_label("share of the true class", color=QUIET)
    bar.outline.set_visible(False)
    axes.set_xlabel("predicted", color=QUIET)
    axes.set_ylabel("true", color=QUIET)
    total = int(seen.sum())
    accuracy = 100 * int(confusion.diagonal().sum()) / max(1, total)
    axes.set_title(f"{accuracy:.1f}% of {total:,} images right", loc="left", fontsize=13, weight="bold", pad=12)
    return save_picture(figure, path, overwrite=overwrite)


def _name_classes(axes: Axes, classes: Sequence[str], accuracies: Sequence[float]) -> None:
    """Names below and at the left, accuracies at the right, thin white lines between cells."""
    names, cells = [shorten(name, 24, placeholder="…") for name in classes], range(len(classes))
    axes.set_xticks(cells, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(cells, names)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(cells, [f"{accuracy:.0%}" for accuracy in accuracies])
    beside.tick_params(length=0, labelcolor=QUIET)
    beside.spines[:].set_visible(False)
    edges = [cell + 0.5 for cell in cells[:-1]]
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _write_counts(axes: Axes, confusion: Tensor, shares: Tensor) -> None:
    for row, column in confusion.nonzero().tolist():
        colour = "white" if shares[row, column] > 0.35 else "#1c2733"
        text = f"{int(confusion[row, column])}"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9 if len(text) < 4 else 7)


def draw_predictions(
    images: Tensor,
    labels: Tensor,
    predictions: Tensor,
    probabilities: Tensor,
    classes: Sequence[str],
    path: str | Path,
    *,
    total: int | None = None,
    overwrite: bool = False,
) -> Path:
    """A page of uint8 images (n, C, H, W), each above its predicted class; wrong ones are framed, with the true class.

    They are some of ``total`` images.
    ``labels``, ``predictions`` and ``probabilities`` (of the predicted classes) are (n,).
    """
    columns = min(len(images), COLUMNS)
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(1.75 * columns, 2.25 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    wrong = int((labels != predictions).sum())
    shown = f"{len(images)} of {total} images" if total else f"{len(images)} images"
    figure.suptitle(f"{shown}, {wrong} misclassified (framed)", fontsize=13, weight="bold")
    for axes in panels.flat[len(images) :]:
        axes.set_axis_off()
    cells = zip(panels.flat, images, labels.tolist(), predictions.tolist(), probabilities.tolist(), strict=False)
    for axes, image, label, prediction, probability in cells:
        right = label == prediction
        _show(axes, image.permute(1, 2, 0).cpu().numpy(), None if right else WRONG)
        predicted = f"{shorten(classes[prediction], 18, placeholder='…')}  {probability:.0%}"
        truth = "" if right else f"is: {shorten(classes[label], 20, placeholder='…')}"
        axes.set_xlabel(f"{predicted}\n{truth}", color=RIGHT if right else WRONG, fontsize=9)
    return save_picture(figure, path, overwrite=overwrite)


def draw_prediction(image: Image.Image, prediction: Prediction, path: str | Path, *, overwrite: bool = False) -> Path:
    """An image beside its likeliest classes, as bars."""
    thumbnail = image.copy()
    thumbnail.thumbnail((LARGEST_DRAWN, LARGEST_DRAWN))
    height = 4.2
    width = height * min(2.0, max(0.6, thumbnail.width / thumbnail.height))
    figure = Figure(figsize=(width + 4.8, height + 0.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(width, 4.8))
    figure.suptitle(Path(prediction.file).name, fontsize=12, weight="bold")
    _show(left, np.asarray(thumbnail))
    _bars(right, prediction)
    return save_picture(figure, path, overwrite=overwrite)


def _bars(axes: Axes, prediction: Prediction) -> None:
    """A bar for each of the first classes, with name and probability above it; the best one in colour."""
    chances = list(zip(prediction.labels, prediction.probabilities, strict=True))[:MOST_BARS]
    for row, (label, probability) in enumerate(chances):
        best = row == 0
        axes.barh(row, 1, height=0.34, color="#eceff3")
        axes.barh(row, probability, height=0.34, color=RIGHT if best else "#9aa7b5")
        axes.text(0, row - 0.28, shorten(label, 36, placeholder="…"), va="bottom", weight="bold" if best else None)
        axes.text(1, row - 0.28, f"{probability:.1%}", va="bottom", ha="right", color=QUIET)
    axes.set_xlim(0, 1)
    axes.set_ylim(max(5, len(chances)) - 0.4, -0.75)
    axes.set_axis_off()


def _show(axes: Axes, pixels: np.ndarray, frame: str | None = None) -> None:
    """Pixels (H, W, C) as they are: grey in grey, small ones with sharp edges."""
    small = max(pixels.shape[:2]) < 64
    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest" if small else "antialiased")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(visible=frame is not None, color=frame, linewidth=3)


def save_picture(figure: Figure, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a PNG, which appears whole or not at all."""
    path = check_picture(path, overwrite=overwrite)
    with atomic_write(path, overwrite=overwrite) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def check_picture(path: str | Path, *, overwrite: bool = False) -> Path:
    """The path, if a picture may be written there."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"{path.name} should end in .png")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or remove it first")
    return path
