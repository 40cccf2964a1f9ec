"""FlexAttention: its forward on CPU against the oracle, its block mask against its token mask, and its refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from builders import Case, assert_close, compare, run
from torch.nn.attention import flex_attention as torch_flex

from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import IMPLEMENTATIONS, flex
from vision_longformer.ops.reference import masked_dense
from vision_longformer.ops.spec import LocalSpec

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex by name, and its reference called without dynamo, which would recompile for every case."""
    monkeypatch.setitem(IMPLEMENTATIONS, "flex", flex)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


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
    layout = flex.Layout(Grid(9, 13), 3, rule, neighbours, dilation, global_tokens, torch.device("cpu"))
    plan, size = flex._plan(layout), flex.block_size(3)
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


def test_masks_are_kept() -> None:
    layout = flex.Layout(Grid(4, 4), 2, "chunk", "all", 1, 1, torch.device("cpu"))
    with torch.inference_mode():
        plan = flex._cached_plan(layout)
    assert flex._cached_plan(layout) is plan
    assert not plan.rows.is_inference()


def test_empty_batch() -> None:
    case = Case(batch=0, dim=16)
    assert run("flex", case, case.tensors(torch.float32, grad=False))["output"].shape == (0, 45, 2, 16)


def test_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    case = Case((4, 5), dim=16)
    tensors = case.tensors(torch.float32, grad=False)
    spec = LocalSpec(Grid(*case.grid), case.window, "chunk", "all", 1, 0.25)
    arguments = (*(tensors[name] for name in ("q", "k", "v", "bias", "global_bias")), None)
    compiled = torch.compile(lambda *x: flex.attend(*x, spec), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*arguments), masked_dense.attend(*arguments, spec), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"neighbours": 2}, {"rule": "exact", "dilation": 2}, {"rule": "cyclic_release"}]
)
def test_generated_code(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Inductor's CPU kernel: the masks and modifications compiled, and blocks skipped, as on a GPU."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    function = torch.compile(torch_flex.flex_attention)
    monkeypatch.setattr(flex, "_flex", lambda device: function)
    compare("flex", Case(**{"grid": (9, 13), "window": 3, "dim": 16, "global_tokens": 2, **options}), torch.float32)


def test_refusals() -> None:
    spec = LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0)
    q = torch.zeros(1, 16, 1, 16)
    assert flex.refusal(spec, q) is None
    assert "no backward on CPU" in flex.refusal(spec, q.requires_grad_())
    with torch.no_grad():
        assert flex.refusal(spec, q) is None
    assert "meta" in flex.refusal(spec, q.to("meta"))
    cyclic = LocalSpec(Grid(4, 9), 2, "cyclic", "all", 1, 1.0)
    assert "key twice" in flex.refusal(cyclic, q.detach())
