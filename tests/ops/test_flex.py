"""FlexAttention: its forward on CPU against the oracle, its block mask against its token mask, and its refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from builders import Case, assert_close, compare, run
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from vision_longformer import local_attention
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import IMPLEMENTATIONS, flex
from vision_longformer.ops.reference.masked_dense import MASKED_DENSE
from vision_longformer.ops.spec import Inputs, LocalSpec

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")


CASES = [
    {},
    {"grid": (1, 7), "window": 3, "global_tokens": 0, "bias": False},
    {"grid": (2, 3), "window": 4, "global_tokens": 3},
    {"grid": (9, 4), "window": 3, "global_tokens": 18, "global_bias": False, "scale": 0.3},
    {"grid": (7, 13), "window": 5, "bias": False, "global_bias": False, "dim": 48},
    {"rule": "exact"},
    {"rule": "exact", "dilation": 2},
    {"rule": "exact", "dilation": (1, 3), "grid": (9, 8)},
    {"rule": "exact", "neighbours": 8},
    {"rule": "cyclic", "grid": (5, 8)},
    {"rule": "cyclic_release", "grid": (7, 8), "window": 3},
    {"rule": "cyclic_release", "grid": (7, 8), "window": 3, "neighbours": 1},
    {"neighbours": "self"},
    {"neighbours": torch.tensor(3)},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_values(options: dict[str, Any]) -> None:
    compare("flex", Case(**{"dim": 16, **options}), torch.float32)


def test_values_as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    compare("flex", Case(dim=16), torch.float32)


@pytest.mark.parametrize("seed", range(30))
def test_sweep(seed: int) -> None:
    draw = random.Random(seed)
    rule, neighbours = draw.choice(RULES), draw.choice(["all", "all", "self", draw.randint(1, 8)])
    case = Case(
        grid=draw.choice([(1, 1), (1, 7), (7, 5), (5, 9), (6, 6), (8, 10)]),
        window=draw.choice([1, 2, 3, 4]),
        rule=rule,
        neighbours=neighbours,
        dilation=draw.randint(1, 3) if rule == "exact" and neighbours == "all" else 1,
        global_tokens=draw.choice([0, 1, 3]),
        bias=draw.random() < 0.7,
        global_bias=draw.random() < 0.7,
        dim=draw.choice([3, 16, 32]),
        seed=seed,
    )
    reason = case.refusal("flex", torch.float32, grad=False)
    if reason is None:
        compare("flex", case, torch.float32)
    else:
        assert "key twice" in reason


# Block tables


def dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """What the first ``counts`` entries of each row of a table name, boolean (rows, columns)."""
    named = torch.zeros(indices.shape[2], columns, dtype=torch.int32)
    for row, (count, entries) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0], strict=True)):
        named[row].index_add_(0, entries[:count], torch.ones(count, dtype=torch.int32))
    assert named.max() <= 1, "a block is named twice"
    return named == 1


@pytest.mark.parametrize("global_tokens", [0, 2, 33])
@pytest.mark.parametrize("neighbours", ["all", "self"])
@pytest.mark.parametrize(("rule", "dilation"), [*((rule, 1) for rule in RULES), ("exact", 2)])
def test_block_tables_are_those_of_the_token_mask(
    rule: str, dilation: int, neighbours: str, global_tokens: int
) -> None:
    """The compiled kernels skip blocks by tables made from the geometry; torch makes them from all pairs of tokens."""
    spec = LocalSpec(Grid(9, 13), 3, rule, neighbours, dilation, 1.0)
    reach = dilation if neighbours == "all" else 0
    chunks, global_blocks, size = 15, -(-global_tokens // 16), 16
    tables = flex.block_tables(spec.chunks, reach, "cyclic" in rule, global_blocks, CPU)
    expected = torch_flex.create_block_mask(
        flex.mask_modification(spec, global_tokens),
        None,
        None,
        chunks * size,
        (chunks + global_blocks) * size,
        "cpu",
        size,
        separate_full_blocks=False,
    ).to_dense()[0, 0]
    assert torch.equal(dense(tables.kv_num_blocks, tables.kv_indices, chunks + global_blocks), expected == 1)
    assert torch.equal(dense(tables.q_num_blocks, tables.q_indices, chunks), expected.T == 1)
    assert tables.kv_indices.shape == (1, 1, chunks, chunks + global_blocks)
    assert tables.q_indices.shape == (1, 1, chunks + global_blocks, chunks)
    assert {x.dtype for x in tables} == {torch.int32}


def test_bytes_of_block_tables() -> None:
    """400×400 in chunks of 7×7: M = 58² chunks, of which each sees nine, and one block of global keys.

    Rows of keys are 10 apart and M + 1 long, rows of queries 9 apart and M long; as M × M tables they took 90 MB.
    """
    chunks = 58 * 58
    tables = flex.block_tables(Grid(58, 58), 1, False, 1, CPU)
    entries = [x.untyped_storage().nbytes() // 4 for x in tables]
    assert entries == [chunks, (chunks - 1) * 10 + chunks + 1, chunks + 1, chunks * 9 + chunks]
    assert sum(entries) * 4 == 309_456


def test_block_tables_are_kept_up_to_a_budget() -> None:
    """1×n chunks that see only themselves: tables of n, n + (n − 1), n and n + (n − 1) entries, 24n − 8 bytes."""
    cache = flex.TableCache(budget=2 * 232 + 100)
    with torch.inference_mode():
        first = cache.get(Grid(1, 10), 0, False, 0, CPU)
    assert cache.bytes == 232
    assert not first.kv_indices.is_inference()
    second = cache.get(Grid(10, 1), 0, False, 0, CPU)
    assert cache.get(Grid(1, 10), 0, False, 0, CPU) is first
    assert cache.bytes == 2 * 232
    cache.get(Grid(1, 5), 0, False, 0, CPU)  # 112 bytes: too many, and the second was used longest ago
    assert cache.bytes == 232 + 112
    assert cache.get(Grid(1, 10), 0, False, 0, CPU) is first
    assert cache.get(Grid(10, 1), 0, False, 0, CPU) is not second
    assert cache.bytes == 2 * 232
    large = cache.get(Grid(1, 100), 0, False, 0, CPU)
    assert large.kv_num_blocks.numel() == 100  # made, but not kept
    assert cache.bytes == 0


def test_tables_of_all_maps_share_a_budget() -> None:
    assert flex.TABLES.budget == 64 * 2**20


# Compilation, with torch's compiler replaced


class Compiler:
    """Stands for inductor: counts graphs, and returns zeros of the right shape instead of running them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        (results,) = graph.graph.find_nodes(op="output")[0].args
        shapes = [node.meta["example_value"].shape for node in results]
        return lambda *_: tuple(torch.zeros(shape) for shape in shapes)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """As on CUDA: FlexAttention has to be compiled, and its uncompiled form, with all pairs of tokens, is forbidden."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("all pairs of tokens")

    counter = Compiler()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex, "_needs_compiler", lambda device: True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(import_module("torch._higher_order_ops.flex_attention"), "math_attention", forbidden)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    torch.compiler.reset()
    flex._compiled.cache_clear()
    yield counter
    flex._compiled.cache_clear()
    torch.compiler.reset()


def attend(grid: tuple[int, int], *, batch: int = 1, grad: bool = False, seed: int = 0, **options: Any) -> Tensor:
    case = Case(grid, batch=batch, dim=16, seed=seed, **options)
    tensors = case.tensors(torch.float32, grad=grad)
    neighbour = None if isinstance(case.neighbours, str) else torch.tensor(case.neighbours)
    mode = "all" if neighbour is None else "one"
    inputs = Inputs(*(tensors.get(name) for name in ("q", "k", "v", "bias", "global_bias")), neighbour)
    return flex.FLEX.attend(inputs, LocalSpec(Grid(*grid), case.window, case.rule, mode, 1, 0.25))


def test_one_compilation_for_all_layers_and_steps(compiler: Compiler) -> None:
    """Two stages of two layers with tables of their own, three steps, random neighbours."""
    for step in range(3):
        for stage in range(2):
            for layer in range(2):
                seed = 8 * step + 2 * stage + layer
                assert attend((4, 8 - stage), seed=seed, neighbours=1 + seed % 8).shape == (1, 4 * (8 - stage), 2, 16)
    assert compiler.graphs == 2


def test_what_is_called_differently_is_compiled_apart(compiler: Compiler) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for options in ({}, {"grad": True}, {"batch": 2}):
            attend((4, 4), **options)
            attend((4, 4), **options)
    assert compiler.graphs == 3


def test_more_maps_than_torch_recompiles_for(compiler: Compiler) -> None:
    """Torch gives up on a function after so many versions of it, and would then hold the scores of all pairs."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (3, 4, 5, 6, 3, 4, 5, 6):
            attend((3, width))
    assert compiler.graphs == 4


def test_compiled_functions_are_few() -> None:
    assert flex._compiled.cache_info().maxsize == 64


def test_uncompiled_is_an_error(compiler: Compiler) -> None:
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="not compiled and would hold the scores of all pairs of tokens; enable"),
    ):
        attend((4, 4))
    assert compiler.graphs == 0


def test_giving_up_is_an_error(compiler: Compiler) -> None:
    """A layout that no signature tells apart is compiled again, up to torch's limit, and then refused."""
    spec = LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 0.25)
    q, bias = torch.zeros(1, 16, 2, 16), torch.zeros(2, 7, 7)
    flex.FLEX.attend(Inputs(q, q, q, bias), spec)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        flex.FLEX.attend(Inputs(q, q, q, bias.transpose(1, 2)), spec)
    assert compiler.graphs == 1


def test_fake_tensors_are_not_cached() -> None:
    case = Case((3, 17), 3, dim=16)
    with FakeTensorMode():
        q, k = torch.empty(2, 51, 2, 16), torch.empty(2, 52, 2, 16)
        assert local_attention(q, k, k, case.grid, window=3, implementation="flex").shape == (2, 51, 2, 16)
    compare("flex", case, torch.float32)


def test_empty_batch() -> None:
    case = Case(batch=0, dim=16)
    assert run("flex", case, case.tensors(torch.float32, grad=False))["output"].shape == (0, 45, 2, 16)


def test_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    case = Case((4, 5), dim=16)
    tensors = case.tensors(torch.float32, grad=False)
    spec = LocalSpec(Grid(*case.grid), case.window, "chunk", "all", 1, 0.25)
    inputs = Inputs(*(tensors[name] for name in ("q", "k", "v", "bias", "global_bias")))
    compiled = torch.compile(lambda *x: flex.FLEX.attend(Inputs(*x), spec), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs), MASKED_DENSE.attend(inputs, spec), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"neighbours": 2, "rule": "exact"}])
def test_gradients(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Torch's own derivatives of masks and modifications, which it refuses on a CPU, by its uncompiled kernels."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(flex, "_needs_compiler", lambda device: True)
    monkeypatch.setitem(IMPLEMENTATIONS, "flex", replace(flex.FLEX, refusal=lambda spec, q: None))
    compare("flex", Case(**{"grid": (5, 7), "dim": 16, "global_tokens": 2, **options}), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"neighbours": 2}, {"rule": "exact", "dilation": 2}, {"rule": "cyclic_release"}]
)
def test_generated_code(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Inductor's CPU kernel: the masks and modifications compiled, and blocks skipped, as on a GPU."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    monkeypatch.setattr(flex, "_needs_compiler", lambda device: True)
    compare("flex", Case(**{"grid": (9, 13), "window": 3, "dim": 16, "global_tokens": 2, **options}), torch.float32)


def test_refusals() -> None:
    refusal = flex.FLEX.refusal
    spec = LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0)
    q = torch.zeros(1, 16, 1, 16)
    assert refusal(spec, q) is None
    assert "no backward on CPU" in str(refusal(spec, q.requires_grad_()))
    with torch.no_grad():
        assert refusal(spec, q) is None
    assert "meta" in str(refusal(spec, q.to("meta")))
    assert "one dilation" in str(refusal(replace(spec, rule="exact", dilation=(1, 2)), q.detach()))
    cyclic = LocalSpec(Grid(4, 9), 2, "cyclic", "all", 1, 1.0)
    assert "key twice" in str(refusal(cyclic, q.detach()))


@pytest.mark.parametrize(("dtype", "dim", "able"), [("float32", 16, True), ("float64", 16, False), ("half", 8, False)])
def test_what_its_kernels_need(dtype: str, dim: int, able: bool) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 16, 1, dim, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
    reason = flex.FLEX.refusal(LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0), q)
    assert reason is None if able else "head dimension of at least 16, and less than float64" in str(reason)
