"""Configurations: what is refused and in which words, and JSON there and back."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from vision_longformer import MODELS, ModelConfig, StageConfig
from vision_longformer.models import config as cfg
from vision_longformer.models.config import size_pair
from vision_longformer.models.zoo import comparison_config, flat_config, longformer_config


def stage(**changes: Any) -> StageConfig:
    """A legal stage with some fields changed."""
    plain = {"dim": 12, "depth": 1, "heads": 3, "patch": 4, "attention": cfg.Longformer(), "global_tokens": 1}
    return StageConfig(**{**plain, **changes})


def model(*stages: StageConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(stages or (stage(),), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 796, "heads": 12}, "dim=796 is not divisible by heads=12; use dim=792 or dim=804"),
        ({"dim": 2, "heads": 3}, "dim=2 is not divisible by heads=3; use dim=3 or dim=6"),
        ({"dim": 0}, "dim is 0; it must be an integer of at least 1"),
        ({"depth": 0}, "depth is 0; it must be an integer of at least 1"),
        ({"heads": 0}, "heads is 0; it must be an integer of at least 1"),
        ({"patch": -2}, "patch is -2; it must be an integer of at least 1"),
        ({"patch": 2.0}, "patch is 2.0; it must be an integer"),
        ({"global_tokens": -1}, "global_tokens is -1; it must be an integer of at least 0"),
        ({"position": "relativ"}, "unknown position 'relativ'; did you mean 'relative'"),
        ({"dim": 9, "position": "absolute"}, "dim=9 is odd; use dim=10 or position='relative'"),
        (
            {"attention": cfg.Linformer()},
            "position='relative' is not defined for linformer attention; use position='absolute'",
        ),
        ({"attention": cfg.Performer()}, "not defined for performer attention"),
        ({"attention": cfg.SpatialReduction()}, "not defined for spatial_reduction attention"),
        ({"attention": cfg.GlobalMemory(), "global_tokens": 0}, "needs global_tokens of at least 1"),
    ],
)
def test_bad_stages(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage(**changes)


@pytest.mark.parametrize("cls", [StageConfig, *cfg.MECHANISMS.values()], ids=lambda cls: cls.__name__)
def test_every_field_is_documented(cls: type) -> None:
    """In a list of arguments for a stage, by name elsewhere."""
    form = "        {}: " if cls is StageConfig else "``{}"
    assert [field.name for field in fields(cls) if form.format(field.name) not in (cls.__doc__ or "")] == []


@pytest.mark.parametrize("mechanism", cfg.MECHANISMS)
def test_the_mechanisms_documented_with_relative_position_are_those_that_take_it(mechanism: str) -> None:
    attention = cfg.MECHANISMS[mechanism]()
    (rule,) = [line for line in StageConfig.__doc__.split("\n    - ") if line.startswith('``position="relative"``')]
    documented = f":class:`{type(attention).__name__}`" in rule
    if documented:
        assert StageConfig(8, 1, 2, 4, attention).position == "relative"
    else:
        with pytest.raises(ValueError, match="position='relative' is not defined"):
            StageConfig(8, 1, 2, 4, attention)


def test_a_mechanism_must_be_a_config_object() -> None:
    with pytest.raises(TypeError, match=r"attention is 'full'; give one of full, longformer, .* as a config object"):
        stage(attention="full")


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (cfg.Longformer, {"window": 0}, "window is 0; it must be an integer of at least 1"),
        (cfg.Longformer, {"window": 7.5}, "window is 7.5; it must be an integer"),
        (cfg.Longformer, {"window": True}, "window is True"),
        (cfg.Longformer, {"rule": "chunks"}, "unknown window rule 'chunks'; did you mean 'chunk'"),
        (cfg.Longformer, {"rule": "ciclic"}, "did you mean 'cyclic'"),
        (cfg.Linformer, {"features": 0}, "features is 0; it must be an integer of at least 1"),
        (cfg.Performer, {"features": 0}, "features is 0; it must be an integer of at least 1"),
        (cfg.Performer, {"kernel": "softmx"}, "unknown Performer kernel 'softmx'; did you mean 'softmax'"),
        (cfg.Performer, {"stabiliser": "images"}, "unknown stabiliser 'images'; did you mean 'image'"),
        (cfg.SpatialReduction, {"ratio": 0}, "ratio is 0; it must be an integer of at least 1"),
    ],
)
def test_bad_mechanisms(cls: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


PLAIN = cfg.Longformer(window=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "stages is empty; a model needs at least one stage"),
        ({"in_chans": 0}, "in_chans is 0; it must be an integer of at least 1"),
        ({"num_classes": -1}, "num_classes is -1; it must be an integer of at least 0"),
        ({"given_token_dim": -4}, "given_token_dim is -4"),
        ({"img_size": 0}, r"image size is 0; give one positive number or \(height, width\)"),
        ({"img_size": (224,)}, r"image size is \(224,\)"),
        ({"img_size": (224, 1.5)}, r"image size is \(224, 1.5\)"),
        ({"global_pool": "max"}, "unknown global_pool 'max'; choose from avg, token"),
        ({"patch_remainder": "padd"}, "unknown patch_remainder 'padd'; did you mean 'pad'"),
        ({"neighbours": "rndom"}, "unknown neighbours 'rndom'; did you mean 'random'"),
        ({"eval_neighbours": "random"}, "unknown eval_neighbours 'random'; choose from all, self"),
        ({"drop_rate": 1.0}, "drop_rate is 1.0; it must be at least 0 and below 1"),
        ({"drop_path_rate": -0.1}, "drop_path_rate is -0.1; it must be at least 0 and below 1"),
        ({"mlp_ratio": 0}, "mlp_ratio is 0; it must be positive"),
        (
            {"stages": (stage(global_tokens=0),), "global_pool": "token"},
            "global_pool='token' needs a global token in the last stage; use global_pool='avg'",
        ),
        (
            {"stages": (stage(), stage(global_tokens=2, patch=2)), "carry_global_tokens": True},
            r"the same number of global tokens, at least 1, in every stage, not \[1, 2\]",
        ),
        ({"stages": (stage(global_tokens=0),), "carry_global_tokens": True}, r"not \[0\]"),
        (
            {"stages": (stage(attention=cfg.Linformer(4), position="none"),), "given_token_dim": 8},
            "linformer projects a fixed number of tokens and cannot take given tokens",
        ),
        (
            {"stages": (stage(), stage(patch=8)), "img_size": (64, 24), "patch_remainder": "drop"},
            r"image of \(64, 24\) leaves nothing for stage 2 \(patch 8\); use a larger image or patch_remainder='pad'",
        ),
    ],
)
def test_bad_models(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"stages": (stage(),), **changes})


def test_override_refuses_unknown_options() -> None:
    with pytest.raises(ValueError, match="unknown model option 'num_class'; did you mean 'num_classes'"):
        model().override(num_class=10)
    changed = model().override(num_classes=10, img_size=96)
    assert (changed.num_classes, changed.img_size) == (10, (96, 96))


def test_an_override_is_validated_again() -> None:
    with pytest.raises(ValueError, match="drop_rate is 2"):
        model().override(drop_rate=2)


@pytest.mark.parametrize(
    ("size", "pair"), [(224, (224, 224)), ((3, 5), (3, 5)), ([7, 9], (7, 9))], ids=["number", "tuple", "list"]
)
def test_size_pair(size: Any, pair: tuple[int, int]) -> None:
    assert size_pair(size) == pair


@pytest.mark.parametrize(
    ("remainder", "grids"), [("pad", [(25, 36), (13, 18), (7, 9)]), ("drop", [(24, 35), (12, 17), (6, 8)])]
)
def test_grids_of_an_odd_image(remainder: str, grids: list[tuple[int, int]]) -> None:
    config = model(stage(), stage(patch=2), stage(patch=2), patch_remainder=remainder)
    assert config.grids((97, 143)) == grids
    assert config.grids() == [(56, 56), (28, 28), (14, 14)]


def _varied() -> ModelConfig:
    """Every mechanism and no field at its default."""
    options = {"position": "absolute", "global_tokens": 3}
    mechanisms = (
        cfg.Longformer(window=3, rule="exact", share_weights=False),
        cfg.GlobalMemory(share_weights=False, bias_local_queries=False),
        cfg.SpatialReduction(ratio=2),
        cfg.Performer(features=None, kernel="relu", stabiliser="batch"),
        cfg.Full(),
    )
    changes = {
        "img_size": (97, 143), "in_chans": 1, "num_classes": 7, "global_pool": "token", "norm_embed": False,
        "qkv_bias": False, "qk_scale": 0.3, "mlp_ratio": 2.0, "drop_rate": 0.1, "drop_path_rate": 0.2,
        "patch_remainder": "drop", "neighbours": "random", "eval_neighbours": "self", "carry_global_tokens": True,
        "given_token_dim": 5,
    }  # fmt: skip
    return model(*(stage(attention=m, patch=2, **options) for m in mechanisms), **changes)


CONFIGS = {
    "plain": model(),
    "varied": _varied(),
    "linformer": model(stage(attention=cfg.Linformer(4, share_kv=False), position="none")),
    "flat": flat_config("tiny"),
    "1d": flat_config("tiny", "absolute_1d"),
    "small": longformer_config("small"),
    "sra": comparison_config("tiny", "1_10_1", "partial_sra32"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_json_there_and_back(name: str) -> None:
    config = CONFIGS[name]
    text = json.dumps(config.to_dict())
    assert ModelConfig.from_dict(json.loads(text)) == config


def test_the_varied_config_leaves_no_field_at_its_default() -> None:
    default, varied = model().to_dict(), _varied().to_dict()
    assert [name for name in default if default[name] == varied[name]] == []


def test_every_named_model_goes_through_json() -> None:
    for config in MODELS.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_json_with_unknown_names_is_refused() -> None:
    data = model().to_dict()
    with pytest.raises(ValueError, match="unknown ModelConfig field 'num_clases'; did you mean 'num_classes'"):
        ModelConfig.from_dict({**data, "num_clases": 3})
    with pytest.raises(ValueError, match="unknown StageConfig field 'dims'; did you mean 'dim'"):
        ModelConfig.from_dict({**data, "stages": [{**data["stages"][0], "dims": 3}]})
    attention = {"kind": "longfromer", "window": 7}
    with pytest.raises(ValueError, match="unknown attention mechanism 'longfromer'; did you mean 'longformer'"):
        ModelConfig.from_dict({**data, "stages": [{**data["stages"][0], "attention": attention}]})
    attention = {"kind": "longformer", "windows": 7}
    with pytest.raises(ValueError, match="unknown Longformer field 'windows'; did you mean 'window'"):
        ModelConfig.from_dict({**data, "stages": [{**data["stages"][0], "attention": attention}]})
