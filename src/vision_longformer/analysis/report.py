"""Our costs beside the paper's, entry by entry, to the last printed digit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

from .macs import paper_macs
from .paper_tables import PaperEntry
from .parameters import count_parameters

ROUNDED, TRUNCATED, DIFFERENT = "=", "t", "!"


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
    """How many parameter counts and GFLOPs agree, and of how many."""
    rows = list(rows)
    return {
        "params": {"agree": sum(row.params.agrees for row in rows), "of": len(rows)},
        "gflops": {"agree": sum(row.gflops.agrees for row in rows), "of": len(rows)},
    }
