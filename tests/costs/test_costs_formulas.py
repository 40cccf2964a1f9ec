"""Parameters and the paper's MACs by formula: by hand, and against the models themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from builders import SMALL_MODELS, small_config
from torch import nn

from vision_longformer import MODELS, ModelConfig, StageConfig, VisionLongformer, model_config
from vision_longformer.costs import count_parameters, paper_macs
from vision_longformer.models import config as cfg
from vision_longformer.models.zoo import longformer_config

# Parameters


def test_parameters_by_hand() -> None:
    """A stage of local attention with relative bias, and a flat one of Linformer with absolute position."""
    local = StageConfig(8, 2, 2, 4, cfg.Longformer(window=1), global_tokens=3)
    block = 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 2 * (3 * 3 + 3 + 3 + 9)
    embedding = (4 * 4 * 3 * 8 + 8) + 16 + 3 * 8
    head = 16 + 8 * 10 + 10
    count = count_parameters(ModelConfig((local,), img_size=(16, 24), num_classes=10))
    assert (count.trainable, count.random_features) == (embedding + 2 * block + head, 0)
    mixed = StageConfig(6, 1, 1, 8, cfg.Linformer(5, share_kv=False), global_tokens=2, position="absolute")
    block = 2 * 12 + (6 * 18 + 18) + (6 * 6 + 6) + (6 * 24 + 24) + (24 * 6 + 6) + 2 * (2 + 2 * 3) * 5
    embedding = (8 * 8 * 3 * 6 + 6) + 12 + 2 * 6 + (2 + 3) * 3 + 2 * 6
    count = count_parameters(ModelConfig((mixed,), img_size=(16, 24), num_classes=0))
    assert count.trainable == embedding + block + 12


def test_random_features_by_hand() -> None:
    """Heads of 8 channels: int(8 ln 8) = 16 features each, or as many as the configuration says."""
    for features, expected in ((None, 16), (5, 5)):
        stage = StageConfig(16, 3, 2, 4, cfg.Performer(features), position="none")
        count = count_parameters(ModelConfig((stage,), img_size=(16, 16)))
        assert count.random_features == 3 * expected * 8
        assert count.paper == count.trainable + count.random_features


def _count(module: nn.Module) -> tuple[int, int]:
    """Trainable parameters and random features."""
    features = [buffer.numel() for name, buffer in module.named_buffers() if name.endswith("features")]
    return sum(parameter.numel() for parameter in module.parameters()), sum(features)


@cache
def _built(config: ModelConfig) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Of a built model: all of it, and one block of each stage."""
    with torch.device("meta"):
        model = VisionLongformer(config)
    return _count(model), [_count(model.get_submodule(f"stages.{i}.blocks.0")) for i in range(len(config.stages))]


def _check(config: ModelConfig) -> None:
    """The formula against a model with one block per stage; the other blocks of a stage are like the first."""
    single = replace(config, stages=tuple(replace(stage, depth=1) for stage in config.stages))
    whole, blocks = _built(single)
    more = [stage.depth - 1 for stage in config.stages]
    expected = [
        total + sum(times * block[part] for times, block in zip(more, blocks, strict=True))
        for part, total in enumerate(whole)
    ]
    count = count_parameters(config)
    assert [count.trainable, count.random_features] == expected


def test_parameters_of_all_named_models() -> None:
    for config in MODELS.values():
        _check(config)


@pytest.mark.parametrize("name", ["vision_longformer_small", "msvit_tiny_1_2_8_1_partial_performer"])
def test_parameters_of_whole_models(name: str) -> None:
    count = count_parameters(model_config(name))
    assert (count.trainable, count.random_features) == _built(model_config(name))[0]


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_parameters_of_small_models(name: str) -> None:
    _check(SMALL_MODELS[name])


SEPARATE = cfg.Longformer(window=2, share_weights=False)

OPTIONS: dict[str, tuple[list[cfg.AttentionConfig], dict[str, Any]]] = {
    "given tokens": ([SEPARATE, cfg.Full()], {"position": "relative", "tokens": (0, 1), "given_token_dim": 5}),
    "given tokens, absolute": ([SEPARATE, cfg.Performer(None)], {"tokens": (0, 0), "given_token_dim": 5}),
    "separate weights without tokens": ([SEPARATE], {"position": "relative", "tokens": (0,)}),
    "separate global memory": ([cfg.GlobalMemory(share_weights=False)], {"position": "relative", "tokens": (3,)}),
    "given to global memory": ([cfg.GlobalMemory()], {"position": "relative", "tokens": (3,), "given_token_dim": 2}),
    "linear kernel": ([cfg.Performer(None, kernel="linear")], {}),
    "carried": ([cfg.Full(), SEPARATE], {"tokens": (2, 2), "carry_global_tokens": True, "norm_embed": False}),
    "carried, 1-D": ([cfg.Full()] * 2, {"tokens": (1, 1), "position": "absolute_1d", "carry_global_tokens": True}),
    "narrow": ([cfg.SpatialReduction(3)], {"mlp_ratio": 0.7, "qkv_bias": False, "num_classes": 0, "in_chans": 1}),
    "not square": ([cfg.Full(), cfg.Linformer(4)], {"img_size": (40, 72), "position": "absolute"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_with_options(name: str) -> None:
    mechanisms, options = OPTIONS[name]
    _check(small_config(*mechanisms, **options))


# The paper's MACs


def test_macs_by_hand() -> None:
    """Two stages on a map with a remainder: 10×13 pixels, 3×4 cells of 4, then 2×2."""
    stages = (
        StageConfig(8, 2, 2, 4, cfg.Longformer(window=1)),
        StageConfig(16, 1, 2, 2, cfg.SpatialReduction(2), position="absolute"),
    )
    first, second = paper_macs(ModelConfig(stages, num_classes=10), (10, 13)).stages
    assert first.grid == (3, 4)
    assert first.parts == {
        "patch_embedding": (4 * 4 * 3 + 1) * 8 * 12,
        "projections": 2 * 4 * 12 * 8 * 8,
        "products": 2 * 2 * 12 * 9 * 8,
        "mlp": 2 * 8 * 12 * 8 * 8,
    }
    assert second.parts == {
        "patch_embedding": (2 * 2 * 8 + 1) * 16 * 4,
        "projections": (2 * 4 + 4 * 1 + 2 * 1) * 16 * 16,
        "products": 2 * 4 * 1 * 16,
        "mlp": 8 * 4 * 16 * 16,
    }
    assert paper_macs(ModelConfig(stages, num_classes=10), (10, 13)).head == 160


def test_named_models_cost_what_the_paper_prints() -> None:
    """Where windows cover the map, Longformer stages are charged as the full attention that they equal."""
    for size in ("tiny", "small", "medium", "base"):
        for img_size, suffix in ((224, ""), (384, "_384")):
            ours = paper_macs(model_config(f"vision_longformer_{size}{suffix}"))
            assert ours == paper_macs(longformer_config(size, img_size=img_size, partial=True))


@pytest.mark.parametrize(
    ("attention", "products"),
    [
        (cfg.Full(), 2 * 12 * 12),
        (cfg.Longformer(window=1), 2 * 12 * 9),
        (cfg.Longformer(window=2), 2 * 12 * 12),
        (cfg.GlobalMemory(), 2 * 12 * 9),
        (cfg.Linformer(5), 4 * 12 * 5),
        (cfg.SpatialReduction(2), 2 * 12 * 2),
        (cfg.SpatialReduction(8), 2 * 12 * 1),
        (cfg.Performer(5), 6 * 12 * 5),
        (cfg.Performer(None), 6 * 12 * 16),
        (cfg.Performer(5, kernel="linear"), 6 * 12 * 8),
    ],
    ids=repr,
)
def test_products_of_tokens_by_hand(attention: cfg.AttentionConfig, products: int) -> None:
    """3×4 tokens of 16 channels in two heads; a window of 25 is charged for the 12 keys that there are."""
    config = ModelConfig((StageConfig(16, 3, 2, 4, attention, position="none"),), img_size=(12, 16))
    (stage,) = paper_macs(config).stages
    assert stage.parts["products"] == 3 * products * 16


def test_global_memory_counts_its_tokens_in_every_stage() -> None:
    """Two tokens in the linear layers of both stages; keys and values of the memory are charged twice."""
    stages = (
        StageConfig(8, 1, 2, 4, cfg.GlobalMemory(), global_tokens=2, position="none"),
        StageConfig(8, 1, 2, 2, cfg.Full(), global_tokens=2, position="none"),
    )
    first, second = paper_macs(ModelConfig(stages, img_size=(16, 16))).stages
    assert (first.parts["projections"], first.parts["mlp"]) == (6 * 18 * 64, 8 * 18 * 64)
    assert (second.parts["projections"], second.parts["mlp"]) == (4 * 6 * 64, 8 * 6 * 64)
    assert first.parts["products"] == 2 * 16 * 5**2 * 8


def test_a_size_that_leaves_nothing() -> None:
    config = model_config("vision_longformer_tiny").override(patch_remainder="drop")
    with pytest.raises(ValueError, match="leaves nothing for stage"):
        paper_macs(config, (16, 64))
