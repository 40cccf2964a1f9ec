"""MACs that our models execute: by hand, and beside those of the authors' code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vision_longformer import ModelConfig, StageConfig, model_config
from vision_longformer.costs import executed_macs
from vision_longformer.costs.executed import block_pairs, operator_formulas
from vision_longformer.geometry import Grid
from vision_longformer.models import config as cfg
from vision_longformer.ops import IMPLEMENTATIONS, cpu, triton
from vision_longformer.ops.operator import OPERATORS

REFERENCE_GMACS = {
    "full": "6.9704",
    "linformer": "5.6409",
    "partial_linformer": "5.2248",
    "sra64": "3.9849",
    "sra32": "4.2959",
    "partial_sra32": "4.5894",
    "global": "7.3920",
    "partial_global": "6.9416",
    "partial_vil": "5.3148",
}
"""What the authors' code executes for Small 1-2-8-1."""


def _key_values_again(config: ModelConfig) -> int:
    """MACs of the authors' second projection of all tokens to keys and values, for global rows with shared weights.

    We project once, and so execute less by this in every stage of Vision Longformer and global memory.
    """
    local = (cfg.Longformer, cfg.GlobalMemory)
    return sum(
        stage.depth * 2 * (grid.tokens + stage.global_tokens) * stage.dim**2
        for stage, grid in zip(config.stages, config.grids(), strict=True)
        if isinstance(stage.attention, local)
    )


@pytest.mark.parametrize("mechanism", REFERENCE_GMACS)
def test_executed_macs_are_those_of_the_reference(mechanism: str) -> None:
    """By sliding chunk, which multiplies all nine blocks as the authors do; only their second projection is missing."""
    config = model_config(f"msvit_small_1_2_8_1_{mechanism}")
    executed = executed_macs(config, implementation="sliding_chunk").total + _key_values_again(config)
    assert f"{executed / 1e9:.4f}" == REFERENCE_GMACS[mechanism]


@pytest.mark.parametrize(("mechanism", "gmacs"), [("performer", "5.6471"), ("partial_performer", "5.2284")])
def test_executed_macs_of_performer(mechanism: str, gmacs: str) -> None:
    assert f"{executed_macs(model_config(f'msvit_small_1_2_8_1_{mechanism}')).total / 1e9:.4f}" == gmacs


def test_executed_macs_of_the_flat_model_by_hand() -> None:
    """T = 197 tokens, twelve blocks of 4Td² + 2T²d + 8Td², one patch embedding and one head, without biases."""
    macs = executed_macs(model_config("evit_small_patch16"))
    (stage,) = macs.stages
    assert stage.parts == {
        "patch_embedding": 16 * 16 * 3 * 384 * 196,
        "carried": 0,
        "attention": 12 * (4 * 197 * 384**2 + 2 * 197**2 * 384),
        "mlp": 12 * 8 * 197 * 384**2,
    }
    assert macs.head == 384 * 1000


def test_executed_macs_of_carried_tokens() -> None:
    stages = tuple(StageConfig(8, 1, 2, 2, cfg.Full(), global_tokens=3) for _ in range(2))
    macs = executed_macs(ModelConfig(stages, img_size=(8, 8), carry_global_tokens=True))
    assert [stage.parts["carried"] for stage in macs.stages] == [0, 3 * 8 * 8]


@pytest.mark.parametrize("size", [(97, 143), (30, 30)])
def test_automatic_choice_executes_least(size: tuple[int, int]) -> None:
    """Leaving out blocks beyond the map is what separates it from sliding chunk; the rest is the same."""
    config = model_config("vision_longformer_tiny")
    auto, chunk = (executed_macs(config, size, name) for name in ("auto", "sliding_chunk"))
    for ours, theirs in zip(auto.stages, chunk.stages, strict=True):
        assert ours.parts["attention"] <= theirs.parts["attention"]
        assert ours.parts["mlp"] == theirs.parts["mlp"]
    assert auto.total < chunk.total


@pytest.mark.parametrize("implementation", sorted(set(OPERATORS) & set(IMPLEMENTATIONS)))
def test_attention_of_a_kernel_by_hand(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 3×5 map in chunks of 2, one global token, one head; no kernel need be built or installed to be counted."""
    monkeypatch.setattr(cpu, "UNAVAILABLE", None)
    monkeypatch.setattr(triton, "INSTALLED", True)
    config = ModelConfig((StageConfig(4, 1, 1, 1, cfg.Longformer(window=2)),), img_size=(3, 5), num_classes=0)
    (stage,) = executed_macs(config, implementation=implementation).stages
    tokens, pairs = 16, 3 * 3 * (2 * 4 + 2 * 5 + 1 * 3)
    assert block_pairs(Grid(3, 5), 2, "chunk") == pairs
    assert stage.parts["attention"] == 4 * tokens * 4**2 + 2 * 4 * (pairs + 15) + 2 * 4 * tokens


def test_every_operator_has_a_formula() -> None:
    formulas = operator_formulas()
    assert set(formulas) == {
        getattr(torch.ops.vision_longformer, name) for name in ("tiled", "fused_cpu", "triton_gpu", "triton_rows")
    }


def test_flops_of_an_operator_by_hand() -> None:
    """A 3×5 map in chunks of 2 with a global token: 189 local pairs, or with dilation 2 those of four small maps."""
    formula = operator_formulas()[torch.ops.vision_longformer.triton_gpu]
    q, k = (3, 15, 2, 4), (3, 16, 2, 4)
    given = (q, k, k, None, None, None, 3, 5, 2, "exact", "all")
    small_maps = 6 * 6 + 4 * 4 + 3 * 3 + 2 * 2
    assert formula(*given, [1], 0.5, [], out_shape=(q, q)) == 2 * 2 * 3 * 4 * (2 * 189 + 2 * 15)
    assert formula(*given, [2], 0.5, [], out_shape=(q, q)) == 2 * 2 * 3 * 4 * (2 * small_maps + 2 * 15)
    assert formula(*given, [1, 2], 0.5, [], out_shape=(q, q)) == 2 * 2 * 3 * 4 * (189 + small_maps + 2 * 15)


def test_flops_of_all_rows_by_hand() -> None:
    """As above with two global tokens: 15 local queries see both, and both see all 17 tokens."""
    formula = operator_formulas()[torch.ops.vision_longformer.triton_rows]
    qkv, out = (3, 17, 3, 2, 4), (3, 17, 2, 4)
    given = (qkv, None, None, None, None, 3, 5, 2, "chunk", "all", [1], 0.5, [])
    assert formula(*given, out_shape=(out, out)) == 2 * 2 * 3 * 4 * 2 * (189 + 15 * 2 + 2 * 17)


def test_flops_of_a_band_by_hand() -> None:
    """The first chunk row of a 3×5 map in chunks of 2 sees one row of five below: 2·3 pairs of rows, 21 of columns."""
    formula = operator_formulas()[torch.ops.vision_longformer.tiled]
    q, k = (3, 10, 2, 4), (3, 16, 2, 4)
    given = (q, k, k, None, None, None, 2, 5, 2, "chunk", "all", [1], 0.5, [0, 1])
    columns = 2 * 4 + 2 * 5 + 1 * 3
    assert formula(*given, out_shape=(q, q)) == 2 * 2 * 3 * 4 * (2 * 2 * 3 * columns + 2 * 10)


def test_pairs_of_other_rules() -> None:
    grid = Grid(3, 5)
    assert block_pairs(grid, 2, "exact") == block_pairs(grid, 2, "chunk")
    assert block_pairs(grid, 2, "chunk", "self") == (4 + 1) * (4 + 4 + 1)
    assert block_pairs(grid, 2, "chunk", "one") == 45 + (189 - 45) // 8
    assert block_pairs(grid, 2, "cyclic") == 15 * 9 * 4
    assert block_pairs(grid, 2, "cyclic", halo=(1, 2)) == 15 * 9 * 4
    assert block_pairs(grid, 2, "cyclic", halo=(1, 0)) == (2 * 6 + 1 * 4) * 5 * 6


def test_an_operator_of_unknown_cost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.library.custom_op("vision_longformer_test::mystery", mutates_args=())
    def mystery(q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    mystery.register_fake(torch.empty_like)
    module = SimpleNamespace(refusal=lambda spec, q: None, attend=lambda inputs, spec: mystery(inputs.q))
    monkeypatch.setitem(IMPLEMENTATIONS, "mystery", module)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the cost of vision_longformer_test.mystery is unknown"):
        executed_macs(model_config("vision_longformer_tiny"), implementation="mystery")


def test_bad_requests() -> None:
    config = model_config("vision_longformer_tiny")
    with pytest.raises(ValueError, match="did you mean 'sliding_chunk"):
        executed_macs(config, implementation="sliding_chunks")
    with pytest.raises(ValueError, match="cannot run this: unfold slides one window"):
        executed_macs(config, implementation="unfold_nn")
    with pytest.raises(ValueError, match="image size is"):
        executed_macs(config, (0, 7))
