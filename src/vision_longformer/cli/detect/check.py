"""``vil detect check``."""

from __future__ import annotations

from collections.abc import Sequence

from ..output import print_json, print_line, print_table, progress_bar

MAX_ROWS = 50
"""Problems that fit on a screen; --json lists all."""


def detect_check(data: str, *, split: str | None = None, json: bool = False) -> None:
    """Check a data set in COCO's format: what is wrong with which image or annotation. Exit code 1 if anything is.

    It looks for missing images, images of another size than stated, ids that are duplicate or refer to nothing, boxes
    without area or outside of their image, masks that do not match it, and empty data sets.

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
                {**one._asdict(), "annotations": str(one.annotations), "problems": [p._asdict() for p in one.problems]}
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
    if any(one.problems for one in reports):
        raise SystemExit(1)


def _count(problems: Sequence[object]) -> str:
    return f"{len(problems)} problem{'' if len(problems) == 1 else 's'}" if problems else "no problems"


def _cell(identity: object) -> str:
    return "" if identity is None else str(identity)
