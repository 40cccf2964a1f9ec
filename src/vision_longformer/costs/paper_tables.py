"""The paper's four tables of what classifiers cost, as printed, and our costs beside them, to the last digit.

Parameters are in millions; the paper's "GFLOPs" are 10⁹ MACs. Printed values are strings, because their number of
digits says how far they can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

from ..models.config import ModelConfig
from ..models.zoo import comparison_config, flat_config, longformer_config
from .formulas import count_parameters, paper_macs

TABLES = {
    "mechanisms": "Attention mechanisms and layouts, 224×224 (tab:attention_overall_timespace)",
    "scales": "Flat and multi-scale, 224×224 (tab:flatvsmultiscale)",
    "overall": "Vision Longformer, 224×224 (tab:overall_comp_cls)",
    "imagenet22k": "Pre-trained on ImageNet-22k (tab:imagenet22k)",
}


@dataclass(frozen=True)
class PaperEntry:
    """A row of a table: the model, its printed cost, and why ours differs where it does."""

    table: str
    model: str
    config: ModelConfig
    params: str
    gflops: str
    remark: str = ""


FLAT_COPY = "the paper repeats DeiT's row, whose 1-D position table is larger than the 2-D one"
ONE_COUNT = "the paper prints the count with absolute position at 224; relative bias tables add to it"

REMARKS = {
    ("mechanisms", "E-ViT/16 tiny"): "the paper repeats DeiT's published 1.3; the formula gives 1.25",
    ("mechanisms", "E-ViT/16 small"): FLAT_COPY,
    ("mechanisms", "Performer small 2-9-1"): "a slip of rounding: 26.448 with random features",
    ("scales", "E-ViT/16 APE"): FLAT_COPY,
    ("overall", "ViL-Base RPB"): ONE_COUNT,
    ("imagenet22k", "ViL-Medium RPB 384"): ONE_COUNT,
    ("imagenet22k", "ViL-Base RPB 224"): ONE_COUNT,
    ("imagenet22k", "ViL-Base RPB 384"): ONE_COUNT,
}
"""Why ours differ from eight printed values, by table and model."""

LAYOUTS = ("1_10_1", "2_9_1", "1_1_9_1", "1_2_8_1")

COMPARISON = {
    ("full", "tiny"): "7.1 1.35, 6.8 1.45, 6.7 2.29, 6.4 2.39",
    ("full", "small"): "27.6 4.84, 26.3 5.05, 26.0 6.74, 24.6 6.95",
    ("partial_vil", "tiny"): "7.1 1.27, 6.8 1.29, 6.7 1.33, 6.4 1.35",
    ("partial_vil", "small"): "27.6 4.67, 26.3 4.71, 26.0 4.82, 24.6 4.86",
    ("linformer", "tiny"): "7.8 1.57, 7.7 1.60, 8.2 1.69, 8.0 1.73",
    ("linformer", "small"): "28.3 5.27, 27.1 5.35, 27.4 5.55, 26.3 5.62",
    ("partial_linformer", "tiny"): "7.3 1.31, 7.2 1.37, 7.7 1.46, 7.6 1.52",
    ("partial_linformer", "small"): "27.8 4.76, 26.7 4.88, 27.0 5.08, 25.8 5.21",
    ("sra64", "tiny"): "14.2 0.99, 13.9 0.99, 13.8 1.00, 13.5 1.00",
    ("sra64", "small"): "55.9 3.92, 54.6 3.92, 54.3 3.97, 52.9 3.97",
    ("sra32", "tiny"): "8.7 1.09, 8.4 1.09, 8.3 1.10, 8.0 1.10",
    ("sra32", "small"): "34.1 4.23, 32.7 4.23, 32.5 4.28, 31.1 4.28",
    ("partial_sra32", "tiny"): "7.3 1.23, 7.1 1.22, 7.0 1.24, 6.8 1.22",
    ("partial_sra32", "small"): "28.2 4.60, 27.4 4.56, 27.1 4.61, 26.4 4.57",
    ("global", "tiny"): "7.2 1.69, 6.9 1.70, 6.8 1.75, 6.5 1.76",
    ("global", "small"): "27.8 6.65, 26.4 6.67, 26.2 6.76, 24.9 6.78",
    ("partial_global", "tiny"): "7.2 1.60, 6.9 1.62, 6.8 1.68, 6.5 1.70",
    ("partial_global", "small"): "27.8 6.07, 26.4 6.14, 26.2 6.23, 24.9 6.30",
    ("performer", "tiny"): "7.3 1.81, 7.0 1.86, 6.9 1.99, 6.6 2.05",
    ("performer", "small"): "27.8 5.75, 26.5 5.87, 26.2 6.14, 24.8 6.26",
    ("partial_performer", "tiny"): "7.1 1.35, 6.8 1.45, 6.7 1.57, 6.4 1.67",
    ("partial_performer", "small"): "27.6 4.84, 26.3 5.04, 26.0 5.31, 24.7 5.52",
}
"""Parameters and GFLOPs of each mechanism and size, for the four :data:`LAYOUTS`."""

MECHANISM_NAMES = {
    "full": "Full",
    "partial_vil": "ViL",
    "linformer": "Linformer",
    "partial_linformer": "Partial Linformer",
    "sra64": "SRA/64",
    "sra32": "SRA/32",
    "partial_sra32": "Partial SRA/32",
    "global": "Global",
    "partial_global": "Partial Global",
    "performer": "Performer",
    "partial_performer": "Partial Performer",
}
"""The paper's names; its ViL has full attention in the last two stages."""

SCALES = {
    ("full", "absolute"): "27.58 4.84, 26.25 5.05, 25.96 6.74, 24.63 6.95",
    ("partial_vil", "absolute"): "27.58 4.67, 26.25 4.71, 25.96 4.82, 24.63 4.86",
    ("partial_vil", "relative"): "27.61 4.67, 26.28 4.71, 25.98 4.82, 24.65 4.86",
}
"""As :data:`COMPARISON`, by mechanism and position, all of size small."""

OVERALL = {"tiny": ("6.7", "1.3"), "small": ("24.6", "4.9"), "medium": ("39.7", "8.7"), "base": ("55.7", "13.4")}
"""Of each size, with either position."""

IMAGENET22K = {
    ("medium", 224): ("39.7", "8.7"),
    ("medium", 384): ("39.7", "28.4"),
    ("base", 224): ("55.7", "13.4"),
    ("base", 384): ("55.7", "43.7"),
}

POSITION_NAMES = {"absolute": "APE", "relative": "RPB"}


def paper_entries() -> Iterator[PaperEntry]:
    """All 115 rows, table by table."""
    yield _entry("mechanisms", "E-ViT/16 tiny", flat_config("tiny"), "5.7", "1.3")
    yield _entry("mechanisms", "E-ViT/16 small", flat_config("small"), "22.1", "4.6")
    for (mechanism, size), printed in COMPARISON.items():
        for layout, params, gflops in _cells(printed):
            name = f"{MECHANISM_NAMES[mechanism]} {size} {layout.replace('_', '-')}"
            yield _entry("mechanisms", name, comparison_config(size, layout, mechanism), params, gflops)
    yield _entry("scales", "E-ViT/16 APE", flat_config("small"), "22.1", "4.6")
    for (mechanism, position), printed in SCALES.items():
        for layout, params, gflops in _cells(printed):
            name = f"{MECHANISM_NAMES[mechanism]} {layout.replace('_', '-')} {POSITION_NAMES[position]}"
            yield _entry("scales", name, comparison_config("small", layout, mechanism, position), params, gflops)
    for size, (params, gflops) in OVERALL.items():
        for position, short in POSITION_NAMES.items():
            config = longformer_config(size, position, partial=True)
            yield _entry("overall", f"ViL-{size.title()} {short}", config, params, gflops)
    for (size, img_size), (params, gflops) in IMAGENET22K.items():
        config = longformer_config(size, "relative", img_size, partial=True)
        yield _entry("imagenet22k", f"ViL-{size.title()} RPB {img_size}", config, params, gflops)


def _cells(printed: str) -> Iterator[tuple[str, str, str]]:
    """Layout, parameters and GFLOPs of a line such as ``"7.1 1.35, 6.8 1.45, …"``."""
    for layout, cell in zip(LAYOUTS, printed.split(", "), strict=True):
        params, gflops = cell.split()
        yield layout, params, gflops


def _entry(table: str, model: str, config: ModelConfig, params: str, gflops: str) -> PaperEntry:
    return PaperEntry(table, model, config, params, gflops, REMARKS.get((table, model), ""))


ROUNDED, TRUNCATED, DIFFERENT = "=", "t", "!"
"""Marks of a comparison."""


@dataclass(frozen=True)
class Comparison:
    """A value as the paper prints it, and ours.

    ``mark`` is ``=`` if ours gives the printed digits by rounding, ``t`` if by truncation, ``!`` if it does not.
    """

    paper: str
    ours: Decimal
    mark: str

    @property
    def difference(self) -> Decimal:
        return self.ours - Decimal(self.paper)

    @property
    def agrees(self) -> bool:
        return self.mark != DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; the paper's value stays a string, with its digits."""
        return {
            "paper": self.paper,
            "ours": float(self.ours),
            "difference": float(self.difference),
            "mark": self.mark,
        }


@dataclass(frozen=True)
class CostRow:
    """An entry of the paper's tables compared: parameters in millions, GFLOPs (10⁹ MACs) in the paper's convention."""

    entry: PaperEntry
    params: Comparison
    gflops: Comparison

    @property
    def remark(self) -> str:
        """Why something differs; empty if nothing does."""
        if self.params.agrees and self.gflops.agrees:
            return ""
        return self.entry.remark or "unexplained"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "table": self.entry.table,
            "model": self.entry.model,
            "params": self.params.to_dict(),
            "gflops": self.gflops.to_dict(),
            "remark": self.remark,
        }

    def to_flat_dict(self) -> dict[str, Any]:
        """The same with one level, for CSV: ``params_paper``, ``params_ours`` and so on."""
        flat: dict[str, Any] = {}
        for key, value in self.to_dict().items():
            flat.update({f"{key}_{name}": x for name, x in value.items()} if isinstance(value, dict) else {key: value})
        return flat


def compare_entry(entry: PaperEntry) -> CostRow:
    """Our parameters and MACs of an entry's model beside the printed ones."""
    params = Decimal(count_parameters(entry.config).paper).scaleb(-6)
    gflops = Decimal(paper_macs(entry.config).total).scaleb(-9)
    return CostRow(entry, compare(entry.params, params), compare(entry.gflops, gflops))


def compare(paper: str, ours: Decimal) -> Comparison:
    """Whether ``ours`` gives the digits of ``paper``."""
    printed = Decimal(paper)
    for mark, rounding in ((ROUNDED, ROUND_HALF_UP), (TRUNCATED, ROUND_DOWN)):
        if ours.quantize(printed, rounding) == printed:
            return Comparison(paper, ours, mark)
    return Comparison(paper, ours, DIFFERENT)


def agreement(rows: Iterable[CostRow]) -> dict[str, dict[str, int]]:
    """How many parameter counts and GFLOPs are equal when rounded, how many only when truncated, and of how many."""
    rows = list(rows)
    counts = {"params": Counter(row.params.mark for row in rows), "gflops": Counter(row.gflops.mark for row in rows)}
    return {
        name: {"rounded": marks[ROUNDED], "truncated": marks[TRUNCATED], "of": len(rows)}
        for name, marks in counts.items()
    }
