"""What changes in a backbone from step to step: golden draws of random shift and of Performer features."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_tasks import ToyTask, small_config, training_loop

from vision_longformer import ModelConfig, StageConfig, VisionLongformer
from vision_longformer.classification.task import ClassificationTask
from vision_longformer.models import config as cfg
from vision_longformer.models.attention.performer import orthogonal_features
from vision_longformer.models.random_shift import RandomShift
from vision_longformer.training.loop import BackboneSchedule
from vision_longformer.training.recipe import TrainSettings


def derived(*position: int | str) -> int:
    """The seed of a position in a run: 63 bits of a BLAKE2b hash of its text."""
    return int.from_bytes(hashlib.blake2b(repr(position).encode(), digest_size=8).digest(), "little") >> 1


def never(step: int, epoch: int, step_of_epoch: int) -> bool:
    return False


def always(step: int, epoch: int, step_of_epoch: int) -> bool:
    return True


# Random shift

NEIGHBOURS = {
    3: [[6, 1], [7, 3], [8, 7], [2, 7]],
    4: [[1, 2], [7, 4], [7, 3], [5, 7]],
}
"""By seed of the run: the neighbours of two layers in steps 0 to 3."""


@pytest.mark.parametrize("seed", NEIGHBOURS)
def test_the_draws_of_a_run(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both micro-batches of a step get the same seed, step and neighbours; random shift ends after 6 of 8 steps."""
    seeded: list[tuple[int, int]] = []
    drawn: list[list[int]] = []
    set_seed, draw = RandomShift.seed, RandomShift.draw

    def noted_seed(self: RandomShift, seed: int, step: int = 0) -> None:
        seeded.append((seed, step))
        set_seed(self, seed, step)

    def noted_draw(self: RandomShift, layers: int) -> Tensor:
        neighbours = draw(self, layers)
        drawn.append(neighbours.tolist())
        return neighbours

    monkeypatch.setattr(RandomShift, "seed", noted_seed)
    monkeypatch.setattr(RandomShift, "draw", noted_draw)
    training_loop(tmp_path / "run", ToyTask(), TrainSettings(seed=seed, epochs=2, batch_size=4, accumulate=2)).train()
    shift_seed = derived(seed, "shift") % 2**32
    assert shift_seed == {3: 1823047356, 4: 1005612307}[seed]
    assert seeded == [(shift_seed, step) for step in range(6) for _ in range(2)]
    assert drawn[:8] == [neighbours for neighbours in NEIGHBOURS[seed] for _ in range(2)]
    assert len(drawn) == 12


def test_the_seed_is_that_of_a_run_and_a_step() -> None:
    """The schedule leaves it to the model to mix them: seed 4 is not seed 3 one step later."""
    states = {}
    for seed in (3, 4):
        model = VisionLongformer(small_config())
        schedule = BackboneSchedule(model, seed, shift_until=100, redraws_features=never)
        for step in range(4):
            schedule.before_forward(step)
            states[seed, step] = model.random_shift.state.tolist()
    assert states == {(seed, step): [derived(seed, "shift") % 2**32, step] for seed in (3, 4) for step in range(4)}


def test_the_end_of_random_shift_leaves_evaluation_as_it_is() -> None:
    """In a backbone inside another module, as detectors have it."""
    model = VisionLongformer(small_config())
    model.set_neighbours("random", "self")
    schedule = BackboneSchedule(nn.Sequential(nn.Identity(), model), 0, shift_until=2, redraws_features=never)
    settings = []
    for step in range(4):
        schedule.before_step(step, 0, step)
        settings.append((model.config.neighbours, model.config.eval_neighbours))
    assert settings == [("random", "self"), ("random", "self"), ("all", "self"), ("all", "self")]


@pytest.mark.parametrize("neighbours", ["all", "self"])
def test_other_neighbours_stay(neighbours: str) -> None:
    model = VisionLongformer(small_config(), neighbours=neighbours)
    schedule = BackboneSchedule(model, 0, shift_until=0, redraws_features=never)
    schedule.before_step(5, 0, 5)
    schedule.before_forward(5)
    assert model.config.neighbours == neighbours
    assert model.random_shift.state.tolist() == [0, 0]


# Performer features


def performers() -> VisionLongformer:
    """Two stages of one block, with 4 and 3 features for heads of 4 channels."""
    stages = tuple(StageConfig(8, 1, 2, 2, cfg.Performer(count), 0, "none") for count in (4, 3))
    return VisionLongformer(ModelConfig(stages, img_size=(8, 8), in_chans=1, num_classes=3))


def features(model: VisionLongformer) -> list[Tensor]:
    return [value.clone() for name, value in model.state_dict().items() if name.endswith("features")]


@pytest.mark.parametrize(
    ("seed", "step", "generator_seed"),
    [(0, 0, 2571870266368850484), (1, 0, 3395217350005487682), (0, 5, 795238244151152527)],
)
def test_features_are_those_of_the_seed_and_the_step(seed: int, step: int, generator_seed: int) -> None:
    """One generator for the whole model, so that no two layers have the same features."""
    assert generator_seed == derived(seed, "features", step)
    model = performers()
    BackboneSchedule(model, seed, 0, always).before_step(step, 0, step)
    generator = torch.Generator().manual_seed(generator_seed)
    first, second = features(model)
    assert torch.equal(first, orthogonal_features(4, 4, generator))
    assert torch.equal(second, orthogonal_features(3, 4, generator))


def test_features_of_seeds_and_steps_differ() -> None:
    drawn = []
    for seed, step in ((0, 0), (1, 0), (0, 1), (1, 1)):
        model = performers()
        BackboneSchedule(model, seed, 0, always).before_step(step, 0, step)
        drawn.append(features(model)[0])
    assert all(not torch.equal(a, b) for index, a in enumerate(drawn) for b in drawn[:index])


def test_features_stay_unless_they_are_redrawn() -> None:
    model = performers()
    before = features(model)
    asked: list[Any] = []

    def redraws(step: int, epoch: int, step_of_epoch: int) -> bool:
        asked.append((step, epoch, step_of_epoch))
        return False

    BackboneSchedule(model, 0, 0, redraws).before_step(9, 2, 1)
    assert asked == [(9, 2, 1)]
    assert all(torch.equal(a, b) for a, b in zip(features(model), before, strict=True))


def test_schedule_of_shift_and_features() -> None:
    model = VisionLongformer(small_config())
    schedule = BackboneSchedule(model, seed=0, shift_until=30, redraws_features=ClassificationTask.redraws_features)
    features, redrawn = model.state_dict()["stages.1.blocks.0.attn.features"].clone(), []
    for step in range(36):
        epoch, of_epoch = divmod(step, 12)
        schedule.before_step(step, epoch, of_epoch)
        assert model.config.neighbours == ("random" if step < 30 else "all")
        now = model.state_dict()["stages.1.blocks.0.attn.features"]
        if not torch.equal(now, features):
            redrawn.append((epoch, of_epoch))
            features = now.clone()
    assert redrawn == [*((0, n) for n in range(12)), (1, 0), (1, 6), (2, 0), (2, 11)]
