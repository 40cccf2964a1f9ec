"""Which cases each benchmark times, in which rounds, and what they are compared with."""

from __future__ import annotations

import pytest
import torch

from vision_longformer.bench import plans
from vision_longformer.bench.cases import FORWARD, FORWARD_BACKWARD, INFERENCE, REFERENCES, TRAINING_STEP
from vision_longformer.bench.plans import BENCHMARKS, Options, default_budget, pick_baseline, plan


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models use 'tiled' here, as where no kernel was built."""
    monkeypatch.setattr(plans, "AUTOMATIC", ("triton_gpu", "tiled"))


@pytest.mark.parametrize("name", list(BENCHMARKS))
@pytest.mark.parametrize("quick", [True, False])
def test_every_plan_has_its_baselines(name: str, quick: bool) -> None:
    for group in plan(name, Options(quick=quick))[name]:
        keys = {(case.point, case.variant, case.mode): case.round_key for case in group.cases}
        assert len(keys) == len(group.cases)
        assert all(keys[(*case.baseline, case.mode)] == case.round_key for case in group.cases)


def test_attention_covers_the_stated_shapes() -> None:
    paper, models = plan("attention", Options())["attention"]
    sides = [14, 28, 42, 56, 84, 112, 168]
    assert list(dict.fromkeys(case.point for case in paper.cases)) == [f"{n}×{n}, batch 1, 3×32" for n in sides]
    assert {(case.workload.window, case.workload.rule) for case in paper.cases} == {(8, "exact")}
    assert {case.point: case.units for case in models.cases} == {
        "56×56, batch 4, 3×32": 4 * 56 * 56,
        "112×112, batch 1, 3×32": 112 * 112,
        "50×84, batch 1, 6×64": 50 * 84,
        "200×334, batch 1, 3×32": 200 * 334,
    }
    assert {case.mode for case in models.cases} == {FORWARD, FORWARD_BACKWARD}
    assert {case.baseline[1] for case in models.cases} == {"sliding_chunk"}


def test_rules() -> None:
    groups = plan("rules", Options(sizes=((28, 30),)))["rules"]
    assert [group.name for group in groups] == ["tiled", "sliding_chunk"]
    cases = groups[0].cases
    assert [(case.variant, case.workload.rule, case.mode) for case in cases] == [
        (f"rule {rule}", rule, mode) for mode in (FORWARD, FORWARD_BACKWARD) for rule in ("chunk", "exact", "cyclic")
    ]
    assert {case.baseline for case in cases} == {("28×30, batch 1, 3×32", "rule chunk")}
    assert {case.workload.window for case in cases} == {8}


def test_windows() -> None:
    (group,) = plan("windows", Options(quick=True, sizes=((28, 28),)))["windows"]
    assert [(case.variant, case.workload.window) for case in group.cases] == [
        ("window 9 (chunk 4)", 4),
        ("window 15 (chunk 7)", 7),
        ("window 25 (chunk 12)", 12),
    ]
    assert {case.baseline[1] for case in group.cases} == {"window 15 (chunk 7)"}
    assert {case.mode for case in group.cases} == {FORWARD_BACKWARD}
    (group,) = plan("windows", Options(quick=True, sizes=((28, 28),), windows=(3, 5)))["windows"]
    assert {case.baseline[1] for case in group.cases} == {"window 7 (chunk 3)"}


def test_scaling_times_all_sizes_in_the_same_rounds() -> None:
    (group,) = plan("scaling", Options(quick=True))["scaling"]
    assert group.unit == "token"
    assert {case.round_key for case in group.cases} == {"all sizes"}
    assert {case.baseline for case in group.cases} == {("56×56, batch 1, 3×32", "tiled")}
    assert [case.units for case in group.cases] == [28**2, 56**2, 112**2] * 2
    (group,) = plan("scaling", Options(quick=True, sizes=((14, 14), (8, 8))))["scaling"]
    assert {case.baseline[0] for case in group.cases} == {"14×14, batch 1, 3×32"}


def test_models() -> None:
    choices = Options(models=("vision_longformer_tiny", "resnet50"), sizes=((64, 64),), shift=True)
    (group,) = plan("models", choices)["models"]
    assert [(case.variant, case.mode, case.workload.neighbours) for case in group.cases] == [
        ("vision_longformer_tiny", INFERENCE, "all"),
        ("resnet50", INFERENCE, "all"),
        ("vision_longformer_tiny", TRAINING_STEP, "all"),
        ("resnet50", TRAINING_STEP, "all"),
        ("vision_longformer_tiny, random shift", TRAINING_STEP, "random"),
    ]
    assert {case.baseline for case in group.cases} == {("64×64, batch 8", "vision_longformer_tiny")}
    assert {case.units for case in group.cases} == {8}


def test_models_once_for_each_implementation() -> None:
    choices = Options(
        models=("vision_longformer_tiny", "resnet50"), sizes=((800, 1333),), implementations=("tiled", "sliding_chunk")
    )
    (group,) = plan("models", choices)["models"]
    assert [(case.variant, case.workload.implementation) for case in group.cases if case.mode == INFERENCE] == [
        ("vision_longformer_tiny", "tiled"),
        ("vision_longformer_tiny, sliding_chunk", "sliding_chunk"),
        ("resnet50", "tiled"),
    ]
    assert {case.workload.batch for case in group.cases} == {1}


def test_shift() -> None:
    attention, step = plan("shift", Options(quick=True))["shift"]
    assert [(case.variant, case.workload.neighbours) for case in attention.cases if case.mode == FORWARD] == [
        ("tiled, all neighbours", "all"),
        ("tiled, random shift", "random"),
        ("tiled, own chunk only", "self"),
    ]
    assert [(case.variant, case.workload.neighbours) for case in step.cases] == [
        ("vision_longformer_tiny, all neighbours", "all"),
        ("vision_longformer_tiny, random shift", "random"),
    ]
    assert {case.mode for case in step.cases} == {TRAINING_STEP}
    assert {case.baseline[1] for case in step.cases} == {"vision_longformer_tiny, all neighbours"}


def test_large() -> None:
    (group,) = plan("large", Options(sizes=((64, 96), (32, 32))))["large"]
    small, large = "32×32, 0.00102 MP", "64×96, 0.00614 MP"
    ours, swin = "vision_longformer_tiny", "swin_tiny_patch4_window7_224"
    inference, training = (
        [f"{ours}, plain", f"{ours}, streamed"],
        [f"{ours}, {m}" for m in ("plain", "checkpointing", "strips")],
    )
    assert [(case.point, case.mode, case.variant) for case in group.cases] == [
        (point, mode, variant)
        for point in (small, large)
        for mode, variants in ((INFERENCE, inference), (TRAINING_STEP, training))
        for variant in (*variants, f"{swin}, plain")
    ]
    assert {(case.point, case.baseline, case.units) for case in group.cases} == {
        (small, (small, f"{ours}, plain"), 1024),
        (large, (large, f"{ours}, plain"), 64 * 96),
    }
    assert {case.workload.method for case in group.cases if case.variant.endswith("strips")} == {"strips"}
    assert "large" not in plan("all", Options())


def test_only_some_figures() -> None:
    (group,) = plan("attention", Options(), "shapes")["attention"]
    assert group.name == "model shapes"
    assert list(plan("all", Options(), "training step")) == ["shift"]
    with pytest.raises(ValueError, match="unknown figure 'shappes'"):
        plan("attention", Options(), "shappes")


def test_chosen_baseline_is_timed_too() -> None:
    options = Options(implementations=("tiled",), baseline="masked_dense", sizes=((8, 8),))
    cases = plan("attention", options)["attention"][0].cases
    assert {case.variant for case in cases} == {"tiled", "masked_dense", *REFERENCES}
    assert {case.baseline[1] for case in cases} == {"masked_dense"}


def test_pick_baseline() -> None:
    assert pick_baseline("second", "first", ["first", "second"]) == "second"
    assert pick_baseline(None, "second", ["first", "second"]) == "second"
    assert pick_baseline(None, "absent", ["first", "second"]) == "first"


def test_main_methods_are_what_models_use_and_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().main_methods() == ("tiled", "sliding_chunk")
    assert Options(quick=True).main_methods() == ("tiled",)
    assert Options(implementations=("flex",)).main_methods() == ("flex",)
    monkeypatch.setattr(plans, "AUTOMATIC", ("sliding_chunk",))
    assert Options(device=torch.device("cpu")).main_methods() == ("sliding_chunk",)


def test_budgets() -> None:
    """'quick: all of them in two minutes', with the seconds that processes and plots take on top."""
    assert {name: default_budget(name, quick=True) for name in BENCHMARKS} == {
        "attention": 34,
        "rules": 5,
        "windows": 5,
        "shift": 10,
        "models": 18,
        "scaling": 7,
        "large": 60,
    }
    assert sum(default_budget(name, quick=False) for name in BENCHMARKS if name != "large") == 4200
