"""The named models: one short declaration each, and every cell of the paper's comparison of mechanisms.

- ``vision_longformer_*``: Longformer attention in every stage, so that cost stays linear at any size. At their own size
  the last two stages equal full attention, as in the paper. Relative bias, or absolute position (``_ape``).
- ``vision_longformer_micro`` and ``_nano``: ours, not the paper's, for small images, small data sets and CPUs.
- ``evit_*_patch16``: the flat E-ViT of the paper.
- ``msvit_SIZE_LAYOUT_MECHANISM``: the paper's comparison, with absolute position.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import check_choice, unknown_name
from . import config as cfg
from .config import ModelConfig, StageConfig

WIDTHS = {
    "tiny": ((48, 1), (96, 3), (192, 3), (384, 6)),
    "small": ((96, 3), (192, 3), (384, 6), (768, 12)),
    "medium_wide": ((192, 3), (384, 6), (512, 8), (768, 12)),
    "base_wide": ((192, 3), (384, 6), (768, 12), (1024, 16)),
    "swin": ((96, 3), (192, 6), (384, 12), (768, 24)),
}
"""(dim, heads) of the four stages."""

DEPTHS = {
    "tiny": ("tiny", (1, 1, 9, 1)),
    "small": ("small", (1, 2, 8, 1)),
    "medium": ("small", (1, 4, 16, 1)),
    "base": ("small", (1, 8, 24, 1)),
    "medium_wide": ("medium_wide", (1, 2, 8, 1)),
    "base_wide": ("base_wide", (1, 2, 8, 1)),
    "swin_tiny": ("swin", (2, 2, 6, 2)),
    "swin_small": ("swin", (2, 2, 18, 2)),
}
"""Widths and number of blocks per stage of the named sizes."""

WINDOWS = {224: (7, 7, 7, 7), 384: (6, 8, 12, 12)}
"""Side w of a chunk per stage, by image size; the paper states windows of 2w + 1: 15, or 13, 17, 25, 25."""

LAYOUTS = ("1_10_1", "2_9_1", "1_9_2", "2_8_2", "1_1_9_1", "1_2_8_1", "1_1_8_2")
"""Blocks per stage in the paper's comparison."""

COMPARED = (
    "full",
    "vil",
    "partial_vil",
    "linformer",
    "partial_linformer",
    "sra64",
    "sra32",
    "partial_sra32",
    "global",
    "partial_global",
    "performer",
    "partial_performer",
)
"""Mechanisms in the paper's comparison; ``partial_`` has full attention in the last two stages."""


def longformer_config(
    size: str, position: str = "relative", img_size: int = 224, *, partial: bool = False
) -> ModelConfig:
    """A Vision Longformer; ``partial`` has full attention in the last two stages, as the released checkpoints do."""
    check_choice("size", size, DEPTHS)
    widths, depths = DEPTHS[size]
    if img_size not in WINDOWS:
        raise ValueError(
            f"windows are stated for image sizes {sorted(WINDOWS)}, not {img_size}; override img_size instead"
        )
    attention: list[cfg.AttentionConfig] = [cfg.Longformer(window=w) for w in WINDOWS[img_size]]
    if partial:
        attention[2:] = [cfg.Full(), cfg.Full()]
    return ModelConfig(_stages(widths, depths, attention, (1, 1, 1, 0), position), img_size=(img_size, img_size))


def comparison_config(size: str, layout: str, mechanism: str, position: str = "absolute") -> ModelConfig:
    """A cell of the paper's comparison: ``tiny`` or ``small``, blocks per stage as in ``1_2_8_1``, a mechanism."""
    check_choice("size", size, ("tiny", "small"))
    check_choice("layout", layout, LAYOUTS)
    check_choice("mechanism", mechanism, COMPARED)
    depths = tuple(map(int, layout.split("_")))
    partial = mechanism.startswith("partial_")
    name = mechanism.removeprefix("partial_")
    attention = [_mechanism(name, stage) for stage in range(4)][-len(depths) :]
    if partial:
        attention[-2:] = [cfg.Full(), cfg.Full()]
    tokens = ((256, 256, 64, 16) if name == "global" else (1, 1, 1, 0))[-len(depths) :]
    return ModelConfig(_stages(size, depths, attention, tokens, position))


def flat_config(size: str, position: str = "absolute") -> ModelConfig:
    """The flat E-ViT(full×12/16)."""
    check_choice("size", size, ("tiny", "small"))
    dim, heads = {"tiny": (192, 3), "small": (384, 6)}[size]
    return ModelConfig((StageConfig(dim, 12, heads, 16, cfg.Full(), 1, position),))


def micro_config() -> ModelConfig:
    """A small Vision Longformer of two stages, with strides 4 and 8, for images of about 32×32."""
    stages = tuple(
        StageConfig(dim, 1, dim // 32, patch, cfg.Longformer(window=2), 1, "absolute")
        for dim, patch in ((64, 4), (128, 2))
    )
    return ModelConfig(stages, img_size=(32, 32), num_classes=10, norm_embed=False)


def nano_config() -> ModelConfig:
    """A small Vision Longformer of three stages, with strides 4, 8 and 16, for images of 64×64 to about 160×160."""
    stages = tuple(
        StageConfig(dim, depth, dim // 32, patch, cfg.Longformer(window=4), 1)
        for dim, depth, patch in ((32, 1, 4), (64, 2, 2), (128, 3, 2))
    )
    return ModelConfig(stages, img_size=(64, 64), num_classes=10)


def _mechanism(name: str, stage: int) -> cfg.AttentionConfig:
    """The attention of stage 0..3 of a four-stage model; three-stage models take the last three."""
    if name == "vil":
        return cfg.Longformer()
    if name == "linformer":
        return cfg.Linformer(256)
    if name == "performer":
        return cfg.Performer(256)
    if name == "global":
        return cfg.GlobalMemory()
    if name == "sra64":
        return cfg.SpatialReduction((16, 8, 4, 2)[stage])
    if name == "sra32" and stage < 3:
        return cfg.SpatialReduction((8, 4, 2)[stage])
    return cfg.Full()


def _stages(
    widths: str, depths: tuple[int, ...], attention: list[cfg.AttentionConfig], tokens: tuple[int, ...], position: str
) -> tuple[StageConfig, ...]:
    """Stages of patch 2 after a first one of patch 4, or 8 where there are three."""
    first = {4: 4, 3: 8}[len(depths)]
    stages = []
    for index, (dim, heads) in enumerate(WIDTHS[widths][-len(depths) :]):
        patch = 2 if index else first
        stages.append(StageConfig(dim, depths[index], heads, patch, attention[index], tokens[index], position))
    return tuple(stages)


def _named() -> dict[str, ModelConfig]:
    models = {}
    for size in DEPTHS:
        swin = size.startswith("swin")
        for suffix, position in (("", "relative"),) if swin else (("", "relative"), ("_ape", "absolute")):
            models[f"vision_longformer_{size}{suffix}"] = longformer_config(size, position)
            if not swin:
                models[f"vision_longformer_{size}{suffix}_384"] = longformer_config(size, position, 384)
    models["vision_longformer_micro"] = micro_config()
    models["vision_longformer_nano"] = nano_config()
    for size in ("tiny", "small"):
        models[f"evit_{size}_patch16"] = flat_config(size)
        for layout in LAYOUTS:
            for mechanism in COMPARED:
                models[f"msvit_{size}_{layout}_{mechanism}"] = comparison_config(size, layout, mechanism)
    return models


MODELS: dict[str, ModelConfig] = _named()


SHIPPED = Path(__file__).parents[1] / "assets" / "weights"
"""The folder of the weights that come with the package."""


def model_config(name: str) -> ModelConfig:
    """The configuration of a named model; an unknown name is refused with the nearest ones."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]


# Models without a name, by those that have one


def nearest_model(config: ModelConfig) -> str:
    """The named model that needs the fewest changes to become ``config``, in its stages first of all."""

    def changes(name: str) -> tuple[int, int]:
        pairs = zip_longest(MODELS[name].stages, config.stages)
        return sum(named != own for named, own in pairs), len(model_changes(name, config))

    return min(MODELS, key=changes)


def model_changes(name: str, config: ModelConfig) -> dict[str, Any]:
    """The fields in which ``config`` differs from a named model, as JSON data, but for the number of classes."""
    named = {**MODELS[name].to_dict(), "num_classes": config.num_classes}
    return {field: value for field, value in config.to_dict().items() if value != named[field]}


SET_BY_RUNS = ("img_size", "drop_path_rate", "neighbours")
"""Fields that make no other model."""


def model_options(name: str, config: ModelConfig) -> dict[str, Any]:
    """The changes of a named model that make another one of it."""
    return {field: value for field, value in model_changes(name, config).items() if field not in SET_BY_RUNS}


def describe_model(name: str, config: ModelConfig) -> str:
    """``vision_longformer_tiny, changed: stages (blocks 1, 1, 2, 1; channels 48, 96, 192, 384)``."""
    changes = dict.fromkeys(model_options(name, config), "")
    if "stages" in changes:
        depths, dims = (", ".join(str(getattr(stage, key)) for stage in config.stages) for key in ("depth", "dim"))
        changes["stages"] = f" (blocks {depths}; channels {dims})"
    return name + (", changed: " if changes else "") + ", ".join(field + more for field, more in changes.items())
