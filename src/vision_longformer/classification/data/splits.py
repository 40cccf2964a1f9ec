"""Names of splits: data sets call the same thing by different names."""

from __future__ import annotations

TRAINING = ("train", "training")
EVALUATION = ("validation", "val", "valid", "eval", "test")


def split_names(split: str) -> tuple[str, ...]:
    """Names that a split may have in the data, its own first."""
    for group in (TRAINING, EVALUATION):
        if split in group:
            return (split, *(name for name in group if name != split))
    return (split,)


def check_undivided(data: str, split: str) -> None:
    """Refuse to take data without splits for anything but training data: a run would be judged by what it learned."""
    if split not in TRAINING:
        raise ValueError(f"{data} has no split {split!r}; ask for split 'train' if all of it is meant")
