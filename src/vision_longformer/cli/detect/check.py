"""``vil detect check``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..output import print_json, print_line, print_table, progress_bar

if TYPE_CHECKING:
    from ...detection.coco import CheckReport

LARGEST_SIDE = 1333
"""Pixels of the longer side of images that are suggested at most, as in the paper."""

MAX_ROWS = 50
"""Problems that fit on a screen; --json lists all."""


def detect_check(data: str, *, split: str | None = None, json: bool = False) -> None:
    """Check each image and annotation of a data set in COCO's format. The exit code is 1 if anything is wrong.

    It looks for missing images, images whose size is not the stated one, ids that are text, are duplicates or refer to
    nothing, boxes that have no area, lie outside of their image or are given by two corners, masks that do not match
    their image, categories with the same name, splits with different categories or with images in common, and empty
    data sets. It also prints how many objects there are, how large they are, and which image size and anchors suit
    them.

    Args:
        data: a folder with annotations and images, or a .json file beside its images.
        split: name of the split; all splits by default.
        json: print JSON.
    """
    from ...detection.coco import check_coco

    with progress_bar("checking") as progress:
        reports = check_coco(data, split, progress)
    if json:
        print_json(
            [
                {
                    **one._asdict(),
                    "annotations": str(one.annotations),
                    "problems": [p._asdict() for p in one.problems],
                    "statistics": _statistics(data, one),
                }
                for one in reports
            ]
        )
    else:
        for one in reports:
            print_line(f"{one.annotations}: {one.images} images, {one.objects} annotations, {_count(one.problems)}")
            if one.problems:
                rows = [(_cell(p.image), _cell(p.annotation), p.what) for p in one.problems[:MAX_ROWS]]
                print_table("", ("image", "annotation", "what is wrong"), rows, left=3)
            if len(one.problems) > MAX_ROWS:
                print_line(f"… and {len(one.problems) - MAX_ROWS} more; --json lists all")
            if statistics := _statistics(data, one):
                print_table("", ("", ""), list(statistics.items()), left=2)
    if any(one.problems for one in reports):
        raise SystemExit(1)


def _statistics(data: str, report: CheckReport) -> dict[str, str]:
    """Of the valid objects, and what suits them; nothing where there are none."""
    from ...detection.coco import CocoData
    from ...detection.statistics import object_statistics

    logging.disable(logging.WARNING)  # of what is skipped: the report has it
    try:
        source = CocoData(Path(data), report.split, masks=False, skip_bad=True)
    except ValueError:
        return {}
    finally:
        logging.disable(logging.NOTSET)
    if not source.with_objects():
        return {}
    statistics = object_statistics(source)
    side = statistics.image_side(LARGEST_SIDE)
    return {
        "categories": ", ".join(f"{name} {count}" for name, count in statistics.counts.items()),
        **statistics.rows(),
        "suggested min_size and max_size": f"{side} (longer side)",
        "suggested anchor_scale": f"{statistics.anchor_scale(side):g}",
    }


def _count(problems: Sequence[object]) -> str:
    return f"{len(problems)} problem{'' if len(problems) == 1 else 's'}" if problems else "no problems"


def _cell(identity: object) -> str:
    return "" if identity is None else str(identity)
