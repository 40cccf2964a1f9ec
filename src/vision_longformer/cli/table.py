"""``vil table cost`` and ``vil table detection``: the paper's tables beside our values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from .output import billions, millions, print_csv, print_json, print_line, print_table, size_text, track
from .parser import Size

if TYPE_CHECKING:
    from ..costs import CostRow
    from ..costs.detection import DetectionEntry, DetectionRow
    from ..costs.paper_tables import Comparison

Row = TypeVar("Row", bound="CostRow")

COST_COLUMNS = ("model", "M params: paper", "ours", "diff.", "", "GFLOPs: paper", "ours", "diff.", "")

DETECTION_COLUMNS = (
    *("model", "M params: paper", "counted", ""),
    *("GFLOPs: paper", "counted", "diff.", ""),
    *("ours: M params", "GMACs"),
)
DETECTION_CONVENTION = (
    "counted: as the paper counts, with parameters of the absolute-position model and its classifier, and GFLOPs "
    "without\nthe mask head and almost without local attention; ours: what our detector has and executes"
)

MARKS = {
    "=": "rounds to the printed digits",
    "t": "gives the printed digits only if truncated instead of rounded",
    "!": "differs, with the reason below the table",
}
"""What is said of our value by the mark beside it."""


def table_cost(*, json: bool = False, csv: bool = False) -> None:
    """Print the paper's tables of parameters and GFLOPs beside our values.

    The paper's GFLOPs are 10⁹ multiply-accumulates. What the marks mean is printed below the tables.

    Args:
        json: print JSON.
        csv: print CSV.
    """
    from ..costs.paper_tables import TABLES, agreement, compare_entry, paper_entries

    if json and csv:
        raise ValueError("give --json or --csv, not both")
    rows = [compare_entry(entry) for entry in paper_entries()]
    if csv:
        print_csv([row.to_flat_dict() for row in rows])
    elif json:
        print_json({"rows": [row.to_dict() for row in rows], "summary": agreement(rows)})
    else:
        _print_tables(TABLES, COST_COLUMNS, rows, _cost_cells)
        _print_agreement(rows)


def table_detection(*, json: bool = False, measure: bool = False, size: Size = (800, 1333)) -> None:
    """Print the paper's detection tables beside our values: parameters, GFLOPs and, on request, memory in training.

    'counted' is in the paper's convention: the GFLOPs leave out most of the local attention and the mask head, the
    parameters are those with absolute position and with the classifier. 'ours' is what our detector has and executes
    on an image of 800×1333, with 1,000 regions and 100 masks. What the marks mean is printed below the tables.

    Args:
        json: print JSON.
        measure: run one training step of each mechanism, in a process of its own, and print its peak memory. At full
            size each takes minutes and several gigabytes.
        size: image size for --measure; 800x1333 by default.
    """
    from ..costs.detection import TABLES, compare_detector, detection_entries
    from ..costs.paper_tables import agreement

    entries = list(detection_entries())
    memory = _measure([entry for entry in entries if entry.memory], size) if measure else {}
    rows = [compare_detector(entry) for entry in track(entries, "counting")]
    if json:
        data: dict[str, Any] = {"rows": [row.to_dict() for row in rows], "summary": agreement(rows)}
        print_json({**data, **({"training_memory": {"size": size, "bytes": memory}} if measure else {})})
        return
    _print_tables(TABLES, DETECTION_COLUMNS, rows, _detection_cells)
    print_line(DETECTION_CONVENTION)
    _print_agreement(rows)
    if measure:
        _print_memory([entry for entry in entries if entry.memory], memory, size)


def _print_tables(
    tables: Mapping[str, str], columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]]
) -> None:
    """Each table under its title, and below it why values differ."""
    for name, title in tables.items():
        own = [row for row in rows if row.entry.table == name]
        print_table(title, columns, ([row.entry.model, *cells(row)] for row in own))
        for row in own:
            if row.remark:
                print_line(f"  ! {row.entry.model}: {row.remark}")
        print_line("")


def _print_agreement(rows: Sequence[CostRow]) -> None:
    """What the marks mean, and how many values have which."""
    from ..costs.paper_tables import agreement

    for mark, meaning in MARKS.items():
        print_line(f"{mark}  ours {meaning}")
    summary = agreement(rows)
    for name, words in (("gflops", "GFLOPs"), ("params", "parameter counts")):
        counts = summary[name]
        only = f"; {counts['truncated']} more only if truncated" if counts["truncated"] else ""
        print_line(f"{words} equal to the printed digits: {counts['rounded']} of {counts['of']} if rounded{only}")


def _cost_cells(row: CostRow) -> list[str]:
    def cells(value: Comparison) -> list[str]:
        return [value.paper, f"{value.ours:.4f}", f"{value.difference:+.4f}", value.mark]

    return cells(row.params) + cells(row.gflops)


def _detection_cells(row: DetectionRow) -> list[str]:
    params, gflops = row.params, row.gflops
    percent = f"{100 * gflops.difference / Decimal(gflops.paper):+.2f}%"
    return [
        *(params.paper, f"{params.ours:.3f}", params.mark),
        *(gflops.paper, f"{gflops.ours:.2f}", percent, gflops.mark),
        *(millions(row.own_params), billions(row.executed.total)),
    ]


def _measure(entries: Sequence[DetectionEntry], image: tuple[int, int]) -> dict[str, int | str]:
    """Peak bytes of a training step by model, or why there are none."""
    from ..bench.memory import DetectorMemoryMeter

    meter = DetectorMemoryMeter()
    return {entry.model: meter.measure(entry.detector, entry.backbone, image) for entry in track(entries, "measuring")}


def _print_memory(entries: Sequence[DetectionEntry], memory: Mapping[str, int | str], image: tuple[int, int]) -> None:
    """The paper's numbers are for another batch and other kernels, so that only their order can be compared."""
    rows = []
    for entry in entries:
        peak = memory[entry.model]
        rows.append([entry.model, entry.memory, peak if isinstance(peak, str) else f"{peak / 1e9:.2f}"])
    title = f"Memory of a training step at {size_text(image)}: activations and gradients, on the CPU"
    print_table(title, ("model", "GB: paper, on a GPU", "here, one image"), rows)
