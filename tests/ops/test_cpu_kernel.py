"""The fused CPU kernel: every level of instructions against the oracle, threads, memory layouts, refusals."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import TOLERANCES, Case, assert_close, compare, oracle, run, run_bands
from emulator import EmulatedLibrary, missing_tools
from torch import Tensor
from torch._subclasses import FakeTensorMode

from vision_longformer import local_attention
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import cpu
from vision_longformer.ops.cpu import FUSED_CPU, library
from vision_longformer.ops.cpu.library import Library, load, use_level
from vision_longformer.ops.local_attention import automatic
from vision_longformer.ops.operator import OPERATORS
from vision_longformer.ops.spec import LocalSpec

if isinstance(load(), str):
    pytest.skip(str(load()), allow_module_level=True)

TOLERANCES = {**TOLERANCES, torch.float32: 3e-6, torch.float16: 4e-3}
LIBRARY = load()
assert isinstance(LIBRARY, Library)


@pytest.fixture(scope="session")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedLibrary]:
    if missing_tools():
        pytest.skip(f"{' and '.join(missing_tools())} not installed")
    emulated = EmulatedLibrary(tmp_path_factory.mktemp("arm"))
    yield emulated
    emulated.close()


@pytest.fixture(params=[*LIBRARY.levels, pytest.param("arm", marks=pytest.mark.slow)])
def _level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every level of instructions that this machine has, and those of 64-bit ARM in an emulator."""
    if request.param == "arm":
        emulated = request.getfixturevalue("arm")
        monkeypatch.setattr(cpu, "load", lambda: emulated)
        yield
        return
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


# Bands of a map


def check_bands(case: Case, rows: int, dtype: torch.dtype = torch.float64) -> None:
    """Bands of so many chunk rows make up what the oracle says of the whole map."""
    got = run_bands("fused_cpu", case, case.tensors(dtype), rows)
    assert got is not None
    for name, expected in oracle(case, dtype).items():
        assert_close(got[name], expected, TOLERANCES[dtype], f"{name} of bands of {rows} in {case}")


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("rule", RULES)
def test_bands(rule: str) -> None:
    """Of one chunk row and of several, with a partial last one, over more tiles than one."""
    check_bands(Case((9, 13), 3, rule, dim=5), 1)
    check_bands(Case((11, 13), 3, rule, neighbours=7, dim=5), 2)
    check_bands(Case((19, 12), 2, rule, batch=1, heads=3, global_tokens=0), 6)
    check_bands(Case((10, 11), 7, rule, global_tokens=3), 1, torch.float32)


@pytest.mark.usefixtures("_level")
def test_bands_with_scores_far_below_zero() -> None:
    """Which are seen relative to that of a query's own key, among the keys of the band."""
    case = Case((9, 8), 3, dim=8)
    tensors = case.tensors(grad=False)
    tensors["bias"] -= 500
    tensors["global_bias"] -= 500
    tensors["q"] *= 20
    got = run_bands("fused_cpu", case, tensors, 1)
    assert got is not None
    assert_close(got["output"], run("masked_dense", case, tensors)["output"], 1e-9)


@pytest.mark.usefixtures("_level")
def test_a_spoiled_key_of_the_halo_reaches_the_band() -> None:
    """Chunks of one token in one column: the key above is seen by the first query alone."""
    q, k, v = torch.zeros(1, 3, 1, 4), torch.zeros(1, 5, 1, 4), torch.ones(1, 5, 1, 4)
    k[:, 0] = torch.nan
    out = local_attention(q, k, v, (3, 1), window=1, halo=(1, 1), implementation="fused_cpu")
    assert out.isnan().all(-1).flatten().tolist() == [True, False, False]


# Numbers that are not finite: they reach those who see them, and nobody else


def seen_keys(case: Case) -> Tensor:
    """Which keys (G + N) each query (N) sees: where the oracle's weights of equal scores are not 0."""
    keys = case.global_tokens + Grid(*case.grid).tokens
    k, v = torch.zeros(1, keys, 1, keys), torch.eye(keys)[None, :, None]
    out = local_attention(k[:, case.global_tokens :], k, v, case.grid, **case.options(), implementation="masked_dense")
    return out[0, :, 0] > 0


def assert_spoiled(got: Tensor, expected: Tensor, tokens: Tensor, what: str, tolerance: float | None = None) -> None:
    """The tokens of a mask are not numbers, all others are as expected."""
    assert got[:, tokens].isnan().all(), f"{what} is a number for some of {tokens.nonzero().flatten().tolist()}"
    assert_close(got[:, ~tokens], expected[:, ~tokens], tolerance or TOLERANCES[got.dtype], what)


SPOILED = [
    Case((7, 7), 7, batch=1, heads=1, dim=8, global_tokens=0),
    Case((9, 11), 4, "exact", batch=1, dim=5),
    Case((9, 11), 4, "exact", neighbours=2, batch=1, dim=5),
    Case((9, 11), 4, "cyclic", batch=1, dim=5),
    Case((20, 19), 18, "exact", batch=1, heads=1),
]


@pytest.mark.usefixtures("_level")
def test_a_query_that_is_not_a_number_spoils_no_other() -> None:
    """Wherever it is, and wherever another one has large scores, which need a reference of their own."""
    case = Case((7, 7), 7, batch=1, heads=1, dim=8, global_tokens=0, bias=False, global_bias=False)
    healthy = case.tensors(torch.float32, grad=False)
    for large in range(0, 49, 7):
        q = healthy["q"].clone()
        q[:, large] *= 200
        doubles = [x.double() for x in (q, healthy["k"], healthy["v"])]
        expected = local_attention(*doubles, (7, 7), window=7, implementation="masked_dense")
        for spoiled in set(range(49)) - {large}:
            q_spoiled = q.clone()
            q_spoiled[:, spoiled] = torch.nan
            got = local_attention(q_spoiled, healthy["k"], healthy["v"], (7, 7), window=7, implementation="fused_cpu")
            assert_spoiled(got, expected, torch.arange(49) == spoiled, f"output beside large query {large}", 1e-4)


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_query_that_is_not_a_number(case: Case, dtype: torch.dtype) -> None:
    seen, expected = seen_keys(case), oracle(case, dtype)
    for query in (0, 13, len(seen) - 1):
        tensors = case.tensors(dtype)
        tensors["q"].data[:, query] = torch.nan
        got, own = run("fused_cpu", case, tensors), torch.arange(len(seen)) == query
        assert_spoiled(got["output"], expected["output"], own, "output")
        assert_spoiled(got["gradient of q"], expected["gradient of q"], own, "gradient of q")
        for name in ("gradient of k", "gradient of v"):
            assert_spoiled(got[name], expected[name], seen[query], name)
        if case.rule == "exact":
            offsets = range(1 - 2 * case.window, 2 * case.window)
            far = torch.tensor([[max(abs(y), abs(x)) > case.window for x in offsets] for y in offsets])
            assert not got["gradient of bias"][:, far].any()


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_key_or_value_that_is_not_finite(case: Case, name: str, value: float) -> None:
    seen, expected = seen_keys(case), oracle(case, torch.float32)
    for key in (case.global_tokens, case.global_tokens + 14, seen.shape[1] - 1):
        tensors = case.tensors(torch.float32)
        tensors[name].data[:, key] = value
        if name == "k":  # whose score is then -inf or inf, and inf is not a number after softmax
            tensors["q"].data[..., 0].abs_()
            tensors["k"].data[:, key, :, 1:] = 0
            clean = {n: x.detach().double().requires_grad_(x.requires_grad) for n, x in tensors.items()}
            clean["k"].data[:, key] = 0
            expected = run("masked_dense", case, clean)
        got, queries = run("fused_cpu", case, tensors), seen[:, key]
        if name == "k" or value is torch.nan:
            assert_spoiled(got["output"], expected["output"], queries, "output")
        else:
            assert (got["output"][:, queries] == torch.inf).all()
            assert_close(got["output"][:, ~queries], expected["output"][:, ~queries], 1e-5)
        assert_spoiled(got["gradient of q"], expected["gradient of q"], queries, "gradient of q")
        keys = seen[queries].any(0)
        assert_spoiled(got["gradient of k"], expected["gradient of k"], keys, "gradient of k")
        if name == "k":
            assert_spoiled(got["gradient of v"], expected["gradient of v"], keys, "gradient of v")
        else:
            assert_close(got["gradient of v"], expected["gradient of v"], 1e-5)


@pytest.mark.usefixtures("_level")
def test_one_number_of_a_value_that_is_not_finite() -> None:
    case = Case((9, 11), 4, "exact", dim=5)
    tensors, expected = case.tensors(torch.float32, grad=False), oracle(case, torch.float32)["output"]
    tensors["v"][0, 30, 1, 2] = torch.nan
    got = run("fused_cpu", case, tensors)["output"]
    spoiled = torch.zeros(expected.shape, dtype=torch.bool)
    spoiled[0, :, 1, 2] = seen_keys(case)[:, 30]
    assert torch.equal(got.isnan(), spoiled)
    assert_close(got.masked_fill(spoiled, 0), expected.masked_fill(spoiled, 0), 1e-5)


@pytest.mark.usefixtures("_level")
def test_own_key_hidden_by_the_bias() -> None:
    """Of a query's scores its own key's is -inf and all others are far below 0."""
    case = Case((5, 6), 3, global_bias=False)
    tensors = case.tensors(torch.float32, grad=False)
    tensors["bias"] -= 500
    tensors["bias"][:, 5, 5] = -torch.inf
    tensors["k"][:, 0] -= 1000 * tensors["q"].mean(1)
    got = run("fused_cpu", case, tensors)["output"]
    expected = run("masked_dense", case, {name: x.double() for name, x in tensors.items()})["output"]
    assert_close(got, expected, 1e-4)


# Threads and memory


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [(1, 1, (29, 30)), (2, 3, (16, 23))])
def test_same_bits_for_any_number_of_threads(rule: str, size: tuple[int, int, tuple[int, int]]) -> None:
    batch, heads, grid = size
    case = Case(grid, 3, rule, batch=batch, heads=heads, dim=16)
    tensors = case.tensors(torch.float32)
    results, bands = [], []
    for threads in (1, 2, 7, 2, 1):
        torch.set_num_threads(threads)
        results.append(run("fused_cpu", case, tensors))
        bands.append(run_bands("fused_cpu", case, tensors, 4))
    assert all(torch.equal(bands[0][name], other[name]) for other in bands for name in other)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])


def test_threads_are_those_of_torch() -> None:
    assert LIBRARY.threaded
    assert "libtorch_cpu" in str(next(library._openmp_scopes()))


class FakeScope:
    """Libraries as ``ctypes.CDLL`` would find them: which of them have OpenMP's entry points."""

    def __init__(self, threaded: set[str | None], path: str | None) -> None:
        if path == "/gone/libgomp.so (deleted)":
            raise OSError("no such file")
        if path in threaded:
            self.GOMP_parallel = self.GOMP_barrier = ctypes.c_void_p(1 if path is None else len(path))


@pytest.mark.parametrize(
    ("scope", "openmp"),
    [("/conda/lib/libtorch_cpu.so", False), (None, True), ("/usr/lib/libomp.so.5", True), ("/x/libgomp-a.so.1", True)],
)
def test_openmp_is_found_wherever_torch_came_from(
    monkeypatch: pytest.MonkeyPatch, scope: str | None, openmp: bool
) -> None:
    """In what torch was linked with; in what is global; in a runtime that was loaded; in this order."""
    loaded = ["/gone/libgomp.so (deleted)", "/x/libgomp-a.so.1", "/usr/lib/libomp.so.5", "/conda/lib/libtorch_cpu.so"]
    monkeypatch.setattr(library, "_loaded_libraries", lambda: loaded)
    monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: openmp)
    monkeypatch.setattr(ctypes, "CDLL", partial(FakeScope, {scope, "/usr/lib/libomp.so.5"} if openmp else {scope}))
    given = []
    unthreaded = Library.__new__(Library)
    monkeypatch.setattr(
        unthreaded, "_library", SimpleNamespace(vl_set_thread_runtime=lambda *x: given.append(x)), raising=False
    )
    assert unthreaded._share_threads()
    assert [entry.value for entry in given[0]] == 2 * [1 if scope is None else len(scope)]
    monkeypatch.setattr(ctypes, "CDLL", partial(FakeScope, set()))
    assert not unthreaded._share_threads()


def test_without_openmp_the_kernel_is_refused_to_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    q, spec = torch.zeros(1, 16, 1, 4), LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0)
    monkeypatch.setattr(cpu, "THREADED", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "no OpenMP runtime" in str(FUSED_CPU.refusal(spec, q))
    assert automatic(spec, q) != "fused_cpu"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert FUSED_CPU.refusal(spec, q) is None
    monkeypatch.setattr(cpu, "THREADED", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert FUSED_CPU.refusal(spec, q) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of the process's memory")
def test_libraries_of_the_process() -> None:
    loaded = library._loaded_libraries()
    assert len(loaded) == len(set(loaded))
    assert any(Path(path).name == library.FILE_NAME for path in loaded)
    assert any("libtorch_cpu." in path for path in loaded)


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
    inputs += [None, 5, 9, 2, "chunk", "all", [1], 0.5, []]
    wrong = {
        0: inputs[0][:, 1:],
        1: inputs[1][:, :, :1],
        2: inputs[2].double(),
        3: inputs[3][:, 1:],
        4: inputs[4][:1],
        6: 7,
        13: [2, 0],
    }
    operator = OPERATORS["fused_cpu"]
    for index, value in wrong.items():
        with pytest.raises(ValueError, match="do not fit"):
            operator(*inputs[:index], value, *inputs[index + 1 :])
    taller = [torch.cat([x, x[:, :27]], 1) for x in inputs[1:3]]
    with pytest.raises(ValueError, match=r"halo \(3, 0\)"):
        operator(inputs[0], *taller, *inputs[3:-1], [3, 0])
    for neighbour in (None, torch.tensor(0), torch.tensor(9)):
        with pytest.raises(ValueError, match=r"1\.\.8"):
            operator(*inputs[:5], neighbour, *inputs[6:10], "one", [1], 1.0, [])


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", f"{tmp_path}/library.py")
    reason = load.__wrapped__()
    assert "no C++ compiler" in reason
    monkeypatch.setattr(cpu, "UNAVAILABLE", reason)
    assert FUSED_CPU.refusal(LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0), torch.zeros(1, 16, 1, 4)) == reason
    monkeypatch.setattr(cpu, "load", lambda: reason)
    q = torch.zeros(1, 4, 1, 1)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        OPERATORS["fused_cpu"](q, q, q, None, None, None, 2, 2, 2, "chunk", "all", [1], 1.0, [])


def test_what_went_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 4, 1, 1)
    for status, error, words in ((1, MemoryError, "no memory"), (2, RuntimeError, "level 'avx512' is not available")):
        monkeypatch.setattr(LIBRARY, "_library", SimpleNamespace(vl_run=lambda *_, status=status: status))
        monkeypatch.setattr(LIBRARY, "level", "avx512")
        with pytest.raises(error, match=words):
            local_attention(q, q, q, (2, 2), window=2, implementation="fused_cpu")


def test_not_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Microsoft's compiler" in str(load.__wrapped__())


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
