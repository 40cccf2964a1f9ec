"""The exponential moving average of weights, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vision_longformer.training.ema import WeightAverage


def constant_model(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_average_of_weights() -> None:
    model = constant_model(1.0)
    average = WeightAverage(model, decay=0.5)
    nn.init.constant_(model.weight, 3.0)
    average.update(1)  # decay 2/11 so early
    expected = 1 + (3 - 1) * 9 / 11
    torch.testing.assert_close(average.values["weight"], torch.full((1, 1), expected))
    average.update(1000)
    expected += (3 - expected) / 2
    torch.testing.assert_close(average.values["weight"], torch.full((1, 1), expected))
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), torch.full((1, 1), expected))
    assert model.weight.item() == 3


def test_three_steps() -> None:
    """Decays 2/11, 3/12 and 4/13: 0 becomes 11·9/11 = 9, then 9/4 + 21·3/4 = 18, then 72/13 + 5·9/13 = 9."""
    model = constant_model(0.0)
    average = WeightAverage(model, decay=0.9999)
    values = []
    for step, weight in ((1, 11.0), (2, 21.0), (3, 5.0)):
        nn.init.constant_(model.weight, weight)
        average.update(step)
        values.append(average.values["weight"].item())
    assert values == pytest.approx([9, 18, 9], rel=1e-6)


def test_buffers_are_not_averaged() -> None:
    """While the averaged weights are in the model, its buffers are those of training."""
    model = nn.BatchNorm1d(1)
    average = WeightAverage(model, decay=0.5)
    model.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]
    nn.init.constant_(model.weight, 3.0)
    with average.applied():
        assert (model.weight.item(), model.running_mean.item()) == (1.0, 7.0)  # type: ignore[union-attr, operator]
    assert set(average.values) == {"weight", "bias"}


def test_an_error_leaves_the_weights_of_training() -> None:
    model = constant_model(1.0)
    average = WeightAverage(model, decay=0.5)
    nn.init.constant_(model.weight, 3.0)
    with pytest.raises(RuntimeError), average.applied():
        raise RuntimeError
    assert (model.weight.item(), average.values["weight"].item()) == (3.0, 1.0)


def test_loaded_values_are_copies() -> None:
    average = WeightAverage(constant_model(1.0), decay=0.5)
    stored = {"weight": torch.full((1, 1), 4.0)}
    average.load(stored)
    average.update(1000)
    assert average.values["weight"].item() == 2.5
    assert stored["weight"].item() == 4.0
