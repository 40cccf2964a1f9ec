"""``vil table cost``.

``vil table detection``.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from .output import billions, millions, parse_size, print_csv, print_json, print_line, print_table, progress, size_text

if TYPE_CHECKING:
    from ..costs import CostRow
    from ..costs.paper_tables import Comparison

COLUMNS = ("model", "M params: paper", "ours", "diff.", "", "GFLOPs: paper", "ours", "diff.", "")


def table_cost(*, json: bool = False, csv: bool = False) -> None:
    """Print the paper's tables of parameters and GFLOPs beside our values.

    The paper's GFLOPs are 10⁹ multiply-accumulates. Marks: '=' equal to the printed digits after rounding, 't' after
    truncation, '!' different, with the reason below the table.

    Args:
        json: print JSON.
        csv: print CSV.
    """
    from ..costs import agreement, compare_entry, paper_entries

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
    from ..costs.paper_tables import TABLES

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


if TYPE_CHECKING:
    from ..costs.detection import DetectionEntry, DetectionRow

DETECTION_COLUMNS = (
    "model",
    "M params: paper",
    "counted",
    "",
    "GFLOPs: paper",
    "counted",
    "diff.",
    "",
    "ours: M params",
    "GMACs",
)
CONVENTION = (
    "counted: as the paper counts, with parameters of the absolute-position model and its classifier, and GFLOPs "
    "without\nthe mask head and almost without local attention; ours: what our detector has and executes"
)
MEMORY_COLUMNS = ("model", "GB: paper, on a GPU", "here, one image")


def table_detection(*, json: bool = False, measure: bool = False, size: str = "800x1333") -> None:
    """Print the paper's detection tables beside our values: parameters, GFLOPs and, on request, memory in training.

    'counted' is in the paper's convention: the GFLOPs leave out most of the local attention and the mask head, the
    parameters are those with absolute position and with the classifier. 'ours' is what our detector has and executes
    on an image of 800×1333, with 1,000 regions and 100 masks. Marks: '=' equal to the printed digits after rounding,
    't' after truncation, '!' different, with the reason below the table.

    Args:
        json: print JSON.
        measure: run one training step of each mechanism, in a process of its own, and print its peak of memory. At
            full size this takes minutes and some gigabytes each.
        size: image size for 'measure', as HEIGHTxWIDTH.
    """
    image = parse_size(size)
    from ..bench.memory import DetectorMemoryMeter
    from ..costs import agreement
    from ..costs.detection import compare_detector, detection_entries

    entries = list(detection_entries())
    memory: dict[str, int | str] = {}
    if measure:
        meter = DetectorMemoryMeter()
        for entry in progress([entry for entry in entries if entry.memory], "measuring"):
            memory[entry.model] = meter.measure(entry.detector, entry.backbone, image)
    rows = [compare_detector(entry) for entry in progress(entries, "counting")]
    if json:
        data: dict[str, Any] = {"rows": [row.to_dict() for row in rows], "summary": agreement(rows)}
        print_json({**data, **({"training_memory": {"size": image, "bytes": memory}} if measure else {})})
        return
    _print_detection(rows)
    if measure:
        _print_memory(entries, memory, image)


def _print_detection(rows: list[DetectionRow]) -> None:
    from ..costs import agreement
    from ..costs.detection import TABLES

    for table, title in TABLES.items():
        own = [row for row in rows if row.entry.table == table]
        print_table(title, DETECTION_COLUMNS, (_detection_cells(row) for row in own))
        for row in own:
            if row.remark:
                print_line(f"  ! {row.entry.model}: {row.remark}")
        print_line("")
    print_line(CONVENTION)
    summary = agreement(rows)
    counts = " and ".join(f"{summary[key]['agree']} of {summary[key]['of']} {what}" for key, what in _SUMMARY.items())
    print_line(f"equal to the printed digit: {counts}")


_SUMMARY = {"gflops": "GFLOPs", "params": "parameter counts"}


def _detection_cells(row: DetectionRow) -> list[str]:
    params, gflops = row.params, row.gflops
    percent = f"{100 * gflops.difference / Decimal(gflops.paper):+.2f}%"
    counted = [
        params.paper,
        f"{params.ours:.3f}",
        params.mark,
        gflops.paper,
        f"{gflops.ours:.2f}",
        percent,
        gflops.mark,
    ]
    return [row.entry.model, *counted, millions(row.own_params), billions(row.executed.total)]


def _print_memory(entries: list[DetectionEntry], memory: dict[str, int | str], image: tuple[int, int]) -> None:
    """What the paper had on its GPUs is for another batch and other kernels; only the order can be compared."""
    rows = []
    for entry in entries:
        if entry.memory:
            found = memory[entry.model]
            rows.append([entry.model, entry.memory, found if isinstance(found, str) else f"{found / 1e9:.2f}"])
    title = f"Memory of a training step at {size_text(image)}: activations and gradients, on the CPU"
    print_table(title, MEMORY_COLUMNS, rows)
