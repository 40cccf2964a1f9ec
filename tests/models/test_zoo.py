"""The named models: what they are, as data and on the meta device. ``test_zoo_full_size.py`` runs some of them."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
import timm
import torch
from builders import assert_close

from vision_longformer import MODELS, VisionLongformer, adapt_model, create_model, model_config
from vision_longformer.models import config as cfg
from vision_longformer.models.zoo import DEPTHS, comparison_config, flat_config, longformer_config

RELEASED = json.loads(gzip.decompress((Path(__file__).parents[1] / "assets" / "checkpoint_keys.json.gz").read_bytes()))[
    "models"
]


def test_every_model_is_registered_in_timm() -> None:
    names = [
        name for family in ("vision_longformer*", "evit_*_patch16", "msvit_*") for name in timm.list_models(family)
    ]
    assert sorted(names) == sorted(MODELS)
    assert len(timm.list_models("vision_longformer*")) == 28
    assert len(timm.list_models("msvit_*")) == 2 * 7 * 12
    for name in names:
        assert timm.models.get_pretrained_cfg(name).input_size == (3, *MODELS[name].img_size)


PAPER = [name for name in MODELS if name not in ("vision_longformer_micro", "vision_longformer_nano")]


@pytest.mark.parametrize("name", [name for name in PAPER if name.startswith("vision_longformer")])
def test_longformer_in_every_stage(name: str) -> None:
    """One global token but for the last stage; windows 15, or 13, 17, 25 and 25 at 384; heads of 32, 48 or 64."""
    config = MODELS[name]
    attention = [stage.attention for stage in config.stages]
    assert all(isinstance(a, cfg.Longformer) and a.rule == "chunk" and a.share_weights for a in attention)
    large = name.endswith("_384")
    assert config.img_size == ((384, 384) if large else (224, 224))
    assert [2 * a.window + 1 for a in attention] == ([13, 17, 25, 25] if large else [15, 15, 15, 15])
    assert [stage.global_tokens for stage in config.stages] == [1, 1, 1, 0]
    position = "absolute" if "_ape" in name else "relative"
    assert {stage.position for stage in config.stages} == {position}
    assert {stage.dim // stage.heads for stage in config.stages} <= {32, 48, 64}
    if large:
        assert all(max(grid) <= 2 * a.window for grid, a in zip(config.grids()[2:], attention[2:], strict=True))


def released_names() -> dict[str, str]:
    """Our names of released configurations with the same parameters."""
    sizes = {"medium": "medium_deep", "base": "base_deep"}
    pairs = {}
    for size in ("tiny", "small", "medium", "base", "medium_wide", "base_wide"):
        theirs = f"vil_{sizes.get(size, size)}"
        for suffix, image_size in (("", 224), ("_384", 384)):
            pairs[f"vision_longformer_{size}_ape{suffix}"] = f"{theirs}_ape_{image_size}"
            if f"{theirs}_rpb_{image_size}_all_s1" in RELEASED:
                pairs[f"vision_longformer_{size}{suffix}"] = f"{theirs}_rpb_{image_size}_all_s1"
    cells = {
        "full": "full", "linformer": "linformer", "partial_linformer": "linformer_partial", "sra64": "srformer64",
        "sra32": "srformer32", "partial_sra32": "srformer32_partial", "global": "global",
        "partial_global": "global_partial", "performer": "performer", "partial_performer": "performer_partial",
    }  # fmt: skip
    pairs |= {f"msvit_small_1_2_8_1_{ours}": f"small_{theirs}_ape_224" for ours, theirs in cells.items()}
    pairs |= {
        f"msvit_small_{x}_partial_vil": f"vil_small_3stage_{x.replace('_', '-')}_ape_224" for x in ("1_10_1", "2_9_1")
    }
    return pairs


def test_the_micro_model() -> None:
    """Ours, for small images: 0.3 million parameters, a map of 4×4 at the end."""
    model = VisionLongformer(model_config("vision_longformer_micro"), num_classes=10)
    assert sum(p.numel() for p in model.parameters()) == 287242
    assert [info["reduction"] for info in model.feature_info] == [4, 8]
    assert [tuple(grid) for grid in model.config.grids((28, 28))] == [(7, 7), (4, 4)]


def test_the_nano_model() -> None:
    """Ours, for small data sets: 0.8 million parameters, chunks of 4×4 in all three stages."""
    model = VisionLongformer(model_config("vision_longformer_nano"), num_classes=10)
    assert sum(p.numel() for p in model.parameters()) == 756302
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16]
    assert [tuple(grid) for grid in model.config.grids((96, 128))] == [(24, 32), (12, 16), (6, 8)]
    assert [stage.attention for stage in model.config.stages] == [cfg.Longformer(window=4)] * 3


MAPS = {4: (25, 36), 8: (13, 18), 16: (7, 9), 32: (4, 5)}
"""Height and width of the map of each stride, of an image of 97×143."""


@pytest.mark.parametrize("name", PAPER)
def test_a_named_model_builds(name: str) -> None:
    """On the meta device: strides up to 32 (16 if flat), maps of an odd image, as many parameters as released."""
    config = model_config(name)
    with torch.device("meta"):
        model = VisionLongformer(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    reductions = [info["reduction"] for info in model.feature_info]
    assert reductions == {4: [4, 8, 16, 32], 3: [8, 16, 32], 1: [16]}[len(config.stages)]
    assert (model.num_classes, model.num_features) == (1000, config.stages[-1].dim)
    with torch.no_grad():
        tokens, maps = model.eval().forward_intermediates(torch.empty(1, 3, 97, 143, device="meta"))
    for features, stage, reduction in zip(maps, config.stages, reductions, strict=True):
        assert features.shape == (1, stage.dim, *MAPS[reduction])
    height, width = MAPS[reductions[-1]]
    assert tokens.shape == (1, config.stages[-1].global_tokens + height * width, config.stages[-1].dim)
    count = sum(p.numel() for p in model.parameters())
    if name in released_names():
        assert count == RELEASED[released_names()[name]]["n_params"]
    low, high = (5e6, 19e6) if "_tiny" in name and "swin" not in name else (20e6, 130e6)
    assert low < count < high


def partial_models() -> list[tuple[str, str, int]]:
    """Every size, position and size of image; of the swin sizes only the two that were released."""
    combined = itertools.product(DEPTHS, ("relative", "absolute"), (224, 384))
    return [one for one in combined if not one[0].startswith("swin") or one[1:] == ("relative", 224)]


@pytest.mark.parametrize(("size", "position", "img_size"), partial_models())
def test_parameter_counts_with_full_attention_stages(size: str, position: str, img_size: int) -> None:
    """As most checkpoints were released: the last two stages with full attention."""
    deep = {"medium": "medium_deep", "base": "base_deep"}.get(size, size)
    theirs = f"vil_{deep}_{'rpb' if position == 'relative' else 'ape'}_{img_size}"
    with torch.device("meta"):
        model = VisionLongformer(longformer_config(size, position, img_size, partial=True))
    assert sum(p.numel() for p in model.parameters()) == RELEASED[theirs]["n_params"]


def test_most_released_configurations_were_compared() -> None:
    assert len(released_names()) == 12 + 6 + 10 + 2
    assert set(released_names().values()) <= set(RELEASED)


def test_a_released_partial_model_equals_the_named_one() -> None:
    """At 224 the last two stages of a named model see the whole map, so full attention becomes Longformer exactly."""
    source = VisionLongformer(longformer_config("tiny", partial=True), num_classes=10).double().eval()
    for name, parameter in source.named_parameters():
        if ".bias." in name:
            torch.nn.init.normal_(parameter)
    target = adapt_model(source, model_config("vision_longformer_tiny").override(num_classes=10))
    x = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        assert_close(target(x), source(x), 1e-10)
        large = torch.randn(1, 3, 288, 288, dtype=torch.float64)
        assert (target(large) - source(large)).abs().max() > 1e-8


# By name


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("vision_longformer_smal", "'vision_longformer_small'"),
        ("vision_longformer_base_ap", "'vision_longformer_base_ape'"),
        ("msvit_tiny_1_10_1_linforme", "'msvit_tiny_1_10_1_linformer'"),
        ("evit_tiny", "'evit_tiny_patch16'"),
    ],
)
def test_unknown_models_suggest_near_ones(name: str, suggestion: str) -> None:
    for function in (model_config, create_model):
        with pytest.raises(ValueError, match=f"unknown model '{name}'; did you mean .*{suggestion}"):
            function(name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: longformer_config("smal"), "unknown size 'smal'; did you mean 'small'"),
        (
            lambda: longformer_config("small", img_size=256),
            r"image sizes \[224, 384\], not 256; override img_size instead",
        ),
        (lambda: comparison_config("small", "1_2_8", "vil"), "unknown layout '1_2_8'; did you mean '1_2_8_1'"),
        (
            lambda: comparison_config("tiny", "1_2_8_1", "linfomer"),
            "unknown mechanism 'linfomer'; did you mean 'linformer'",
        ),
        (lambda: comparison_config("base", "1_2_8_1", "vil"), "unknown size 'base'; choose from small, tiny"),
        (lambda: flat_config("base"), "unknown size 'base'; choose from small, tiny"),
    ],
)
def test_unknown_cells_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_timm_makes_a_model_with_options() -> None:
    model = timm.create_model(
        "vision_longformer_tiny", pretrained=False, num_classes=10, img_size=128, in_chans=1, drop_path_rate=0.2
    )
    assert isinstance(model, VisionLongformer)
    wanted = {"num_classes": 10, "img_size": 128, "in_chans": 1, "drop_path_rate": 0.2}
    assert model.config == model_config("vision_longformer_tiny").override(**wanted)
    assert model.pretrained_cfg["classifier"] == "head"
    assert model.eval()(torch.zeros(1, 1, 64, 96)).shape == (1, 10)
    with pytest.raises(ValueError, match="unknown model option 'num_clases'; did you mean 'num_classes'"):
        create_model("vision_longformer_tiny", num_clases=3)


@pytest.mark.parametrize("name", ["vision_longformer_tiny", "msvit_tiny_1_10_1_sra32", "evit_tiny_patch16"])
def test_features_only(name: str) -> None:
    """timm's feature extractor gives the maps of ``forward_intermediates``, of all stages or of those asked for."""
    features = timm.create_model(name, features_only=True, img_size=64).eval()
    whole = timm.create_model(name, img_size=64).eval()
    whole.load_state_dict({**whole.state_dict(), **features.model.state_dict()})
    x = torch.randn(1, 3, 97, 143)
    with torch.no_grad():
        maps, expected = features(x), whole.forward_intermediates(x, intermediates_only=True)
    assert features.feature_info.reduction() == [info["reduction"] for info in whole.feature_info]
    for got, wanted, stride in zip(maps, expected, features.feature_info.reduction(), strict=True):
        assert got.shape[2:] == (-(-97 // stride), -(-143 // stride))
        assert_close(got, wanted, 1e-5)
    last = timm.create_model(name, features_only=True, img_size=64, out_indices=(-1,))
    assert last.feature_info.reduction() == [16 if name.startswith("evit") else 32]
