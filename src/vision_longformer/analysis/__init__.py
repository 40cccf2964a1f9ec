"""What models cost: parameters and multiply-accumulates, as the paper counts them and as they really are."""

from .executed import executed_macs
from .macs import ModelMacs, paper_macs
from .paper_tables import PaperEntry, paper_entries
from .parameters import ParameterCount, count_parameters
from .report import CostRow, agreement, compare_entry

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
