"""What models cost: parameters and multiply-accumulates, as the paper counts them and as they really are."""

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
