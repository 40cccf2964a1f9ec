"""Images for classification: where they come from, in which order, and how they are augmented.

What a run sees is a function of its seed and of the place in the run, so a resumed run needs nothing but its place.
"""

from __future__ import annotations

from .build import class_names, eval_data, train_data
from .contract import EvalData, Process, TrainData

__all__ = ["EvalData", "Process", "TrainData", "class_names", "eval_data", "train_data"]
