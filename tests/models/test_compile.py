"""``torch.compile``: one graph, the same numbers, no recompilation where nothing of the shape changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from builders import SMALL_MODELS, assert_close, assert_trains_like_the_oracle, build, image, small_config
from torch._dynamo.utils import counters

from vision_longformer import ModelConfig, VisionLongformer
from vision_longformer.models import config as cfg
from vision_longformer.ops.cpu import UNAVAILABLE


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


ONE_OF_EACH = ("vil", "full", "global", "linformer", "sra64", "performer")


@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.slow) for name in SMALL_MODELS]
)
def test_full_graph(name: str) -> None:
    model = build(name).eval()
    x = image(97, 143)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(x), model(x), 1e-5)


@pytest.mark.parametrize("name", ["plain", "flat"])
def test_default_backend(name: str) -> None:
    model = build(name).eval()
    x = image(48, 80)
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(x), model(x), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation",
    ["tiled", pytest.param("fused_cpu", marks=pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)))],
)
def test_training_by_the_default_backend(implementation: str) -> None:
    """That of the Triton kernels is in ``tests/ops/test_triton_compile.py``."""
    assert_trains_like_the_oracle(implementation)


def test_training_with_random_shift_compiles_once() -> None:
    """Ten steps, ten different draws: one compilation, and the same gradients as without it."""
    model, twin = (build("vil", neighbours="random").train() for _ in range(2))
    x = image(64, 80)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    draws = set()
    for step in range(10):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            compiled(x).square().sum().backward()
        twin(x).square().sum().backward()
        draws.add(tuple(twin.random_shift.draw(5).tolist()))
        twin.random_shift.seed(0, step + 1)
        assert model.random_shift.state.tolist() == [0, step + 1]
    assert len(draws) == 10
    assert counters["stats"]["unique_graphs"] == 1
    for (name, got), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(got.grad, expected.grad, 1e-4, name)


@pytest.mark.parametrize(
    "config",
    [
        small_config(cfg.Longformer(window=2), cfg.Longformer(window=2), position="relative"),
        small_config(cfg.Full(), position="relative", patches=(16,)),
        small_config(cfg.SpatialReduction(4)),
    ],
    ids=["vil", "full", "sra"],
)
def test_dynamic_sizes_do_not_recompile(config: ModelConfig) -> None:
    """With ``dynamic=True`` a graph serves many sizes (torch's convolution makes a second one for large maps)."""
    model = VisionLongformer(config).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for size in [(161, 193), (200, 176), (177, 209), (193, 161), (300, 164)]:
            x = image(*size, batch=1)
            assert_close(compiled(x), model(x), 1e-5, f"logits at {size}")
    assert counters["stats"]["unique_graphs"] <= 2
