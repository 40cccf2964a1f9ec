"""``vil table cost``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import print_csv, print_json, print_line, print_table, progress

if TYPE_CHECKING:
    from ..analysis import CostRow
    from ..analysis.report import Comparison

COLUMNS = ("model", "M params: paper", "ours", "diff.", "", "GFLOPs: paper", "ours", "diff.", "")


def table_cost(*, json: bool = False, csv: bool = False) -> None:
    """Print the paper's tables of parameters and GFLOPs beside our values.

    The paper's GFLOPs are 10⁹ multiply-accumulates. Marks: '=' equal to the printed digits after rounding, 't' after
    truncation, '!' different, with the reason below the table.

    Args:
        json: print JSON.
        csv: print CSV.
    """
    from ..analysis import agreement, compare_entry, paper_entries

    if json and csv:
        raise ValueError("give --json or --csv, not both")
    rows = [compare_entry(entry) for entry in progress(list(paper_entries()), "counting")]
    if csv:
        print_csv([row.to_flat_dict() for row in rows])
    elif json:
        print_json({"rows": [row.to_dict() for row in rows], "summary": agreement(rows)})
    else:
        _print(rows, agreement(rows))


def _print(rows: list[CostRow], summary: dict[str, dict[str, int]]) -> None:
    from ..analysis.paper_tables import TABLES

    for table, title in TABLES.items():
        own = [row for row in rows if row.entry.table == table]
        print_table(title, COLUMNS, ([row.entry.model, *_cells(row.params), *_cells(row.gflops)] for row in own))
        for row in own:
            if row.remark:
                print_line(f"  ! {row.entry.model}: {row.remark}")
        print_line("")
    gflops, params = summary["gflops"], summary["params"]
    counts = f"{gflops['agree']} of {gflops['of']} GFLOPs and {params['agree']} of {params['of']} parameter counts"
    print_line(f"equal to the printed digit: {counts}")


def _cells(value: Comparison) -> tuple[str, str, str, str]:
    return value.paper, f"{value.ours:.4f}", f"{value.difference:+.4f}", value.mark
