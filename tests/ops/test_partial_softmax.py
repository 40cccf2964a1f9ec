"""A softmax over keys that come in parts: against one over all of them, outputs and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from builders import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vision_longformer.ops.partial_softmax import PartialSoftmax, PartInputs, attend_part, share_of


def drawn(keys: int, bias: bool, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(keys)
    shapes = (2, 3, 2, 4), (2, keys, 2, 4), (2, keys, 2, 4), (2, 3, keys)
    q, k, v, b = (torch.randn(shape, generator=generator, dtype=torch.float64) * spread for shape in shapes)
    return tuple(x.requires_grad_() for x in ((q, k, v, b) if bias else (q, k, v))) + (() if bias else (None,))


def whole(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 0.5
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def parts_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sizes: list[int]) -> list[PartInputs]:
    biases = [None] * len(sizes) if bias is None else bias.split(sizes, 2)
    return [PartInputs(q, *part, 0.5, b) for *part, b in zip(k.split(sizes, 1), v.split(sizes, 1), biases, strict=True)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.sampled_from([1.0, 40.0]))
def test_merged_parts_are_the_whole(sizes: list[int], bias: bool, spread: float) -> None:
    """Also where scores are so large that their exponentials overflow."""
    tensors, tolerance = drawn(sum(sizes), bias, spread=spread), 1e-10 if spread == 1 else 1e-8
    wanted = [x for x in tensors if x is not None]
    first, *rest = parts_of(*tensors, sizes)
    total = attend_part(first)
    for part in rest:
        total = total.merge(attend_part(part))
    expected = whole(*tensors)
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weight).sum(), wanted)
    assert_close(total.out, expected, 1e-12)
    through_merge = torch.autograd.grad((total.out * weight).sum(), wanted, retain_graph=True)
    shares, weights = zip(*(share_of(part, total) for part in parts_of(*tensors, sizes)), strict=True)
    assert_close(sum(shares), expected, 1e-12, "sum of the shares")
    assert_close(sum(weights), torch.ones_like(total.lse), 1e-12, "sum of the weights")
    by_parts = [torch.autograd.grad((share * weight).sum(), wanted, allow_unused=True) for share in shares]
    for index, expected_grad in enumerate(grads):
        assert_close(through_merge[index], expected_grad, tolerance, "gradient through the merge")
        summed = sum(part[index] for part in by_parts if part[index] is not None)
        assert_close(summed, expected_grad, tolerance, "sum of the parts' gradients")


def test_gradients_of_the_log_sum_exp_are_those_of_the_weights() -> None:
    q, k, v, bias = tensors = drawn(6, bias=True)
    assert bias is not None
    lse = (torch.einsum("bnhd,bmhd->bhnm", q, k) * 0.5 + bias).logsumexp(-1)
    expected = torch.autograd.grad(lse.sin().sum(), (q, k, bias))
    total = attend_part(PartInputs(q, k, v, 0.5, bias))
    through = [
        torch.autograd.grad((share_of(part, total)[1] * lse.detach().cos()).sum(), (q, k, bias))
        for part in parts_of(*tensors, [2, 1, 3])
    ]
    for index, grad in enumerate(expected):
        assert_close(sum(part[index] for part in through), grad, 1e-12)


def test_two_parts_by_hand() -> None:
    """Weights 1 and 3 of values 10 and 2 make 4; the second part has the larger score by ln 3."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(3.0)]).view(1, 2, 1, 1)
    v = torch.tensor([10.0, 2.0]).view(1, 2, 1, 1)
    first, second = (attend_part(PartInputs(q, k[:, i : i + 1], v[:, i : i + 1], 1.0)) for i in range(2))
    assert (first.out.item(), second.out.item()) == (10, 2)
    merged = first.merge(second)
    assert_close(merged.out.view(1), torch.tensor([4.0]), 1e-6)
    assert_close(merged.lse.view(1), torch.tensor([math.log(4.0)]), 1e-6)
    assert_close(second.merge(first).out, merged.out, 1e-7)


def test_autocast_leaves_float32_as_it_is() -> None:
    """1 + 2⁻¹⁰ and 3 + 2⁻¹⁰ are 1 and 3 in bfloat16. Scores 0 and (1 + 2⁻¹⁰)·1024 - 1025 = 0 give both keys a half."""
    q = torch.tensor([1 + 2**-10, 0.0]).view(1, 1, 1, 2)
    k = torch.tensor([[0.0, 0.0], [1024.0, 0.0]]).view(1, 2, 1, 2)
    v, bias = torch.tensor([1 + 2**-10, 3 + 2**-10]).view(1, 2, 1, 1), torch.tensor([[[0.0, -1025.0]]])
    inputs = PartInputs(q, k, v, 1.0, bias)
    with torch.autocast("cpu", torch.bfloat16):
        total = attend_part(inputs)
        share, weight = share_of(inputs, total)
        assert inputs.scores().flatten().tolist() == [0, 0]
    assert total.lse.item() == pytest.approx(math.log(2), rel=1e-6)
    assert total.out.item() == share.item() == pytest.approx(2 + 2**-10, rel=1e-6)
    assert weight.item() == pytest.approx(1, rel=1e-6)


def test_sixteen_bit_inputs_are_summed_in_float32() -> None:
    q, k, v, _ = drawn(5, bias=False)
    part = PartInputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.5)
    result = attend_part(part)
    assert (result.out.dtype, result.lse.dtype) == (torch.float32, torch.float32)
    exact = attend_part(PartInputs(*(x.bfloat16().double() for x in (q, k, v)), 0.5))
    assert_close(result.out, exact.out, 1e-6)
    assert isinstance(result, PartialSoftmax)
