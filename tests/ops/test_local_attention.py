"""Local attention: its meaning against plain loops, and every implementation against the oracle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from builders import TOLERANCES, BiasedPair, Case, assert_close, compare, oracle, run, run_bands
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from vision_longformer import local_attention
from vision_longformer.export.writers import trace
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import IMPLEMENTATIONS, automatic, cpu, triton
from vision_longformer.ops.chunked import gathered_chunk
from vision_longformer.ops.local_attention import AUTOMATIC, PORTABLE
from vision_longformer.ops.spec import Inputs, LocalSpec

OTHERS = [name for name in IMPLEMENTATIONS if name != "masked_dense"]

SIZES = [(1, 1), (1, 7), (7, 1), (2, 3), (4, 4), (5, 9), (6, 6), (7, 5), (8, 3)]


@st.composite
def cases(draw: st.DrawFn, sizes: tuple = tuple(SIZES)) -> Case:
    """Any legal call, small."""
    rule = draw(st.sampled_from(RULES))
    neighbours = draw(st.sampled_from(["all", "all", "self", "int", "tensor"]))
    if neighbours in ("int", "tensor"):
        number = draw(st.integers(1, 8))
        neighbours = number if neighbours == "int" else torch.tensor(number)
    heads = draw(st.integers(1, 3))
    dilation: int | tuple[int, ...] = 1
    if rule == "exact" and neighbours == "all":
        steps = st.integers(1, 3)
        dilation = draw(st.one_of(st.just(1), steps, st.tuples(*[steps] * heads)))
    return Case(
        grid=draw(st.sampled_from(sizes)),
        window=draw(st.integers(1, 4)),
        rule=rule,
        neighbours=neighbours,
        global_tokens=draw(st.sampled_from([0, 1, 4])),
        bias=draw(st.booleans()),
        global_bias=draw(st.booleans()),
        dilation=dilation,
        batch=draw(st.integers(1, 3)),
        heads=heads,
        dim=draw(st.sampled_from([1, 3, 4, 8])),
        scale=draw(st.sampled_from([None, 0.3])),
        seed=draw(st.integers(0, 99)),
    )


def runnable(implementation: str, dtype: torch.dtype) -> st.SearchStrategy[Case]:
    """Cases that the implementation can run, with gradients or without; skips where it can run none on this machine."""
    plain = [Case(rule=rule, grid=grid) for rule in RULES for grid in ((4, 4), (5, 9))]
    reasons = [case.refusal(implementation, dtype, grad=False) for case in plain]
    if all(reasons):
        pytest.skip(f"{implementation} cannot run here: {reasons[0]}")
    return cases().filter(lambda case: case.refusal(implementation, dtype, grad=False) is None)


# The oracle


def brute_force(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """The docstring of ``local_attention`` and of ``RULES``, token by token."""
    height, width = case.grid
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    scale = case.dim**-0.5 if case.scale is None else case.scale
    steps = (case.dilation,) * case.heads if isinstance(case.dilation, int) else case.dilation
    out = torch.zeros_like(q)
    for b, y, x, h in itertools.product(range(case.batch), range(height), range(width), range(case.heads)):
        query = q[b, y * width + x, h]
        scores, values = [], []
        for g in range(case.global_tokens):
            extra = tensors["global_bias"][h, g] if case.global_bias else 0.0
            scores.append(scale * (query @ k[b, g, h]) + extra)
            values.append(v[b, g, h])
        for token, dy, dx in seen_by(y, x, case, steps[h]):
            key, value = torch.zeros_like(query), torch.zeros_like(query)
            if token is not None:
                row = case.global_tokens + token[0] * width + token[1]
                key, value = k[b, row, h], v[b, row, h]
            middle = 2 * case.window - 1
            extra = tensors["bias"][h, middle + dy, middle + dx] if case.bias else 0.0
            scores.append(scale * (query @ key) + extra)
            values.append(value)
        out[b, y * width + x, h] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


def seen_by(y: int, x: int, case: Case, step: int) -> list[tuple[tuple[int, int] | None, int, int]]:
    """The local keys of a query, as (token or None for zero padding, row offset, column offset)."""
    w = case.window
    if step > 1:
        reach = range(-w, w + 1)
        shifts = [(dy, dx) for dy in reach for dx in reach]
        keys = [((y - dy * step, x - dx * step), dy, dx) for dy, dx in shifts]
        return [key for key in keys if 0 <= key[0][0] < case.grid[0] and 0 <= key[0][1] < case.grid[1]]
    keys = []
    for block_row, block_column in wanted_blocks(case):
        for row, column in itertools.product(range(w), range(w)):
            key_y, key_x = (y // w + block_row) * w + row, (x // w + block_column) * w + column
            dy, dx = y - key_y, x - key_x
            if case.rule == "exact" and max(abs(dy), abs(dx)) > w:
                continue
            stored = stored_at(key_y, case.grid[0], case), stored_at(key_x, case.grid[1], case)
            if "nowhere" in stored:
                continue
            keys.append((None if "padding" in stored else stored, dy, dx))
    return keys


def wanted_blocks(case: Case) -> list[tuple[int, int]]:
    around = [(-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1)]
    if case.neighbours == "all":
        return [(0, 0), *around]
    return [(0, 0)] if case.neighbours == "self" else [(0, 0), around[int(case.neighbours) - 1]]


def stored_at(position: int, length: int, case: Case) -> int | str:
    """Where along an axis an unwrapped position is stored; "padding" counts as a key of zeros, "nowhere" does not."""
    padded = math.ceil(length / case.window) * case.window
    if 0 <= position < length:
        return position
    if not case.rule.startswith("cyclic") or 0 <= position < padded:
        return "nowhere"
    wrapped = position % padded
    if wrapped < length:
        return wrapped
    return "padding" if case.rule == "cyclic_release" else "nowhere"


@settings(max_examples=60)
@given(cases(sizes=((1, 1), (1, 4), (3, 2), (5, 3), (4, 5))))
def test_masked_dense_is_the_definition(case: Case) -> None:
    case = replace(case, batch=1, heads=min(case.heads, 2), dilation=_first(case.dilation, min(case.heads, 2)))
    tensors = case.tensors(grad=False)
    assert_close(run("masked_dense", case, tensors)["output"], brute_force(case, tensors), 1e-12, f"output of {case}")


def _first(dilation: int | tuple[int, ...], heads: int) -> int | tuple[int, ...]:
    return dilation if isinstance(dilation, int) else dilation[:heads]


# All implementations against the oracle


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize(("dtype", "examples"), [(torch.float64, 60), (torch.float32, 30), (torch.bfloat16, 10)])
def test_agrees_with_the_oracle(implementation: str, dtype: torch.dtype, examples: int) -> None:
    strategy = runnable(implementation, dtype)

    @settings(max_examples=examples)
    @given(strategy)
    def sweep(case: Case) -> None:
        compare(implementation, case, dtype)

    sweep()


@settings(max_examples=60)
@given(cases())
def test_auto_agrees_with_the_oracle(case: Case) -> None:
    expected = run("masked_dense", case, case.tensors())
    for name, got in run("auto", case, case.tensors()).items():
        assert_close(got, expected[name], TOLERANCES[torch.float64], f"{name} of auto in {case}")


EVERY_MODE = [
    Case(rule=rule, neighbours=neighbours, global_tokens=g, grid=(5, 7))
    for rule in RULES
    for neighbours, g in [("all", 0), ("self", 1), *((n, 0) for n in range(1, 9))]
] + [
    Case(rule="exact", dilation=2),
    Case(rule="exact", dilation=(1, 3)),
    Case(grid=(3, 4)),
    Case(grid=(1, 1), window=5),
]


@pytest.mark.parametrize("implementation", OTHERS)
def test_every_rule_and_neighbour(implementation: str) -> None:
    """What the sweep may miss: all combinations once, on a map that is no multiple of the window."""
    able = [case for case in EVERY_MODE if case.refusal(implementation, grad=False) is None]
    if not able:
        pytest.skip(f"{implementation} cannot run here: {EVERY_MODE[0].refusal(implementation, grad=False)}")
    for case in able:
        compare(implementation, case)


# Bands of a map


def compare_bands(implementation: str, case: Case, rows: int) -> bool:
    """Whether the implementation runs the bands of a map; they must then make up what the oracle says of the whole."""
    got = run_bands(implementation, case, case.tensors(), rows)
    if got is None:
        return False
    for name, expected in oracle(case).items():
        assert_close(got[name], expected, 1e-10, f"{name} of {implementation}, {rows} chunk rows of {case}")
    return True


BANDS = ("fused_cpu", "tiled", "unfold_tensor", "whole_map", "masked_dense")
"""Implementations that compute bands."""


@pytest.mark.parametrize("implementation", BANDS)
def test_bands_make_up_the_map(implementation: str) -> None:
    """Every rule and neighbour, on maps whose last chunk row is partial or whole."""
    modes = [("all", 0), ("all", 3), ("self", 1), *((n, 1) for n in range(1, 9))]
    ran = 0
    for rule, (neighbours, g), (height, rows) in itertools.product(RULES, modes, [(5, 1), (6, 2)]):
        case = Case(grid=(height, 3), rule=rule, neighbours=neighbours, global_tokens=g, batch=1)
        ran += compare_bands(implementation, case, rows)
    assert ran


@settings(max_examples=60)
@given(
    cases(sizes=((1, 1), (1, 7), (7, 1), (4, 4), (5, 9), (9, 4), (12, 3), (13, 2))).filter(
        lambda case: case.dilation == 1
    ),
    st.integers(1, 4),
)
def test_bands_of_any_case_make_up_the_map(case: Case, rows: int) -> None:
    assert compare_bands("masked_dense", case, rows)
    assert compare_bands("auto", case, rows)


@pytest.mark.parametrize("implementation", BANDS)
def test_a_band_by_hand(implementation: str) -> None:
    """Scores of zero, so that an output is the mean of the values seen: those of a global token and of three rows.

    One column in chunks of one: a query sees the rows above and below it.
    """
    rule = "exact" if implementation == "unfold_tensor" else "chunk"
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 4, 1, 1)
    v = torch.tensor([8.0, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    options = {"window": 1, "rule": rule, "implementation": implementation}
    middle = local_attention(q, k, v, (1, 1), halo=(1, 1), **options)
    assert middle.item() == pytest.approx((8 + 1 + 2 + 3) / 4)
    first = local_attention(q, k[:, :3], v[:, :3], (1, 1), halo=(0, 1), **options)
    assert first.item() == pytest.approx((8 + 1 + 2) / 3)
    last = local_attention(q, k[:, :3], v[:, :3], (1, 1), halo=(1, 0), **options)
    assert last.item() == pytest.approx((8 + 1 + 2) / 3)
    bias = torch.tensor([[[0.0], [0.0], [math.log(3.0)]]]).expand(1, 3, 3)
    weighted = local_attention(q, k, v, (1, 1), halo=(1, 1), bias=bias, **options)
    assert weighted.item() == pytest.approx((8 + 3 * 1 + 2 + 3) / 6)  # the row above is one step before the query


@pytest.mark.parametrize("implementation", ["sliding_chunk", "sliding_chunk_autograd", "gathered_chunk", "unfold_nn"])
def test_implementations_of_whole_maps_refuse_a_band(implementation: str) -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 8, 1, 2)
    with pytest.raises(ValueError, match="it computes whole maps only, so halo must be None"):
        local_attention(q, k, k, (2, 2), window=2, rule="exact", halo=(2, 0), implementation=implementation)


def test_two_chunk_rows_below_another_do_not_see_the_whole_band() -> None:
    q, k = torch.zeros(1, 8, 1, 2), torch.zeros(1, 12, 1, 2)
    local_attention(q, q, q, (4, 2), window=2, halo=(0, 0), implementation="whole_map")
    with pytest.raises(ValueError, match="the map is larger than 2×2 chunks"):
        local_attention(q, k, k, (4, 2), window=2, halo=(2, 0), implementation="whole_map")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(implementation: str, rule: str) -> None:
    """The gradients are those of the outputs, by finite differences."""
    case = Case(grid=(2, 3), window=1, rule=rule, batch=1, dim=2)
    if rule == "chunk" and implementation == "whole_map":
        case = replace(case, grid=(2, 2))
    reason = case.refusal(implementation)
    if reason:
        pytest.skip(reason)
    tensors = case.tensors()
    tensors.pop("weight")

    def function(*inputs: Tensor) -> Tensor:
        named = dict(zip(tensors, inputs, strict=True))
        return local_attention(**named, grid=case.grid, **case.options(), implementation=implementation)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", ["chunk", "exact"])
def test_second_derivatives_are_right_or_refused(implementation: str, rule: str) -> None:
    """A hand-written backward may say that it cannot be differentiated again, but must not answer wrongly."""
    case = Case(grid=(2, 2), window=1, rule=rule, batch=1, heads=1, dim=2, bias=False)
    if reason := case.refusal(implementation):
        pytest.skip(reason)
    tensors = case.tensors()
    tensors.pop("weight")

    def function(*inputs: Tensor) -> Tensor:
        named = dict(zip(tensors, inputs, strict=True))
        return local_attention(**named, grid=case.grid, **case.options(), implementation=implementation)

    try:
        assert torch.autograd.gradgradcheck(function, tuple(tensors.values()))
    except RuntimeError as error:
        assert "first derivatives only" in str(error)  # noqa: PT017


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_inputs_need_not_be_contiguous(implementation: str, layout: str) -> None:
    case = Case(grid=(4, 4), rule="exact" if implementation.startswith("unfold") else "chunk", batch=2)
    if reason := case.refusal(implementation, grad=False):
        pytest.skip(reason)
    tensors = case.tensors(grad=False)
    if layout == "expanded":
        tensors |= {name: tensors[name][:1].expand(2, -1, -1, -1) for name in "qkv"}
    strange = dict(tensors)
    for name in ("q", "k", "v", "bias"):
        x = tensors[name]
        if layout == "transposed":
            strange[name] = x.transpose(0, -1).contiguous().transpose(0, -1)
        elif layout == "sliced":
            strange[name] = torch.cat([x, x], -1)[..., : x.shape[-1]]
        if layout != "expanded" or name != "bias":
            assert not strange[name].is_contiguous()
    expected = run("masked_dense", case, {name: x.contiguous() for name, x in tensors.items()})["output"]
    assert_close(run(implementation, case, strange)["output"], expected, 1e-10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_computes_in_bfloat16(implementation: str) -> None:
    """float32 inputs become bfloat16 under autocast, as in a matrix product; float64 ones stay."""
    case = Case(grid=(4, 4), rule="exact" if implementation.startswith("unfold") else "chunk")
    if reason := case.refusal(implementation, torch.bfloat16, grad=False):
        pytest.skip(reason)
    expected = run("masked_dense", case, case.tensors(grad=False))["output"]
    with torch.autocast("cpu", torch.bfloat16):
        low = run(implementation, case, case.tensors(torch.float32, grad=False))["output"]
        if case.refusal(implementation, torch.float64, grad=False) is None:
            high = run(implementation, case, case.tensors(torch.float64, grad=False))["output"]
            assert high.dtype == torch.float64
    assert low.dtype == torch.bfloat16
    assert_close(low, expected, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("name", ["k", "v", "bias", "global_bias"])
def test_tensors_of_different_dtypes_and_devices(name: str) -> None:
    """Refused before anything is looked at, even a wrong shape; under autocast, dtypes become alike by themselves."""
    q, kv = torch.randn(1, 16, 2, 4), torch.randn(1, 18, 2, 4)
    tensors = {"k": kv, "v": kv, "bias": torch.randn(2, 7, 7), "global_bias": torch.randn(2, 2)}
    half = {**tensors, name: tensors[name].half()}
    with pytest.raises(ValueError, match=f"^q is float32 but {name} is float16; convert it to float32, or use"):
        local_attention(q[:, :3], grid=(4, 4), window=2, **half)
    elsewhere = {**tensors, name: tensors[name].to("meta")}
    with pytest.raises(ValueError, match=f"^q is on cpu but {name} is on meta; move all to one device$"):
        local_attention(q[:, :3], grid=(4, 4), window=2, **elsewhere)
    with torch.autocast("cpu", torch.bfloat16):
        assert local_attention(q, grid=(4, 4), window=2, **half).dtype == torch.bfloat16
        right = "bfloat16 or float32" if name.endswith("bias") else "bfloat16"
        with pytest.raises(ValueError, match=f"^q is bfloat16 but {name} is float64; convert it to {right}, or use"):
            local_attention(q, grid=(4, 4), window=2, **{**tensors, name: tensors[name].double()})


@pytest.fixture(params=["autocast", "mixed dtypes"])
def given_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Of q, k and v: float32 under autocast, or bfloat16 beside float32 biases; both are computed in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param == "autocast"):
        yield torch.float32 if request.param == "autocast" else torch.bfloat16


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
@pytest.mark.parametrize("global_key", [False, True])
def test_biases_are_added_in_float32(implementation: str, global_key: bool, given_dtype: torch.dtype) -> None:
    """257 is no bfloat16: rounded to 256 it would change a weight of σ(257 − 256) = 0.7311 to a half."""
    pair = runnable_pair(implementation, global_key, grad=False)
    out = pair.attend(implementation, pair.tensors(given_dtype, 257, 256))
    assert out.dtype == torch.bfloat16
    assert out[0, 0, 0].tolist() == pytest.approx([0.7310586] * 4, rel=2**-8)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
@pytest.mark.parametrize("global_key", [False, True])
def test_gradients_of_biases_are_summed_in_float32(
    implementation: str, global_key: bool, given_dtype: torch.dtype
) -> None:
    """Three times weight ½ · (value 1 − mean ½) · gradient 348 = 3 · 87 = 261, which is no bfloat16."""
    pair = runnable_pair(implementation, global_key, grad=True)
    assert pair.bias_gradients(implementation, given_dtype, 3, 348.0) == pair.expected_gradients(261)


def runnable_pair(implementation: str, global_key: bool, *, grad: bool) -> BiasedPair:
    rule = "exact" if implementation.startswith("unfold") else "chunk"
    case = Case((1, 2), rule=rule)
    if reason := implementation != "auto" and case.refusal(implementation, torch.bfloat16, grad=grad):
        pytest.skip(reason)
    return BiasedPair(global_key, rule)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_training_works_after_inference_and_fake_runs(implementation: str) -> None:
    """Tables that are kept from call to call belong to no mode: not to inference mode, not to fake tensors."""
    case = Case(grid=(3, 11), window=3, rule="exact", seed=5)
    if reason := implementation != "auto" and case.refusal(implementation):
        pytest.skip(reason)
    with torch.inference_mode():
        run(implementation, case, case.tensors(grad=False))
    fake_case = replace(case, grid=(3, 13))
    with torch._subclasses.FakeTensorMode():
        run(implementation, fake_case, _empty(fake_case))
    for each in (case, fake_case):
        expected = run("masked_dense", each, each.tensors())
        got = run(implementation, each, each.tensors())
        for name, value in expected.items():
            assert_close(got[name], value, 1e-10, name)


def _empty(case: Case) -> dict[str, Tensor]:
    tokens = case.grid[0] * case.grid[1]
    q, kv = (case.batch, tokens, case.heads, case.dim), (case.batch, tokens + 1, case.heads, case.dim)
    return {"q": torch.empty(q), "k": torch.empty(kv), "v": torch.empty(kv)}


# The choice of an implementation

SMALL, LARGE = Grid(4, 4), Grid(9, 9)
"""Maps of 2×2 and of 5×5 chunks of 2×2 tokens."""


def spec_for(
    grid: Grid = LARGE, rule: str = "chunk", mode: str = "all", dilation: int | tuple[int, ...] = 1
) -> LocalSpec:
    return LocalSpec(grid, 2, rule, mode, dilation, 1.0)


def chosen(spec: LocalSpec, device: str, dtype: torch.dtype = torch.float32, dim: int = 32) -> str:
    with FakeTensorMode():
        return automatic(spec, torch.empty(1, spec.grid.tokens, 2, dim, dtype=dtype, device=device))


@pytest.fixture
def _everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a compiler and triton, and no interpreter chosen."""
    monkeypatch.setattr(cpu, "UNAVAILABLE", None)
    monkeypatch.setattr(triton, "INSTALLED", True)
    monkeypatch.setattr(triton, "INTERPRETED", False)


@pytest.mark.usefixtures("_everything_installed")
def test_order_of_auto_on_a_gpu() -> None:
    for spec in (
        spec_for(SMALL), spec_for(LARGE), spec_for(rule="exact"), spec_for(rule="cyclic"), spec_for(mode="one"),
        spec_for(SMALL, mode="self"), spec_for(rule="exact", dilation=2), spec_for(rule="exact", dilation=(1, 3)),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert chosen(spec, "cuda", dtype) == "triton_gpu"
    assert chosen(spec_for(SMALL), "cuda", torch.float64) == "whole_map"
    assert chosen(spec_for(LARGE), "cuda", torch.float64) == "tiled"
    assert chosen(spec_for(LARGE), "cuda", dim=136) == "tiled"
    assert chosen(spec_for(rule="exact", dilation=2), "cuda", torch.float64) == "unfold_tensor"


@pytest.mark.usefixtures("_everything_installed")
def test_order_of_auto_on_a_cpu() -> None:
    for spec in (
        spec_for(SMALL),
        spec_for(LARGE),
        spec_for(rule="exact"),
        spec_for(rule="cyclic"),
        spec_for(mode="one"),
    ):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert chosen(spec, "cpu", dtype) == "fused_cpu"
    assert chosen(spec_for(rule="exact", dilation=2), "cpu") == "unfold_tensor"


@pytest.mark.usefixtures("_everything_installed")
def test_order_of_auto_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, no triton: PyTorch's own attention where the map is small enough, else the tiled form."""
    monkeypatch.setattr(cpu, "UNAVAILABLE", "no compiler")
    monkeypatch.setattr(triton, "INSTALLED", False)
    for device in ("cpu", "cuda"):
        assert chosen(spec_for(SMALL), device) == "whole_map"
        for spec in (
            spec_for(LARGE), spec_for(Grid(4, 5)), spec_for(SMALL, "exact"), spec_for(SMALL, "cyclic"),
            spec_for(SMALL, mode="self"), spec_for(SMALL, mode="one"), spec_for(rule="cyclic_release"),
        ):  # fmt: skip
            assert chosen(spec, device) == "tiled"
        assert chosen(spec_for(rule="exact", dilation=2), device) == "unfold_tensor"


@pytest.mark.usefixtures("_everything_installed")
def test_order_of_auto_under_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    for device in ("cpu", "cuda"):
        assert chosen(spec_for(SMALL), device) == "whole_map"
        for spec in (spec_for(LARGE), spec_for(SMALL, "exact"), spec_for(rule="exact")):
            assert chosen(spec, device) == "gathered_chunk"
        for spec in (
            spec_for(mode="self"), spec_for(SMALL, mode="one"), spec_for(rule="exact", mode="one"),
            spec_for(rule="cyclic"), spec_for(SMALL, "cyclic_release"),
        ):  # fmt: skip
            assert chosen(spec, device) == "sliding_chunk_autograd"
        assert chosen(spec_for(rule="exact", dilation=2), device) == "unfold_tensor"


@pytest.mark.parametrize("grid", SIZES)
@pytest.mark.parametrize("rule", ["chunk", "exact"])
@pytest.mark.parametrize(("bias", "global_tokens"), [(True, 2), (False, 0)])
def test_the_form_for_any_size(grid: tuple[int, int], rule: str, bias: bool, global_tokens: int) -> None:
    """What ``gathered_chunk`` computes where sizes are symbols: all chunks alike, some keys repeated."""
    case = Case(grid, rule=rule, bias=bias, global_bias=bias, global_tokens=global_tokens)
    tensors = {name: x for name, x in case.tensors(grad=False).items() if name != "weight"}
    spec = LocalSpec(Grid(*grid), case.window, rule, "all", 1, case.dim**-0.5)
    inputs = Inputs(**tensors)
    (rows,), places = gathered_chunk.attend_any_size(inputs.q, 0, inputs, spec)
    got = rows.index_select(1, places).unflatten(1, (-1, inputs.q.shape[2]))
    assert_close(got, oracle(case, grad=False)["output"], TOLERANCES[torch.float64])


def test_chunks_that_see_keys_at_the_same_offsets() -> None:
    """Five positions in chunks of two: each chunk is of its own kind; of 56 in chunks of seven, six are alike."""
    classes = [(queries.tolist(), keys.tolist()) for queries, keys in gathered_chunk._axis_classes(5, 2)]
    assert classes == [([[0, 1]], [[0, 1, 2, 3]]), ([[2, 3]], [[0, 1, 2, 3, 4]]), ([[4]], [[2, 3, 4]])]
    assert [len(queries) for queries, _ in gathered_chunk._axis_classes(56, 7)] == [1, 6, 1]


def test_classes_that_are_computed_together() -> None:
    """On 8×8 tokens in chunks of two the four corners see 4×4 keys, the four edges of two chunks each 4×6 or 6×4, and
    the four chunks inside 6×6."""
    groups = gathered_chunk._groups(LocalSpec(Grid(8, 8), 2, "chunk", "all", 1, 1.0))
    shapes = [[(one.queries.shape, one.keys.shape, one.entries.shape) for one in group] for group in groups]
    assert shapes == [
        [((1, 4), (1, 16), (4, 16))] * 4,
        [((2, 4), (2, 24), (4, 24))] * 4,
        [((4, 4), (4, 36), (4, 36))],
    ]
    assert [len(group) for group in gathered_chunk._groups(LocalSpec(Grid(5, 4), 2, "chunk", "all", 1, 1.0))] == [2] * 3


@pytest.mark.parametrize(
    ("length", "keys", "counts"),
    [
        (5, [[0, 1, 2, 3, 3], [0, 1, 2, 3, 4], [2, 2, 2, 3, 4]], [0b11110, 0b11111, 0b00111]),
        (7, [[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5], [2, 2, 3, 4, 5, 6], [4, 4, 4, 4, 5, 6]],
         [0b111100, 0b111111, 0b011111, 0b000111]),
    ],
)  # fmt: skip
def test_keys_of_a_chunk_on_a_map_of_any_size(length: int, keys: list[list[int]], counts: list[int]) -> None:
    """Chunks of two: as many keys for each, those that it sees first of all, and every one of these counts once."""
    spec, device = LocalSpec(Grid(1, 1), 2, "chunk", "all", 1, 1.0), torch.device("cpu")
    plan = gathered_chunk._axis_plan(length, -(-length // 2), spec, device)
    assert plan.keys.tolist() == keys
    assert [int("".join(str(int(one)) for one in row), 2) for row in (plan.entries[:, 0] < 8).tolist()] == counts
    assert plan.queries[0].tolist() == [0, 1]
    offsets = [3 - key for key in keys[0]]  # from −3 to 3, counted from 0; repeated keys have the next 8 entries
    assert plan.entries[0, 0].tolist() == [*offsets[:4], *(8 + offset for offset in offsets[4:])]


def test_blocks_of_one_size_share_a_plan_in_a_graph() -> None:
    class Blocks(torch.nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.depth = depth

        def forward(self, image: Tensor) -> Tensor:
            tokens = image.flatten(1, 2)[:, :, None]
            for _ in range(self.depth):
                tokens = local_attention(tokens, tokens, tokens, tuple(image.shape[1:3]), window=2)
            return tokens

    def count(depth: int) -> int:
        shapes = ({1: torch.export.Dim("height", min=1), 2: torch.export.Dim("width", min=1)},)
        program = trace(Blocks(depth), (torch.randn(1, 9, 9, 4),), shapes)
        return sum("arange" in str(node.target) for node in program.graph.nodes)

    assert count(3) == count(1) > 0


def test_auto_never_takes_what_is_only_for_comparison() -> None:
    assert {*AUTOMATIC, *PORTABLE} == {*IMPLEMENTATIONS} - {"flex", "sliding_chunk", "unfold_nn", "masked_dense"}


@pytest.mark.parametrize("case", [Case(rule="exact"), Case(rule="cyclic"), Case(neighbours="self"), Case((3, 4))])
def test_exported_graphs_hold_operators_of_pytorch_only(case: Case) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, global_bias: Tensor) -> Tensor:
            return local_attention(q, k, v, case.grid, bias=bias, global_bias=global_bias, **case.options())

    tensors = case.tensors(torch.float32, grad=False)
    tensors.pop("weight")
    program = torch.export.export(Attend(), tuple(tensors.values()))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)} == {"aten"}
    expected = local_attention(**tensors, grid=case.grid, **case.options(), implementation="masked_dense")
    assert_close(program.module()(*tensors.values()), expected, 1e-5)


def test_heads_of_different_dilation_are_computed_by_what_suits_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no implementation takes them together: those without dilation by one, the others by another."""
    case, calls = Case(rule="exact", heads=3, dilation=(2, 1, 2)), []

    def noting(name: str) -> Callable[[Inputs, LocalSpec], Tensor]:
        def attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
            calls.append((name, spec.dilation, inputs.q.shape[2]))
            return implementation.attend(inputs, spec)

        implementation = IMPLEMENTATIONS[name]
        return attend

    monkeypatch.setattr(cpu, "UNAVAILABLE", "no compiler")
    for name in ("tiled", "unfold_tensor"):
        noted = replace(IMPLEMENTATIONS[name], attend=noting(name))
        monkeypatch.setitem(IMPLEMENTATIONS, name, noted)
    run("auto", case, case.tensors(grad=False))
    assert calls == [("tiled", 1, 1), ("unfold_tensor", 2, 2)]


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "triton_gpu"])
def test_one_dilation_per_head_is_refused_before_it_is_split(implementation: str) -> None:
    reason = IMPLEMENTATIONS[implementation].refusal(spec_for(rule="exact", dilation=(1, 2)), torch.zeros(1, 81, 2, 4))
    assert reason is not None


def test_the_same_dilation_for_all_heads_is_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    case, specs = Case(rule="exact", dilation=(2, 2)), []
    oracle = IMPLEMENTATIONS["masked_dense"]
    noted = replace(oracle, refusal=lambda spec, q: specs.append(spec.dilation))
    monkeypatch.setitem(IMPLEMENTATIONS, "masked_dense", noted)
    run("masked_dense", case, case.tensors(grad=False))
    assert specs == [2]


# Refusals and bad arguments


@pytest.mark.parametrize(
    ("implementation", "case", "reason"),
    [
        ("sliding_chunk", Case(rule="exact", dilation=2), "dilation must be 1"),
        ("sliding_chunk_autograd", Case(rule="exact", dilation=(1, 2)), "dilation must be 1"),
        ("unfold_nn", Case(rule="chunk"), "rule must be 'exact'"),
        ("unfold_tensor", Case(rule="cyclic"), "rule must be 'exact'"),
        ("whole_map", Case(grid=(5, 2)), "the map is larger than 2×2 chunks"),
        ("whole_map", Case(grid=(2, 2), neighbours="self"), "only rule 'chunk' with all neighbours"),
        ("whole_map", Case(grid=(2, 2), rule="exact"), "only rule 'chunk' with all neighbours"),
    ],
)
def test_refusals_give_their_reason(implementation: str, case: Case, reason: str) -> None:
    with pytest.raises(ValueError, match=f"implementation '{implementation}' cannot run this: .*{reason}"):
        run(implementation, case, case.tensors())


def call(**changes: object) -> Tensor:
    """A legal call with some arguments changed."""
    arguments = {name: x for name, x in Case(grid=(2, 3)).tensors(torch.float32).items() if name != "weight"}
    return local_attention(**{**arguments, "grid": (2, 3), "window": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window is 0; it must be an integer of at least 1"),
        ({"window": 1.5}, "window is 1.5; it must be an integer"),
        ({"rule": "exakt"}, "unknown window rule 'exakt'; did you mean 'exact'?"),
        ({"neighbours": 0}, "neighbours is 0; a neighbour is 1..8, or use 'all' or 'self'"),
        ({"neighbours": 9}, "neighbours is 9; a neighbour is 1..8"),
        ({"neighbours": "al"}, "unknown neighbours 'al'; did you mean 'all'"),
        ({"neighbours": torch.tensor([1, 2])}, r"neighbours must be one integer, not torch.int64 of \(2,\)"),
        ({"neighbours": torch.tensor(1.0)}, "neighbours must be one integer, not torch.float32"),
        ({"implementation": "slidng_chunk"}, "unknown implementation 'slidng_chunk'; did you mean 'sliding_chunk'"),
        ({"grid": (3, 3)}, r"q is \(2, 6, 2, 4\); a map of 3×3 needs \(batch, 9, heads, dim\)"),
        ({"grid": (0, 6)}, "a map of 0×6"),
        ({"q": torch.zeros(6, 2, 4)}, r"q is \(6, 2, 4\)"),
        ({"k": torch.zeros(2, 5, 2, 4)}, r"k is \(2, 5, 2, 4\) and v \(2, 7, 2, 4\); both must be \(2, G \+ 6, 2, 4\)"),
        ({"v": torch.zeros(2, 7, 2, 3)}, r"v \(2, 7, 2, 3\); both must be"),
        ({"bias": torch.zeros(2, 5, 5)}, r"bias is \(2, 5, 5\); window 2 needs \(2, 7, 7\)"),
        ({"global_bias": torch.zeros(2, 3)}, r"global_bias is \(2, 3\); it must be \(2, 1\)"),
        ({"rule": "exact", "dilation": 0}, "dilation is 0; it must be an integer of at least 1"),
        ({"rule": "exact", "dilation": (1, 2, 3)}, "dilation names 3 heads, but there are 2"),
        ({"dilation": 2}, "dilation above 1 is defined for rule 'exact' with all neighbours only, not for 'chunk'"),
        ({"rule": "exact", "neighbours": "self", "dilation": 2}, "not for 'exact', 'self'"),
        ({"halo": (2, 0)}, r"k is \(2, 7, 2, 4\) and v \(2, 7, 2, 4\); both must be \(2, G \+ 12, 2, 4\)"),
        ({"halo": (3, 0)}, r"halo is \(3, 0\); it must be two numbers of rows, above and below, of 0\.\.2 each"),
        ({"halo": (0, -1)}, r"halo is \(0, -1\); it must be two"),
        ({"halo": (1,)}, r"halo is \(1,\); it must be two"),
        ({"halo": (1, 0)}, "halo has 1 rows above; with rule 'chunk' a chunk row above is whole, 2 rows"),
        (
            {"halo": (0, 1), "grid": (3, 2)},
            "halo has 1 rows below a band of 3 rows, which is no multiple of the window 2",
        ),
        (
            {"halo": (0, 0), "rule": "exact", "dilation": 2},
            "dilation is 2, but a window with gaps reaches beyond a halo",
        ),
    ],
)
def test_bad_arguments_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize("neighbour", [0, 9, -1, True])
def test_a_neighbour_outside_1_to_8_is_refused_as_number_and_as_tensor(neighbour: int) -> None:
    q = torch.randn(1, 4, 1, 2)
    numbers = [neighbour] if isinstance(neighbour, bool) else [neighbour, torch.tensor(neighbour)]
    for value in numbers:
        with pytest.raises(ValueError, match=r"a neighbour is 1\.\.8"):
            local_attention(q, q, q, (2, 2), window=1, neighbours=value)
