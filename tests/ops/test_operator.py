"""The registration of implementations as operators: torch's contract, gradients on demand, compiling and exporting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import Case, assert_as_promised, operator_arguments, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vision_longformer import local_attention
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import IMPLEMENTATIONS
from vision_longformer.ops.cpu import UNAVAILABLE
from vision_longformer.ops.operator import LOG2E, OPERATORS, empty_results, register, spec_of
from vision_longformer.ops.spec import Inputs, LocalSpec

RUNNABLE = [
    "tiled",
    pytest.param("fused_cpu", marks=pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))),
]
"""Operators that run without a GPU; that of Triton is tested by its interpreter in ``test_triton.py``."""

CASES = [
    (Case(), torch.float32),
    (Case(bias=False, global_bias=False, global_tokens=0), torch.float64),
    (Case(neighbours=torch.tensor(3), rule="exact"), torch.float32),
    (Case(rule="cyclic"), torch.bfloat16),
    (Case(heads=1), torch.float32),
    (Case(batch=0), torch.float32),
]


def backward_of(name: str) -> Any:
    return getattr(torch.ops.vision_longformer, f"{name}_backward")


def test_operators_have_the_names_of_their_implementations() -> None:
    assert set(OPERATORS) == {"tiled", "fused_cpu", "triton_gpu", "triton_rows"}
    assert set(OPERATORS) - set(IMPLEMENTATIONS) == {"triton_rows"}
    for name, operator in OPERATORS.items():
        assert str(operator.default) == f"vision_longformer.{name}.default"


def test_schemas() -> None:
    schemas = {
        str(operator.default._schema).removeprefix(f"vision_longformer::{name}") for name, operator in OPERATORS.items()
    }
    assert schemas == {
        "(Tensor qkv, Tensor? bias, Tensor? global_bias, Tensor? from_global_bias, Tensor? neighbour, SymInt height, "
        "SymInt width, SymInt window, str rule, str neighbour_mode, SymInt[] dilation, float scale, "
        "SymInt[] halo) -> (Tensor, Tensor)",
        "(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? global_bias, Tensor? neighbour, SymInt height, "
        "SymInt width, SymInt window, str rule, str neighbour_mode, SymInt[] dilation, float scale, "
        "SymInt[] halo) -> (Tensor, Tensor)",
    }


def test_the_spec_in_the_arguments_of_an_operator() -> None:
    settings = (5, 7, 3, "exact", "all", [2], 0.5, [])
    assert spec_of((None,) * 6 + settings) == LocalSpec(Grid(5, 7), 3, "exact", "all", 2, 0.5)
    per_head = (5, 7, 3, "exact", "all", [2, 1], 0.5, [3, 0])
    spec = spec_of((None,) * 6 + per_head + ("out", "lse", True, False))
    assert (spec.dilation, spec.halo, spec.key_grid) == ((2, 1), (3, 0), Grid(8, 7))


@pytest.mark.parametrize(("dtype", "sums"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_results_are_dense(dtype: torch.dtype, sums: torch.dtype) -> None:
    q = torch.zeros(2, 12, 3, 4, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = empty_results(q)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 12, 3, 4), dtype, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 3, 12), sums, True)


# The contract of torch.library


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_operators_keep_their_promises(name: str, case: Case, dtype: torch.dtype) -> None:
    """Schemas, fake results, autograd and dynamic shapes, by torch's own checks; what is not needed is empty."""
    tolerances = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.library.opcheck(OPERATORS[name].default, operator_arguments(case, dtype, grad=True), **tolerances)
    inputs = operator_arguments(case, dtype, grad=False)
    out, lse = OPERATORS[name](*inputs)
    for needs_bias, needs_global_bias in ((case.bias, case.global_bias), (False, False)):
        given = (torch.ones_like(out), *inputs, out, lse, needs_bias, needs_global_bias)
        torch.library.opcheck(backward_of(name).default, given)
        grads = backward_of(name)(*given)
        assert_as_promised(name, inputs, (out, lse))
        assert_as_promised(f"{name}_backward", given, grads)
        assert [grad.numel() > 0 for grad in grads[3:]] == [needs_bias, needs_global_bias]


def test_results_are_as_promised_whatever_an_implementation_returns() -> None:
    """Of any layout, in another dtype, with gradients that nobody asked for."""

    def strided(x: Tensor) -> Tensor:
        return torch.full(x.shape[::-1], 7.0, dtype=torch.float64).permute(*reversed(range(x.dim())))

    def forward(inputs: Inputs, spec: LocalSpec) -> Any:
        out, lse = empty_results(inputs.q)
        return strided(out), strided(lse)

    def backward(grad: Tensor, inputs: Inputs, *_: object) -> Any:
        return tuple(strided(x) for x in inputs[:5])

    register("test_strided", forward, backward)
    del OPERATORS["test_strided"]
    for case in (Case(heads=3), Case(heads=1), Case(batch=0)):
        inputs = operator_arguments(case, torch.bfloat16, grad=False)
        out, lse = torch.ops.vision_longformer.test_strided(*inputs)
        assert_as_promised("test_strided", inputs, (out, lse))
        assert torch.equal(out, torch.full(inputs[0].shape, 7.0, dtype=torch.bfloat16))
        for needs in ((True, True), (True, False), (False, True), (False, False)):
            given = (out, *inputs, out, lse, *needs)
            grads = backward_of("test_strided")(*given)
            assert_as_promised("test_strided_backward", given, grads)
            assert [grad.numel() > 0 for grad in grads[3:]] == list(needs)


@pytest.mark.parametrize("name", RUNNABLE)
def test_log_sum_exp_by_hand(name: str) -> None:
    """Two tokens of one chunk that see each other, scores 2·1 and 2·3, and a global key with score 0."""
    q, k = torch.ones(1, 2, 1, 1), torch.tensor([0.0, 1.0, 3.0]).view(1, 3, 1, 1)
    v = torch.tensor([0.0, 10.0, 20.0]).view(1, 3, 1, 1)
    out, lse = OPERATORS[name](q, k, v, None, None, None, 1, 2, 2, "chunk", "all", [1], 2.0, [])
    assert lse.shape == (1, 1, 2)
    assert lse.flatten().tolist() == pytest.approx([6.020581] * 2, rel=1e-6)  # ln(1 + e² + e⁶)
    assert out.flatten().tolist() == pytest.approx([19.772009] * 2, rel=1e-6)  # (10 e² + 20 e⁶) / (1 + e² + e⁶)


@pytest.mark.parametrize("name", RUNNABLE)
def test_log_sum_exp_has_no_gradient(name: str) -> None:
    out, lse = OPERATORS[name](*operator_arguments(Case(), torch.float32, grad=True))
    assert out.requires_grad
    assert not lse.requires_grad


def test_log2e() -> None:
    assert LOG2E == 1.4426950408889634


# Gradients on demand


def test_only_what_is_needed_is_asked_for() -> None:
    """Gradients of any dtype and layout become dense ones of their inputs' dtype; others are not asked for."""
    asked = []

    def forward(inputs: Inputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
        out, lse = empty_results(inputs.q)
        return out.fill_(spec.scale), lse.zero_()

    def backward(
        grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool, needs_global: bool
    ) -> Any:
        asked.append((needs_bias, needs_global))
        seven = torch.tensor(7.0, dtype=torch.float64)
        given = zip(inputs[:5], (True, True, True, needs_bias, needs_global), strict=True)
        return tuple(seven.expand(x.shape) if needed else None for x, needed in given)

    attend = register("test_asked", forward, backward)
    del OPERATORS["test_asked"]
    for needed in (("q", "bias", "global_bias"), ("v", "bias"), ("k",)):
        tensors = {name: x.detach() for name, x in Case((2, 3)).tensors(torch.float32).items() if name != "weight"}
        for name in needed:
            tensors[name].requires_grad_()
        out = attend(Inputs(**tensors), LocalSpec(Grid(2, 3), 2, "chunk", "all", 1, 0.25))
        assert torch.equal(out, torch.full((2, 6, 2, 4), 0.25))
        out.sum().backward()
        for name, x in tensors.items():
            assert (x.grad is None) if name not in needed else torch.equal(x.grad, torch.full(x.shape, 7.0))
    assert asked == [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("wanted", ["bias", "global_bias", "v"])
def test_the_gradient_of_one_input(name: str, wanted: str) -> None:
    """It is the same, whether others are wanted or not."""
    case = Case()
    alone = {key: x.detach().requires_grad_(key == wanted) for key, x in case.tensors().items()}
    expected = run("masked_dense", case, alone)[f"gradient of {wanted}"]
    torch.testing.assert_close(run(name, case, alone)[f"gradient of {wanted}"], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("rule", RULES)
def test_numeric_gradients(name: str, rule: str) -> None:
    inputs = operator_arguments(Case((3, 4), 2, rule, dim=3, batch=1), torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda *x: OPERATORS[name](*x, *inputs[5:])[0], inputs[:5], fast_mode=True)


# Compilers and exporters


@pytest.mark.parametrize("name", RUNNABLE)
def test_compiles_to_one_graph_for_all_sizes(name: str) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
        return local_attention(q, k, v, (height, width), window=3, implementation=name) * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for height, width in ((7, 9), (8, 5), (12, 13)):
        q, k, v = (torch.randn(2, height * width + i, 2, 8, requires_grad=True) for i in (0, 1, 1))
        out, expected = compiled(q, k, v, height, width), attend(q, k, v, height, width)
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.parametrize("name", RUNNABLE)
def test_exports_with_free_sizes(name: str) -> None:
    class Attend(torch.nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            tokens = image.flatten(1, 2).unsqueeze(2)
            return local_attention(tokens, tokens, tokens, image.shape[1:3], window=3, implementation=name)

    dims = {1: torch.export.Dim("height", min=4, max=64), 2: torch.export.Dim("width", min=4, max=64)}
    program = torch.export.export(Attend(), (torch.randn(1, 9, 11, 8),), dynamic_shapes=({**dims},))
    called = [node.target for node in program.graph.nodes if "vision_longformer" in str(node.target)]
    assert called == [OPERATORS[name].default]
    image = torch.randn(1, 13, 8, 8)
    assert torch.equal(program.module()(image), Attend()(image))


@pytest.mark.parametrize("name", RUNNABLE)
def test_gradient_checkpointing_and_no_grad(name: str) -> None:
    case = Case((7, 9), 3)
    tensors = [x for key, x in case.tensors().items() if key != "weight"]

    def attend(*x: Tensor) -> Tensor:
        return local_attention(*x[:3], case.grid, window=3, bias=x[3], global_bias=x[4], implementation=name)

    plain = attend(*tensors)
    again = checkpoint(attend, *tensors, use_reentrant=False)
    expected = torch.autograd.grad(plain.square().sum(), tensors)
    got = torch.autograd.grad(again.square().sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(attend(*tensors), plain)
