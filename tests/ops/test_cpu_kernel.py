"""The fused CPU kernel: every level of instructions against the oracle, threads, memory layouts, refusals."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import TOLERANCES, Case, assert_close, compare, oracle, run
from torch import Tensor
from torch._subclasses import FakeTensorMode

from vision_longformer import local_attention
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import cpu
from vision_longformer.ops.cpu import FUSED_CPU, library
from vision_longformer.ops.cpu.library import Library, load, use_level
from vision_longformer.ops.operator import OPERATORS
from vision_longformer.ops.spec import LocalSpec

if isinstance(load(), str):
    pytest.skip(str(load()), allow_module_level=True)

TOLERANCES = {**TOLERANCES, torch.float32: 3e-6, torch.float16: 4e-3}
LIBRARY = load()
assert isinstance(LIBRARY, Library)


@pytest.fixture(params=LIBRARY.levels)
def _level(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_level(request.param):
        yield


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(case: Case, dtype: torch.dtype = torch.float64) -> None:
    """As ``compare``, with the closer tolerances of this kernel."""
    got = run("fused_cpu", case, case.tensors(dtype))
    for name, expected in oracle(case, dtype).items():
        assert got[name].dtype == dtype
        assert_close(got[name], expected, TOLERANCES[dtype], f"{name} in {case}")


# Values


SIZES = [
    ((1, 1), 1),
    ((1, 1), 7),
    ((3, 20), 7),
    ((10, 11), 7),
    ((14, 14), 7),
    ((9, 13), 3),
    ((17, 16), 3),
    ((15, 6), 2),
]


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("grid", "window"), SIZES)
def test_rules_and_sizes(rule: str, grid: tuple[int, int], window: int) -> None:
    for global_tokens, neighbours in itertools.product((0, 1, 3), ("all", "self")):
        check(Case(grid, window, rule, neighbours, global_tokens, bias=global_tokens < 3, dim=5))


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("neighbour", range(1, 9))
def test_one_neighbour(rule: str, neighbour: int) -> None:
    check(Case((7, 8), 3, rule, torch.tensor(neighbour)))
    check(Case((2, 5), 3, rule, neighbour, global_tokens=0))


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("dim", [1, 3, 8, 16, 20, 24, 32, 33, 48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_head_dimensions(dim: int, dtype: torch.dtype) -> None:
    check(Case((9, 10), 4, dim=dim, heads=3), dtype)


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_data_types(dtype: torch.dtype, rule: str) -> None:
    for dim in (7, 32):
        check(Case((11, 9), 4, rule, dim=dim), dtype)


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("rule", ["chunk", "exact"])
def test_window_too_large_for_the_bias_cache(rule: str) -> None:
    check(Case((40, 38), 18, rule, batch=1))
    check(Case((40, 38), 18, rule, batch=1, heads=1, global_bias=False), torch.float32)


@pytest.mark.usefixtures("_level")
def test_many_tiles() -> None:
    check(Case((41, 43), 2, "cyclic", batch=1, heads=1))
    check(Case((41, 43), 2, "chunk", batch=1, heads=1, global_tokens=40))


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grid", [pytest.param((34, 34), marks=pytest.mark.slow), (17, 33)])
def test_heads_together(grid: tuple[int, int], rule: str) -> None:
    """Maps of so many tiles that backward works on heads together: all five, or in passes of one and two."""
    check(Case(grid, 2, rule, batch=1, heads=5))
    check(Case(grid, 2, rule, neighbours=8, batch=1, heads=5, global_tokens=9), torch.float32)


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("shift", [-3000.0, -500.0, -120.0, 120.0, 500.0, 3000.0])
def test_large_scores(shift: float) -> None:
    """A constant added to all scores changes nothing; huge differences leave one weight."""
    case = Case((9, 8), 3, rule="exact", dim=8)
    tensors = case.tensors()
    expected = run("fused_cpu", case, tensors)
    moved = {
        **tensors,
        "bias": (tensors["bias"] + shift).detach(),
        "global_bias": (tensors["global_bias"] + shift).detach(),
    }
    got = run("fused_cpu", case, {name: x.detach().requires_grad_(x.requires_grad) for name, x in moved.items()})
    assert_close(got["output"], expected["output"], 1e-9)
    check(replace(case, scale=shift))


@pytest.mark.usefixtures("_level")
def test_not_a_number_spreads_to_those_who_see_it() -> None:
    q, k, v = (torch.randn(1, 36, 1, 8) for _ in range(3))
    k[0, 0] = torch.nan
    out = local_attention(q, k, v, (6, 6), window=2, implementation="fused_cpu")
    seen = torch.zeros(6, 6, dtype=torch.bool)
    seen[:4, :4] = True
    assert torch.equal(out.isnan().all(-1).view(6, 6), seen)


# Threads and memory


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [(1, 1, (29, 30)), (2, 3, (16, 23))])
def test_same_bits_for_any_number_of_threads(rule: str, size: tuple[int, int, tuple[int, int]]) -> None:
    batch, heads, grid = size
    case = Case(grid, 3, rule, batch=batch, heads=heads, dim=16)
    tensors = case.tensors(torch.float32)
    results = []
    for threads in (1, 2, 7, 2, 1):
        torch.set_num_threads(threads)
        results.append(run("fused_cpu", case, tensors))
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])


def test_threads_are_those_of_torch() -> None:
    assert LIBRARY.threaded


def layouts(x: Tensor) -> Iterator[Tensor]:
    """The same numbers, stored otherwise."""
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    yield torch.stack([x, x + 1], 2)[:, :, 0]
    yield torch.cat([x, x], -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("index", range(4))
def test_strided_inputs(index: int) -> None:
    case = Case((7, 9), 3, dim=16)
    tensors = case.tensors(torch.float32)
    expected = run("fused_cpu", case, tensors)
    strided = {
        name: list(layouts(x.detach()))[index].requires_grad_() if x.dim() == 4 and name != "weight" else x
        for name, x in tensors.items()
    }
    got = run("fused_cpu", case, strided)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("loss", [lambda out: out.transpose(1, 3).square().sum(), torch.sum])
def test_views_of_one_projection(loss: Callable[[Tensor], Tensor]) -> None:
    """As the model passes them; the gradient of the output may have any strides, too."""
    qkv = torch.randn(2, 1 + 63, 3, 2, 16, requires_grad=True)
    q, k, v = qkv.unbind(2)
    grads = []
    for name in ("fused_cpu", "masked_dense"):
        out = local_attention(q[:, 1:], k, v, (7, 9), window=3, implementation=name)
        grads.append(torch.autograd.grad(loss(out), qkv)[0])
    assert_close(grads[0], grads[1], 1e-5)


@pytest.mark.usefixtures("_threads")
def test_what_the_library_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch's threads, the best level of instructions, and slices of a projection where they are."""
    calls = []

    def run_problem(reference: Any, level: int, backward: bool) -> int:
        calls.append((reference._obj, level, backward))
        return vl_run(reference, level, backward)

    vl_run = LIBRARY._library.vl_run
    monkeypatch.setattr(LIBRARY, "_library", SimpleNamespace(vl_run=run_problem))
    torch.set_num_threads(3)
    qkv = torch.randn(2, 1 + 63, 3, 2, 16, requires_grad=True)
    bias = torch.randn(2, 11, 11)
    q, k, v = qkv.unbind(2)
    local_attention(q[:, 1:], k, v, (7, 9), window=3, bias=bias, implementation="fused_cpu").sum().backward()
    best = library.LEVELS.index(LIBRARY.levels[-1])
    assert [(level, backward) for _, level, backward in calls] == [(best, False), (best, True)]
    for problem, *_ in calls:
        assert problem.threads == 3
        assert (problem.q, problem.k, problem.v) == (q[:, 1:].data_ptr(), k.data_ptr(), v.data_ptr())
        assert list(problem.q_strides) == [64 * 96, 96, 16]
        assert problem.bias == bias.data_ptr()
        assert problem.global_bias is None
    assert calls[1][0].grad_bias is None  # which nothing asked for
    assert calls[1][0].grad_q is not None


def test_empty_batch() -> None:
    case = Case(batch=0)
    for name, result in run("fused_cpu", case, case.tensors(torch.float32)).items():
        assert result.numel() == 0 or not result.any(), name


# Refusals


def test_refusals() -> None:
    spec = LocalSpec(Grid(4, 4), 2, "exact", "all", 2, 1.0)
    q = torch.zeros(1, 16, 1, 4)
    assert "dilation" in str(FUSED_CPU.refusal(spec, q))
    assert "dilation" in str(FUSED_CPU.refusal(replace(spec, dilation=(1, 2)), q))
    spec = replace(spec, dilation=1)
    assert FUSED_CPU.refusal(spec, q) is None
    assert FUSED_CPU.refusal(spec, q.to("meta")) is None
    assert "int32" in str(FUSED_CPU.refusal(spec, q.int()))
    with FakeTensorMode():
        on_gpu = torch.empty(1, 16, 1, 4, device="cuda")
    assert FUSED_CPU.refusal(spec, on_gpu) == "the kernel runs on the CPU, but the tensors are on 'cuda'"


def test_shapes_are_checked_before_pointers_are_used() -> None:
    tensors = Case().tensors(torch.float32, grad=False)
    inputs = [tensors[name] for name in ("q", "k", "v", "bias", "global_bias")]
    inputs += [None, 5, 9, 2, "chunk", "all", [1], 0.5]
    wrong = {
        0: inputs[0][:, 1:],
        1: inputs[1][:, :, :1],
        2: inputs[2].double(),
        3: inputs[3][:, 1:],
        4: inputs[4][:1],
        6: 7,
    }
    operator = OPERATORS["fused_cpu"]
    for index, value in wrong.items():
        with pytest.raises(ValueError, match="do not fit"):
            operator(*inputs[:index], value, *inputs[index + 1 :])
    for neighbour in (None, torch.tensor(0), torch.tensor(9)):
        with pytest.raises(ValueError, match=r"1\.\.8"):
            operator(*inputs[:5], neighbour, *inputs[6:10], "one", [1], 1.0)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", f"{tmp_path}/library.py")
    reason = load.__wrapped__()
    assert "no C++ compiler" in reason
    monkeypatch.setattr(cpu, "UNAVAILABLE", reason)
    assert FUSED_CPU.refusal(LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0), torch.zeros(1, 16, 1, 4)) == reason
    monkeypatch.setattr(cpu, "load", lambda: reason)
    q = torch.zeros(1, 4, 1, 1)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        OPERATORS["fused_cpu"](q, q, q, None, None, None, 2, 2, 2, "chunk", "all", [1], 1.0)


def test_the_level_of_a_context_ends_with_it() -> None:
    with contextlib.suppress(KeyError), use_level("portable"):
        assert LIBRARY.level == "portable"
        raise KeyError
    assert LIBRARY.level == LIBRARY.levels[-1]


def test_unknown_level() -> None:
    with pytest.raises(ValueError, match="not available"), use_level("mmx"):
        pass


def test_agrees_as_all_others_do() -> None:
    compare("fused_cpu", Case((16, 15), 5), torch.float32)
