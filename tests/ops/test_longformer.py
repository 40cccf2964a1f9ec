"""Rows of global and of local tokens from one projection: composed, and by the packed Triton operator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import RowsCase, assert_close, rows_oracle
from torch.utils._python_dispatch import TorchDispatchMode

from vision_longformer.geometry import Grid
from vision_longformer.ops import longformer_attention
from vision_longformer.ops.spec import LocalSpec, PackedInputs
from vision_longformer.ops.triton import refuse_rows


@pytest.mark.parametrize("implementation", ["auto", "masked_dense", "tiled", "gathered_chunk"])
@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("biases", [True, False])
def test_composed(implementation: str, global_tokens: int, biases: bool) -> None:
    case = RowsCase((5, 7), 3, global_tokens=global_tokens, biases=biases and global_tokens > 0, heads=2, scale=0.4)
    got = case.run(implementation, case.tensors())
    for name, expected in rows_oracle(case).items():
        assert_close(got[name], expected, 1e-10, name)


def test_one_token_of_each_kind_by_hand() -> None:
    """Scores of the global query are 0 + ln 3 for its own key and 0 for the local one; of the local query 0 and 0."""
    qkv = torch.zeros(1, 2, 3, 1, 1)
    qkv[0, :, 2, 0, 0] = torch.tensor([4.0, 8.0])
    bias = torch.tensor([[[3.0, 1.0]]]).log()
    out = longformer_attention(qkv, (1, 1), window=1, from_global_bias=bias)
    assert out.flatten().tolist() == pytest.approx([5.0, 6.0])


@pytest.mark.parametrize(
    ("shape", "bias", "message"),
    [
        ((1, 6, 2, 1, 4), None, r"qkv is \(1, 6, 2, 1, 4\); a map of 2×2 needs \(batch, G \+ 4, 3, heads, dim\)"),
        ((1, 3, 3, 1, 4), None, r"qkv is \(1, 3, 3, 1, 4\)"),
        ((1, 6, 3, 1, 4), (1, 2, 2), r"from_global_bias is \(1, 2, 2\); it must be \(1, 2, 3\)"),
    ],
)
def test_wrong_shapes(shape: tuple[int, ...], bias: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longformer_attention(
            torch.zeros(shape), (2, 2), window=2, from_global_bias=None if bias is None else torch.zeros(bias)
        )


def test_a_projection_too_large_for_the_kernels() -> None:
    """Three times 2³⁰ numbers, though q alone has few enough."""
    spec = LocalSpec(Grid(1 << 12, 1 << 12), 7, "chunk", "all", 1, 1.0)
    qkv = torch.empty(1, 1 << 24, 3, 1, 64, device="meta")
    assert "2³¹" in str(refuse_rows(spec, qkv))
    assert refuse_rows(spec, qkv[:, : 1 << 23]) is None


# By Triton's interpreter


CASES = [
    {"global_tokens": 1, "shares": 1, "grid": (3, 4)},
    {"global_tokens": 17, "shares": 3, "share": 16, "neighbours": 3, "batch": 1},
]
SLOW_CASES = [
    {"global_tokens": 3, "shares": 2, "share": 16, "grid": (5, 5), "window": 3, "dim": 5, "batch": 1},
    {"global_tokens": 2, "shares": 1, "rule": "cyclic", "biases": False, "heads": 2, "batch": 1, "scale": 0.3},
    {"global_tokens": 0, "shares": 0, "biases": False, "grid": (3, 3)},
    {"global_tokens": 1, "shares": 2, "share": 16, "rule": "exact", "batch": 1, "dtype": "float16"},
]


@pytest.mark.parametrize(
    "options", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=str
)
def test_values_and_gradients(interpreted: Callable[..., None], options: dict[str, Any]) -> None:
    interpreted("rows", **{"dtype": "float32", **options})


def test_empty_batch(interpreted: Callable[..., None]) -> None:
    interpreted("rows", dtype="float32", batch=0, shares=0)


@pytest.mark.parametrize("name", [pytest.param("registered_rows", marks=pytest.mark.slow), "rows_of_a_model"])
def test_contracts(interpreted: Callable[..., None], name: str) -> None:
    interpreted(name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_sweep(interpreted: Callable[..., None], seed: int) -> None:
    draw = random.Random(seed)
    grid, global_tokens, share = draw.choice([(1, 1), (1, 7), (5, 4), (6, 6)]), draw.choice([1, 3, 17]), 16
    interpreted(
        "rows",
        dtype=draw.choice(["float32", "float16"]),
        grid=grid,
        window=draw.choice([2, 3]),
        rule=draw.choice(["chunk", "exact", "cyclic", "cyclic_release"]),
        neighbours=draw.choice(["all", "all", "self", draw.randint(1, 8)]),
        global_tokens=global_tokens,
        biases=draw.random() < 0.7,
        batch=draw.choice([1, 2]),
        dim=draw.choice([8, 16, 32]),
        shares=-(-(global_tokens + grid[0] * grid[1]) // share),
        share=share,
        seed=seed,
    )


# Launches


@pytest.mark.parametrize(
    ("tokens", "share"),
    [(1, 256), (785, 256), (64 * 256, 256), (64 * 256 + 1, 320), (100_000, 1600)],
)
def test_share_of_the_keys(tokens: int, share: int) -> None:
    """At least 256 keys, at most 64 shares, of whole tiles of 64: 100,000 keys are 62.5 shares of 1600."""
    pytest.importorskip("triton")
    from vision_longformer.ops.triton import launch

    assert launch.share_of(tokens) == share


class _Operations(TorchDispatchMode):
    """Counts operations that compute or copy, by name; views and allocations start nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        views = any(own.alias_info and not own.alias_info.is_write for own in func._schema.returns)
        if not views and "empty" not in name and name != "promote_types":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of each kernel and other operations of a layer, by hand: 2 images, 2 heads, a 28×28 map of 16 chunks."""
    pytest.importorskip("triton")
    from vision_longformer.ops.triton import launch, rows

    programs: Counter[str] = Counter()
    monkeypatch.setattr(launch, "launch", lambda kernel, count, *_, **__: programs.update({kernel.__name__: count}))
    spec = LocalSpec(Grid(28, 28), 7, "chunk", "all", 1, 1.0)
    inputs = PackedInputs(
        torch.zeros(2, 785, 3, 2, 32, dtype=torch.float16),
        torch.zeros(2, 27, 27),
        torch.zeros(2, 1),
        torch.zeros(2, 1, 2),
    )
    with _Operations() as operations:
        out, lse = rows.forward(inputs, spec)
    assert not operations.counts
    assert {name: programs.pop(name) for name in ("forward_kernel", "global_rows_kernel", "merge_shares_kernel")} == {
        "forward_kernel": 16 * 4,  # 49 queries fit a tile of 64
        "global_rows_kernel": 4 * 4,  # 785 keys in 4 shares of 256
        "merge_shares_kernel": 4,
    }
    assert set(programs) == {"bias_tiles_kernel"}
    programs.clear()
    with _Operations() as operations:
        rows.backward(out, inputs, out, lse, spec, True, True, True)
    assert set(programs) == {
        "bias_tiles_kernel", "query_gradient_kernel", "key_gradient_kernel", "bias_gradient_kernel",
        "global_sums_kernel", "global_gradient_kernel",
    }  # fmt: skip
    assert (programs["key_gradient_kernel"], programs["global_gradient_kernel"]) == (16 * 4, 4)
    assert programs["global_sums_kernel"] == 4 * 4  # 784 tokens in 4 shares of 256
    assert operations.counts == {"new_zeros": 1, "sum": 5}  # of tiles: bias, tokens, two biases; of samples: two biases


@pytest.mark.parametrize(
    "biases", [(), ("bias", "global_bias"), ("from_global_bias",), ("global_bias", "from_global_bias")]
)
def test_one_attention_where_the_map_is_seen_whole(biases: tuple[str, ...]) -> None:
    """``whole_map`` takes global and local rows together; the oracle takes them apart."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv": (2, 2 + 3 * 4, 3, 2, 4), "bias": (2, 7, 7), "global_bias": (2, 2), "from_global_bias": (2, 2, 3)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    inputs = {name: x for name, x in drawn.items() if name in ("qkv", *biases)}
    got, expected = (
        longformer_attention(**inputs, grid=(3, 4), window=2, implementation=name)
        for name in ("whole_map", "masked_dense")
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
