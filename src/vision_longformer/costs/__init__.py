"""What models cost: parameters and multiply-accumulates, as the paper counts them and as executed."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .executed import executed_macs
    from .formulas import ModelMacs, ParameterCount, count_parameters, paper_macs
    from .paper_tables import CostRow, PaperEntry, agreement, compare_entry, paper_entries

__all__ = [
    "CostRow",
    "ModelMacs",
    "PaperEntry",
    "ParameterCount",
    "agreement",
    "compare_entry",
    "count_parameters",
    "executed_macs",
    "paper_entries",
    "paper_macs",
]

lazy_exports(
    __name__,
    {
        ".executed": ["executed_macs"],
        ".formulas": ["ModelMacs", "ParameterCount", "count_parameters", "paper_macs"],
        ".paper_tables": ["CostRow", "PaperEntry", "agreement", "compare_entry", "paper_entries"],
    },
)
