"""Random shift: one neighbour per layer and step, from a source that can be seeded and resumed."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import assert_close, build, image

from vision_longformer.models.attention import Attention, LongformerAttention
from vision_longformer.models.random_shift import RandomShift

X = image(80, 80, dtype=torch.float64)


def outputs(model: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    return [model(X).detach() for _ in range(steps)]


def draws(seed: int, steps: int, layers: int) -> torch.Tensor:
    """The neighbours of the first steps of a seed, (steps, layers)."""
    source = RandomShift(seed)
    return torch.stack([source.draw(layers) for _ in range(steps)])


@pytest.mark.parametrize(
    ("seed", "step", "neighbours"),
    [
        (0, 0, [1, 8, 1, 6, 2, 3]),
        (3, 0, [2, 2, 5, 8, 4, 5]),
        (3, 1, [3, 1, 4, 7, 7, 4]),
        (4, 0, [8, 6, 3, 6, 3, 5]),
        (4, 1, [7, 5, 7, 8, 3, 5]),
        (2147483655, 123456, [1, 1, 2, 1, 1, 4]),
        (4294967295, 1000000, [2, 7, 6, 4, 1, 1]),
    ],
)
def test_draws_of_a_seed_and_step(seed: int, step: int, neighbours: list[int]) -> None:
    """Computed apart from the code, with whole numbers: ``h(h(h(seed) ^ step) ^ layer) % 8 + 1`` for layers 0 to 5,
    where h(x) is twice ``x = (x ^ x // 65536) * 73244475 % 2**32``, then ``x ^ x // 65536``. Runs depend on them."""
    source = RandomShift()
    source.seed(seed, step)
    assert source.draw(6).tolist() == neighbours
    assert source.state.tolist() == [seed, step + 1]


def test_no_seed_is_another_seed_some_steps_later() -> None:
    """Of unrelated draws of 1 to 8, an eighth agree."""
    sequences = [draws(seed, 64, 6) for seed in range(8)]
    for (one, first), (other, second) in itertools.permutations(enumerate(sequences), 2):
        for delay in range(9):
            agreement = (first[delay:] == second[: 64 - delay]).double().mean()
            assert agreement < 0.25, f"seed {one} from step {delay} on is like seed {other}"


def test_all_neighbours_occur_equally_often() -> None:
    counts = torch.bincount(draws(3, 500, 12).flatten(), minlength=9)
    assert counts[0] == 0
    assert len(counts) == 9
    assert (counts[1:] - 750).abs().max() < 120  # about four standard deviations


def test_layers_steps_and_seeds_are_drawn_independently() -> None:
    """Two columns, two rows, or two seeds agree about one time in eight."""
    first, second = draws(3, 500, 12), draws(4, 500, 12)
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


def test_the_end_of_random_shift_leaves_evaluation_alone() -> None:
    model = build("vil", torch.float64, neighbours="random", eval_neighbours="self")
    expected = model.eval()(X)
    model.set_neighbours("all")
    assert (model.config.neighbours, model.config.eval_neighbours) == ("all", "self")
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("evaluation", ["all", "self"])
@pytest.mark.parametrize("training", ["all", "self", "random"])
def test_the_mode_says_what_every_layer_sees(training: str, evaluation: str) -> None:
    model = build("partial_vil", neighbours=training, eval_neighbours=evaluation)
    seen: list[object] = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    model.train()(X.float())
    assert seen == ([1, 8, 1, 6] if training == "random" else [training] * 4)
    seen.clear()
    model.eval()(X.float())
    assert seen == [evaluation] * 4


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
