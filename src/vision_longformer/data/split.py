"""The split of data that comes without one: some images are held out for evaluation, and the run remembers which."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from .randomness import derive_seed
from .sources import split_names

SPLIT_FILE = "split.json"
"""Its name in a run directory."""

EVAL_FRACTION = 0.15
"""What is held out unless a recipe says otherwise."""


HELD_OUT = "held out from the training images"
AS_BEFORE = "held out as before"
INHERITED = "the same images that the run it starts from held out"
UNKNOWN = (
    "newly held out: most images that the starting weights were trained on are not found here by name; if they are "
    "here under other names, the evaluation counts images that were trained on"
)
"""How images came to be held out, in words."""


class Split(NamedTuple):
    """Names of the images to train on and of those to evaluate on, both in the order of the data."""

    train: tuple[str, ...]
    evaluation: tuple[str, ...]

    @classmethod
    def read(cls, run: Path | None) -> Split | None:
        """The split that a run directory, or a folder of :mod:`vision_longformer.hub`, remembers; None if none."""
        if run is None or not (run / SPLIT_FILE).is_file():
            return None
        parts = json.loads((run / SPLIT_FILE).read_text(encoding="utf-8"))
        return cls(tuple(parts["train"]), tuple(parts["evaluation"]))

    def applied_to(self, names: Sequence[str]) -> Split | None:
        """The same for data with images added, which are trained on, or removed; None if it is of other images.

        It is of these if half of its images, some of those to evaluate on among them, have the same names.
        """
        here, held = set(names), set(self.evaluation)
        if 2 * len(here & {*self.train, *held}) < len(self.train) + len(held) or not here & held:
            return None
        return Split(tuple(name for name in names if name not in held), tuple(name for name in names if name in held))

    def part(self, name: str | None, train_split: str, eval_split: str) -> tuple[str, ...] | None:
        """What a run calls ``name``: the images it trains on, or those it evaluates on, also by default; else None."""
        if name is None or name == eval_split:
            return self.evaluation
        return self.train if name in split_names(train_split) else None

    @classmethod
    def beside(cls, checkpoint: str | Path) -> Split | None:
        """The split in a model's folder, or in the folder of its file; None if there is none."""
        path = Path(checkpoint)
        return cls.read(path if path.is_dir() else path.parent)

    @classmethod
    def known(cls, checkpoint: str | Path, names: Sequence[str], part: str | None) -> tuple[str, ...] | None:
        """Of ``names``, images that are not divided: those that a model was evaluated on, also by default, or those
        that it was trained on ("train"). None if no split lies beside it, or one of other images.
        """
        split = cls.beside(checkpoint)
        here = None if split is None else split.applied_to(names)
        return None if here is None else here.part(part, "train", "validation")

    def to_json(self) -> str:
        return json.dumps(self._asdict(), indent=1, ensure_ascii=False) + "\n"


def hold_out(names: Sequence[str], groups: Sequence[Hashable], fraction: float, seed: int) -> Split:
    """Hold out a ``fraction`` of each group, such as a class, chosen by the seed.

    A group of two or more has images on both sides; a single one is trained on.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    held: set[int] = set()
    for number, indices in enumerate(members.values()):
        count = min(max(1, round(fraction * len(indices))), len(indices) - 1)
        held.update(random.Random(derive_seed(seed, "split", number)).sample(indices, count))
    if not held:
        raise ValueError(f"{len(names)} images in {len(members)} groups are too few to hold some out for evaluation")
    parts = [[name for index, name in enumerate(names) if (index in held) is side] for side in (False, True)]
    return Split(tuple(parts[0]), tuple(parts[1]))
