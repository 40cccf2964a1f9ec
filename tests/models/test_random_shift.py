"""Random shift: one neighbour per layer and step, from a source that can be seeded and resumed."""

from __future__ import annotations

import pytest
import torch
from builders import assert_close, build, image

from vision_longformer.models.attention import LongformerAttention
from vision_longformer.models.random_shift import RandomShift

X = image(80, 80, dtype=torch.float64)


def outputs(model: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    return [model(X).detach() for _ in range(steps)]


def test_all_neighbours_occur_equally_often() -> None:
    source = RandomShift(seed=3)
    draws = torch.stack([source.draw(12) for _ in range(500)])
    counts = torch.bincount(draws.flatten(), minlength=9)
    assert counts[0] == 0
    assert len(counts) == 9
    assert (counts[1:] - 750).abs().max() < 120  # about four standard deviations


def test_layers_steps_and_seeds_are_drawn_independently() -> None:
    """Two columns, two rows, or two seeds agree about one time in eight."""
    first = torch.stack([draw for s in [RandomShift(3)] for draw in (s.draw(12) for _ in range(500))])
    second = torch.stack([draw for s in [RandomShift(4)] for draw in (s.draw(12) for _ in range(500))])
    pairs = [(first, second), (first[:, 1:], first[:, :-1]), (first[1:], first[:-1])]
    for left, right in pairs:
        assert 0.1 < (left == right).double().mean() < 0.15


def test_draws_do_not_touch_or_need_the_global_generator() -> None:
    torch.manual_seed(0)
    first = RandomShift(1).draw(6)
    state = torch.get_rng_state()
    torch.manual_seed(9)
    assert torch.equal(RandomShift(1).draw(6), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_is_reproducible_and_resumable() -> None:
    model = build("vil", torch.float64, neighbours="random").train()
    model.random_shift.seed(11)
    first = outputs(model, 5)
    assert model.random_shift.state.tolist() == [11, 5]
    assert any(not torch.equal(first[0], other) for other in first[1:])
    model.random_shift.seed(11)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, 5), first, strict=True))
    model.random_shift.seed(11, 3)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, 2), first[3:], strict=True))
    model.random_shift.seed(12)
    assert any(not torch.equal(a, b) for a, b in zip(outputs(model, 5), first, strict=True))


def test_each_layer_uses_its_own_draw() -> None:
    """What a training step computes is what the blocks compute with the neighbours drawn for them, in order."""
    model = build("vil", torch.float64, neighbours="random").train()
    seen = []
    for module in model.modules():
        if isinstance(module, LongformerAttention):
            module.register_forward_pre_hook(lambda _, args: seen.append(int(args[2])))
    for step in range(3):
        seen.clear()
        model.random_shift.seed(5, step)
        logits = model(X)
        source = RandomShift(5)
        source.seed(5, step)
        drawn = source.draw(5)
        assert seen == drawn.tolist()
        x, at = X, 0
        for stage in model.stages:
            depth = len(stage.blocks)
            tokens, grid = stage(x, drawn[at : at + depth])
            x, at = tokens[:, -grid.tokens :].transpose(1, 2).unflatten(2, tuple(grid)), at + depth
        assert_close(model.forward_head(model.norm(tokens)), logits, 1e-12)


def test_evaluation_sees_all_neighbours_and_draws_nothing() -> None:
    model = build("vil", torch.float64, neighbours="random").eval()
    everything = build("vil", torch.float64).eval()
    assert torch.equal(model(X), everything(X))
    assert model.random_shift.state.tolist() == [0, 0]


@pytest.mark.parametrize("neighbours", ["all", "self", "random"])
def test_set_neighbours_is_as_if_built_so(neighbours: str) -> None:
    model = build("vil", torch.float64).train()
    model.set_neighbours(neighbours, eval_neighbours="self")
    built = build("vil", torch.float64, neighbours=neighbours, eval_neighbours="self").train()
    assert model.config == built.config
    for a, b in zip(outputs(model, 2), outputs(built, 2), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model.eval()(X), built.eval()(X))


def test_neighbours_change_what_is_computed() -> None:
    results = {}
    for neighbours in ("all", "self", "random"):
        model = build("vil", torch.float64, neighbours=neighbours).train()
        results[neighbours] = model(X)
    for a, b in (("all", "self"), ("all", "random"), ("self", "random")):
        assert (results[a] - results[b]).abs().max() > 1e-9


def test_unknown_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown neighbours 'randm'; did you mean 'random'"):
        build("vil").set_neighbours("randm")


def test_the_source_is_not_part_of_the_weights() -> None:
    assert not [name for name in build("vil").state_dict() if "random_shift" in name]
