"""``vil detect check``."""

from __future__ import annotations

from collections.abc import Sequence

from ..output import counting, print_json, print_line, print_table

SHOWN = 50
"""Problems that fit on a screen; --json lists all."""


def detect_check(data: str, *, split: str | None = None, json: bool = False) -> None:
    """Check a data set in COCO's form: what is wrong with which image or annotation. Exit code 1 if anything is.

    Missing images, images of another size than stated, ids that are double or refer to nothing, boxes without area or
    outside of their image, masks that do not match it, and empty data sets are found.

    Args:
        data: a folder with annotations and images, or a .json file beside its images.
        split: name of the split; all that there are by default.
        json: as JSON.
    """
    from ...detection.coco import check_coco

    with counting("checking") as progress:
        checked = check_coco(data, split, progress)
    if json:
        print_json(
            [
                {**one._asdict(), "annotations": str(one.annotations), "problems": [p._asdict() for p in one.problems]}
                for one in checked
            ]
        )
    else:
        for one in checked:
            print_line(f"{one.annotations}: {one.images} images, {one.objects} annotations, {_count(one.problems)}")
            if one.problems:
                rows = [(_cell(p.image), _cell(p.annotation), p.what) for p in one.problems[:SHOWN]]
                print_table("", ("image", "annotation", "what is wrong"), rows, left=3)
            if len(one.problems) > SHOWN:
                print_line(f"… and {len(one.problems) - SHOWN} more; --json lists all")
    if any(one.problems for one in checked):
        raise SystemExit(1)


def _count(problems: Sequence[object]) -> str:
    return f"{len(problems)} problem{'' if len(problems) == 1 else 's'}" if problems else "nothing wrong"


def _cell(identity: object) -> str:
    return "" if identity is None else str(identity)
