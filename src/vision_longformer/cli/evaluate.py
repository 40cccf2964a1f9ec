"""``vil evaluate``."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import listed
from .output import print_json, print_line, print_table, progress_bar, warn_if_outdated
from .parser import Size

if TYPE_CHECKING:
    from ..classification.metrics import Result


def evaluate(
    checkpoint: str,
    *,
    data: str | None = None,
    split: str | None = None,
    size: Size | None = None,
    batch_size: int = 64,
    workers: int = 2,
    precision: str = "fp32",
    skip_bad_images: bool | None = None,
    per_class: bool = False,
    confusion: str | None = None,
    json: bool = False,
) -> None:
    """Show how accurate a classifier is on a data set: top-1, top-5 (for six classes or more) and loss.

    Under torchrun, the processes share the images; each image is counted once.

    Args:
        checkpoint: a run directory, a .safetensors file of a classifier, a folder or hub name of 'vil hub', a
            built-in one (cifar10, cifar10_micro, cifar10_nano, fashion_mnist), or a file from 'vil export'.
        data: a folder, a .npz, .tar or .zip file, shards (wds/…), hfds/…, torch/…, or the built-in fashion-mnist; what
            the checkpoint's run was evaluated on by default.
        split: name of the split; the evaluation images of the run, or else validation, by default.
        size: height and width of the input image, as 480x640, or one number for a square; as in training by default.
        batch_size: images at a time in each process.
        workers: data-loading processes.
        precision: fp32, bf16 or fp16.
        skip_bad_images: skip images that cannot be read, instead of stopping; by default only on the run's own data,
            and only if the run did so.
        per_class: also print the accuracy of each class.
        confusion: a .png file to draw the confusion matrix to.
        json: print JSON.
    """
    from accelerate import PartialState

    from ..classification.dataset import find_images
    from ..classification.evaluate import evaluate as evaluate_checkpoint
    from ..classification.pictures import check_picture

    if confusion is not None:
        check_picture(confusion)
    images = find_images(checkpoint, data, split)
    with progress_bar("evaluating") as progress:
        result = evaluate_checkpoint(
            checkpoint,
            data,
            split,
            size=size,
            batch_size=batch_size,
            workers=workers,
            precision=precision,
            skip_bad_images=skip_bad_images,
            progress=progress,
        )
    PartialState().destroy_process_group()
    if not PartialState().is_main_process:
        return
    warn_if_outdated(checkpoint)
    if json:
        where = {"checkpoint": checkpoint, "data": images.data, "split": images.split}
        print_json({**where, "size": size, **_plain(result, per_class)})
    else:
        _print_result(result, f"{checkpoint} on {images}", per_class)
    if confusion is not None:
        path = _draw(result, confusion)
        if not json:
            print_line(f"wrote {path}")


def _draw(result: Result, path: str) -> Path:
    from ..classification.metrics import MAX_CONFUSION_CLASSES
    from ..classification.pictures import draw_confusion

    if result.confusion is None:
        raise ValueError(
            f"a confusion matrix can have at most {MAX_CONFUSION_CLASSES} classes; there are {len(result.seen)}"
        )
    return draw_confusion(result.confusion, result.classes, path)


def _print_result(result: Result, title: str, per_class: bool) -> None:
    from ..data.loading import describe_skipped

    names = [name.replace("top", "top-") + " %" for name in result.accuracies]
    values = (result.samples, *(f"{value:.2f}" for value in result.accuracies.values()), f"{result.loss:.4f}")
    print_line(title)
    print_table("", ("images", *names, "loss"), [values], left=0)
    if result.skipped:
        print_line(describe_skipped(result.skipped))
    if per_class:
        rows = [
            (result.classes[number], count, _number(top1), _mistaken(result, number))
            for number, (top1, count) in enumerate(result.per_class())
        ]
        print_table("", ("class", "images", "top-1 %", "most often misclassified as"), rows)


NAMED_TIES = 3
"""Classes that are named where images are misclassified as several equally often."""


def _mistaken(result: Result, number: int) -> str:
    """The class that images of a class are most often misclassified as, or the classes if several are, and how many."""
    if result.confusion is None:
        return ""
    wrong = result.confusion[number].clone()
    wrong[number] = 0
    count = int(wrong.max())
    if not count:
        return ""
    names = [result.classes[index] for index in (wrong == count).nonzero()[:, 0].tolist()]
    return f"{listed(names, NAMED_TIES)} ({count}{' each' if len(names) > 1 else ''})"


def _number(percent: float) -> str:
    return "–" if isnan(percent) else f"{percent:.2f}"


def _plain(result: Result, per_class: bool) -> dict[str, Any]:
    """The result as JSON data; a class without images has no accuracy."""
    data: dict[str, Any] = {"samples": result.samples, "skipped": len(result.skipped), **result.accuracies}
    data["loss"] = result.loss
    if per_class:
        data["classes"] = [
            {"class": name, "samples": count, "top1": None if isnan(top1) else top1}
            for name, (top1, count) in zip(result.classes, result.per_class(), strict=True)
        ]
    return data
