"""``vil table detection``."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from .output import billions, millions, print_json, print_line, print_table, progress
from .sizes import parse_size, size_text

if TYPE_CHECKING:
    from ..analysis.paper_detection import DetectionEntry, DetectionRow

COLUMNS = (
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
    from ..analysis import agreement
    from ..analysis.detection_memory import MemoryMeter
    from ..analysis.paper_detection import compare_detector, detection_entries

    entries = list(detection_entries())
    memory: dict[str, int | str] = {}
    if measure:
        meter = MemoryMeter()
        for entry in progress([entry for entry in entries if entry.memory], "measuring"):
            memory[entry.model] = meter.measure(entry.kind, entry.backbone, image)
    rows = [compare_detector(entry) for entry in progress(entries, "counting")]
    if json:
        data: dict[str, Any] = {"rows": [row.to_dict() for row in rows], "summary": agreement(rows)}
        print_json({**data, **({"training_memory": {"size": image, "bytes": memory}} if measure else {})})
        return
    _print(rows)
    if measure:
        _print_memory(entries, memory, image)


def _print(rows: list[DetectionRow]) -> None:
    from ..analysis import agreement
    from ..analysis.paper_detection import TABLES

    for table, title in TABLES.items():
        own = [row for row in rows if row.entry.table == table]
        print_table(title, COLUMNS, (_cells(row) for row in own))
        for row in own:
            if row.remark:
                print_line(f"  ! {row.entry.model}: {row.remark}")
        print_line("")
    print_line(CONVENTION)
    summary = agreement(rows)
    counts = " and ".join(f"{summary[key]['agree']} of {summary[key]['of']} {what}" for key, what in _SUMMARY.items())
    print_line(f"equal to the printed digit: {counts}")


_SUMMARY = {"gflops": "GFLOPs", "params": "parameter counts"}


def _cells(row: DetectionRow) -> list[str]:
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
