"""The fused CPU kernel beyond the sweep of all implementations: instruction levels, threads, layouts, the operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import Case, compare, run

from vision_longformer import local_attention
from vision_longformer.geometry import RULES
from vision_longformer.ops import fused_cpu
from vision_longformer.ops.fused_cpu_library import LEVELS, Library, load, use_level

pytestmark = pytest.mark.skipif(fused_cpu.UNAVAILABLE is not None, reason=str(fused_cpu.UNAVAILABLE))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_level_of_instructions(level: str, dtype: torch.dtype) -> None:
    library = load()
    assert isinstance(library, Library)
    if level not in library.levels:
        pytest.skip(f"this machine has no {level}")
    with use_level(level):
        for rule in RULES:
            compare("fused_cpu", Case(grid=(9, 13), window=3, rule=rule, global_tokens=2, dim=20), dtype)


@pytest.mark.parametrize("dim", [1, 3, 20, 33, 48, 64, 128])
def test_head_dimensions(dim: int) -> None:
    compare("fused_cpu", Case(grid=(10, 8), window=3, dim=dim, heads=1), torch.float32)


@pytest.mark.parametrize("rule", RULES)
def test_results_do_not_depend_on_threads_or_runs(rule: str, threads: None) -> None:
    """To the bit, also where tiles of chunks wrap around."""
    for grid in ((23, 37), (5, 64)):
        case = Case(grid=grid, window=3, rule=rule, dim=16, heads=3)
        results = []
        for count in (1, 2, 7, 2):
            torch.set_num_threads(count)
            results.append(run("fused_cpu", case, case.tensors(torch.float32)))
        for other in results[1:]:
            assert all(torch.equal(other[name], expected) for name, expected in results[0].items())


def test_slices_of_a_projection_and_strided_channels() -> None:
    case = Case(grid=(7, 9), window=3, dim=8)
    tensors = case.tensors(torch.float64, grad=False)
    expected = run("masked_dense", case, tensors)["output"]
    packed = torch.stack(
        [torch.cat([torch.zeros_like(tensors["q"][:, :1]), tensors["q"]], 1), tensors["k"], tensors["v"]], 2
    )
    q, k, v = packed.unbind(2)
    strided = torch.stack([tensors["q"], tensors["q"]], -1)[..., 0]
    for query in (q[:, 1:], strided):
        out = local_attention(
            query, k, v, case.grid, window=3, bias=tensors["bias"], global_bias=tensors["global_bias"],
            implementation="fused_cpu",
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_empty_batch() -> None:
    case = Case(batch=0)
    results = run("fused_cpu", case, case.tensors(torch.float32))
    assert results["output"].shape == (0, 45, 2, 4)
    assert results["gradient of bias"].abs().sum() == 0


def test_shapes_that_do_not_fit_are_refused_before_any_pointer_is_used() -> None:
    q = torch.randn(1, 6, 1, 4)
    with pytest.raises(ValueError, match="do not fit a 2×4 map"):
        fused_cpu.fused_local_attention(q, q, q, None, None, None, 2, 4, 2, "chunk", "all", 0.5)
    with pytest.raises(ValueError, match=r"it must be 1\.\.8"):
        fused_cpu.fused_local_attention(q, q, q, None, None, torch.tensor(9), 2, 3, 2, "chunk", "one", 0.5)


@pytest.mark.parametrize("neighbours", ["all", "one"])
def test_operator_contract(neighbours: str) -> None:
    """Schema, fake implementation, autograd registration and dynamic shapes, as torch checks them."""
    tensors = Case(grid=(5, 6), window=2, dim=4).tensors(torch.float64)
    inputs = tuple(tensors[name] for name in ("q", "k", "v", "bias", "global_bias"))
    neighbour = torch.tensor(3) if neighbours == "one" else None
    torch.library.opcheck(fused_cpu.fused_local_attention, (*inputs, neighbour, 5, 6, 2, "chunk", neighbours, 0.5))


def test_gradcheck() -> None:
    tensors = Case(grid=(3, 4), window=2, batch=1, heads=1, dim=2).tensors()
    inputs = [tensors[name] for name in ("q", "k", "v", "bias", "global_bias")]

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return fused_cpu.fused_local_attention(*x, None, 3, 4, 2, "chunk", "all", 0.7)[0]

    assert torch.autograd.gradcheck(attend, inputs)
