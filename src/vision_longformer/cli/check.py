"""``vil check``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .output import print_json, print_line, print_table, progress_bar

if TYPE_CHECKING:
    from ..data.check import DataReport, SplitReport

MAX_ROWS = 50
"""Problems that fit on a screen; --json lists all."""

IMBALANCE = 3
"""From which ratio of the largest to the smallest class balancing is worth a thought."""


def check(data: str, *, json: bool = False) -> None:
    """Check images in class folders before training. The exit code is 1 if anything is wrong.

    It reads every image and reports unreadable files, duplicates within and across splits and classes, classes that a
    split lacks, and files that are ignored; and it counts images by class, format and size.

    Args:
        data: a folder with a subfolder per class, with or without splits such as train and val; or a .npz, .tar or
            .zip file.
        json: print JSON.
    """
    from ..data.check import check_images

    with progress_bar("checking") as progress:
        report = check_images(data, workers=os.cpu_count() or 1, progress=progress)
    if json:
        print_json(
            {
                "splits": [split._asdict() for split in report.splits],
                "problems": [problem._asdict() for problem in report.problems],
            }
        )
    else:
        _print_report(report, data)
    if report.problems:
        raise SystemExit(1)


def _print_report(report: DataReport, data: str) -> None:
    names = list(dict.fromkeys(name for split in report.splits for name in split.classes))
    rows = [(name, *(split.classes.get(name, 0) for split in report.splits)) for name in names]
    total = ("all", *(split.images for split in report.splits))
    print_table(data, ("class", *(split.split for split in report.splits)), [*rows, total])
    for split in report.splits:
        _print_split(split)
    if report.imbalance >= IMBALANCE:
        print_line(
            f"the largest class has {report.imbalance:.1f} times as many images as the smallest; "
            "train with --balance sample or --balance loss if rare classes matter as much"
        )
    count = len(report.problems)
    print_line(f"{count} problem{'' if count == 1 else 's'}" if count else "no problems")
    if count:
        print_table("", ("split", "image", "what is wrong"), report.problems[:MAX_ROWS], left=3)
    if count > MAX_ROWS:
        print_line(f"… and {count - MAX_ROWS} more; --json lists all")


def _print_split(split: SplitReport) -> None:
    formats = ", ".join(f"{count:,} {kind}" for kind, count in split.formats.items())
    print_line(f"{split.split}: {split.images:,} images ({formats})")
    if split.sides is not None:
        least, middle, most = split.sides
        print_line(f"  shorter sides from {least} to {most} pixels, median {middle:g}")
    if split.ignored:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in split.ignored.items())
        print_line(f"  ignored: {kinds}")
