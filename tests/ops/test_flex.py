"""FlexAttention: its forward on CPU against the oracle, its block mask against its token mask, and its refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import Case, assert_close, compare, run
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from vision_longformer import local_attention
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import flex
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


@pytest.mark.parametrize("global_tokens", [0, 2])
@pytest.mark.parametrize("neighbours", ["all", "self"])
@pytest.mark.parametrize(("rule", "dilation"), [*((rule, 1) for rule in RULES), ("exact", 2)])
def test_block_mask_is_that_of_the_token_mask(rule: str, dilation: int, neighbours: str, global_tokens: int) -> None:
    """The compiled kernels skip blocks by tables made from the geometry; torch makes them from all pairs of tokens."""
    spec = LocalSpec(Grid(9, 13), 3, rule, neighbours, dilation, 1.0)
    plan, size = flex.make_plan(spec, global_tokens, CPU), flex.block_size(3)
    from_pairs = torch_flex.create_block_mask(
        plan.mask.mask_mod,
        None,
        None,
        plan.rows.numel(),
        plan.key_rows.numel(),
        "cpu",
        size,
        separate_full_blocks=False,
    )
    assert torch.equal(plan.mask.to_dense(), from_pairs.to_dense())


def test_plans_are_cached() -> None:
    spec = LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0)
    with torch.inference_mode():
        plan = flex._cached_plan(spec, 1, CPU)
    assert flex._cached_plan(spec, 1, CPU) is plan
    assert flex._cached_plan(spec, 2, CPU) is not plan
    assert not plan.rows.is_inference()


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
@pytest.mark.parametrize(
    "options", [{}, {"neighbours": 2}, {"rule": "exact", "dilation": 2}, {"rule": "cyclic_release"}]
)
def test_generated_code(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Inductor's CPU kernel: the masks and modifications compiled, and blocks skipped, as on a GPU."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    function = torch.compile(torch_flex.flex_attention, dynamic=False)  # inductor's C++ misnames a tenth size symbol
    monkeypatch.setattr(flex, "_flex", lambda device: function)
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
