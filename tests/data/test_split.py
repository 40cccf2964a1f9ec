"""Images held out for evaluation: how many of each class, which, and how a run remembers them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vision_longformer.data.split import Split, hold_out

NAMES = [f"{number:02}" for number in range(25)]
LABELS = [0] * 20 + [1] * 4 + [2]


def test_the_same_part_of_every_class_is_held_out() -> None:
    """15% of 20 are 3; of 4, rounded, 1; a single image is trained on."""
    split = hold_out(NAMES, LABELS, 0.15, seed=0)
    labels = [LABELS[int(name)] for name in split.evaluation]
    assert labels == [0, 0, 0, 1]
    assert list(split.evaluation) == sorted(split.evaluation)
    assert sorted(split.train + split.evaluation) == NAMES
    assert list(split.train) == sorted(split.train)


def test_both_sides_of_a_class_have_images() -> None:
    for fraction in (0.01, 0.99):
        assert len(hold_out(["a", "b"], [0, 0], fraction, seed=0).evaluation) == 1


def test_the_seed_decides() -> None:
    splits = [hold_out(NAMES, LABELS, 0.15, seed).evaluation for seed in (0, 0, 1, 2, 3)]
    assert splits[0] == splits[1]
    assert len(set(splits)) > 2


def test_single_images_are_too_few() -> None:
    with pytest.raises(ValueError, match="3 images in 3 groups are too few to hold some out"):
        hold_out(["a", "b", "c"], [0, 1, 2], 0.5, seed=0)


def test_what_a_run_calls_its_parts() -> None:
    split = Split(("a", "b"), ("c",))
    names = {None: ("c",), "validation": ("c",), "train": ("a", "b"), "training": ("a", "b"), "test": None, "x": None}
    assert {name: split.part(name, "train", "validation") for name in names} == names


def test_a_run_remembers_its_split(tmp_path: Path) -> None:
    assert Split.read(None) is None
    assert Split.read(tmp_path) is None
    split = Split(("übung.png", "b.png"), ("c.png",))
    (tmp_path / "split.json").write_text(split.to_json(), encoding="utf-8")
    assert Split.read(tmp_path) == split
    assert '"evaluation": [\n  "c.png"\n ]' in split.to_json()
