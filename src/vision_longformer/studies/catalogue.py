"""The eight studies of the paper's comparisons, each a declaration, and the small models that they compare.

At small scale the models have the shape of the paper's, with a first map of 16×16 and windows of 6×6 tokens (chunks of
2×2): large enough that the mechanisms differ, small enough for minutes on one processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..classification.recipe import ABSOLUTE_POSITION, MECHANISMS
from ..costs.paper_tables import MECHANISM_NAMES
from ..errors import unknown_name
from ..models.zoo import model_config
from .cifar10 import CIFAR10
from .declaration import Row, Study, load_study

Settings = dict[str, Any]

# Small models

FULL: Settings = {"kind": "full"}
LOCAL: Settings = {"kind": "longformer", "window": 2}

SMALL_CLASSIFIER: Settings = {
    "recipe": "cifar10",
    "data": CIFAR10,
    "num_classes": 10,
    "steps": 1250,
    "warmup_steps": 100,
    "eval_every": 1000,
    "eval_batch_size": 250,
    "log_every": 25,
    "checkpoint_minutes": 1,
}
"""1,250 steps of 64 images, 1.6 epochs of CIFAR-10, evaluated at the end."""

DIMS = (32, 64, 128)
DEPTHS = (1, 2, 1)
"""Channels and blocks of the stages with strides 2, 4 and 8, maps of 16×16, 8×8 and 4×4; all blocks cost about the
same."""


def small_model(
    attention: Sequence[Settings] = (LOCAL, LOCAL, LOCAL),
    *,
    dims: Sequence[int] = DIMS,
    depths: Sequence[int] = DEPTHS,
    first_patch: int = 2,
    tokens: Sequence[int] = (1, 1, 1),
    position: str = "absolute",
    **options: Any,
) -> Settings:
    """Settings of a small model: heads of 32 channels at most, all patches but the first 2."""
    stages = [
        {
            "dim": dim,
            "depth": depth,
            "heads": max(1, dim // 32),
            "patch": 2 if index else first_patch,
            "attention": attention[index],
            "global_tokens": tokens[index],
            "position": position,
        }
        for index, (dim, depth) in enumerate(zip(dims, depths, strict=True))
    ]
    return {"model": "vision_longformer_micro", "model_options": {"norm_embed": True, "stages": stages, **options}}


# Studies of classifiers


def layer_norm_position() -> Study:
    """Table 11. Its 'DeiT' has neither; the paper has no row with 2-D position alone."""

    def row(name: str, paper: float | None, norm: bool, position: str) -> Row:
        options: Settings = {"norm_embed": norm, "global_pool": "token"}
        small = small_model([FULL], dims=[32], depths=[4], tokens=[1], position=position, **options)
        flat = {"dim": 384, "depth": 12, "heads": 6, "patch": 16, "attention": FULL, "position": position}
        full = {"model": "evit_small_patch16", "model_options": {"stages": [flat], **options}}
        return Row(name, paper, {"small": small, "imagenet": full})

    return Study(
        name="layer_norm_position",
        about="LayerNorm after the patch embedding and 2-D position, in a flat E-ViT with a class token",
        task="classification",
        table="Table 11 (tab:layernorm_2dposition), top-1 on ImageNet-1K, small, CLS",
        baseline="neither",
        scales={"small": SMALL_CLASSIFIER, "imagenet": {"recipe": "imagenet1k_small"}},
        rows=(
            row("neither", 79.8, False, "absolute_1d"),
            row("2-D position", None, False, "absolute"),
            row("LayerNorm", 80.33, True, "absolute_1d"),
            row("LayerNorm, 2-D position", 80.44, True, "absolute"),
        ),
    )


def flat_multiscale() -> Study:
    """Table 2, ViL with absolute position; two stages are ours."""
    two_stages = [
        {"dim": 384, "depth": 11, "heads": 6, "patch": 16, "attention": FULL, "position": "absolute"},
        {"dim": 768, "depth": 1, "heads": 12, "patch": 2, "attention": FULL, "position": "absolute"},
    ]
    flat = small_model([FULL], dims=[64], depths=[4], first_patch=4, tokens=[1])
    two = small_model([LOCAL, FULL], dims=[64, 128], depths=[3, 1], first_patch=4)
    three = small_model()
    four = small_model([LOCAL] * 4, dims=[16, *DIMS], depths=[1, 1, 1, 1], first_patch=1, tokens=[1] * 4)
    base = "msvit_small"
    return Study(
        name="flat_multiscale",
        about="One, two, three and four stages at about equal cost: each adds a finer or a coarser map",
        task="classification",
        table="Table 2 (tab:flatvsmultiscale), top-1 on ImageNet-1K, small, absolute position, mean over tokens",
        baseline="flat",
        scales={"small": SMALL_CLASSIFIER, "imagenet": {"recipe": "imagenet1k_small"}},
        rows=(
            Row("flat", 80.7, {"small": flat, "imagenet": {"model": "evit_small_patch16"}}),
            Row("two stages", None, {"small": two, "imagenet": {"model_options": {"stages": two_stages}}}),
            Row("three stages", 81.8, {"small": three, "imagenet": {"model": f"{base}_2_9_1_partial_vil"}}),
            Row("four stages", 82.0, {"small": four, "imagenet": {"model": f"{base}_1_2_8_1_partial_vil"}}),
        ),
    )


def pooling() -> Study:
    """Table 12."""

    def row(name: str, paper: float, blocks: int, pool: str) -> Row:
        layout = "1_2_8_1" if blocks == 1 else "1_1_8_2"
        small = small_model(depths=[1, 3 - blocks, blocks], global_pool=pool)
        model = f"msvit_small_{layout}_partial_vil"
        options: Settings = {"global_pool": pool}
        if pool == "token":
            options["stages"] = _with_last_token(model)
        return Row(name, paper, {"small": small, "imagenet": {"model": model, "model_options": options}})

    return Study(
        name="pooling",
        about="The class token or the mean over tokens, with one and with two blocks in the last stage",
        task="classification",
        table="Table 12 (tab:cls_avepool), top-1 on ImageNet-1K, small, absolute position",
        baseline="mean, 1 block",
        scales={"small": SMALL_CLASSIFIER, "imagenet": {"recipe": "imagenet1k_small"}},
        rows=(
            row("class token, 1 block", 81.65, 1, "token"),
            row("mean, 1 block", 81.99, 1, "avg"),
            row("class token, 2 blocks", 82.12, 2, "token"),
            row("mean, 2 blocks", 82.08, 2, "avg"),
        ),
    )


def _with_last_token(model: str) -> list[Settings]:
    """The stages of a named model with a class token in the last."""
    stages: list[Settings] = model_config(model).to_dict()["stages"]
    return [*stages[:-1], {**stages[-1], "global_tokens": 1}]


def _repeated(attention: Settings) -> list[Settings]:
    return [attention] * len(DIMS)


def _reduced(*ratios: int) -> list[Settings]:
    return [{"kind": "spatial_reduction", "ratio": ratio} if ratio > 1 else FULL for ratio in ratios]


SMALL_MECHANISMS: dict[str, list[Settings]] = {
    "full": _repeated(FULL),
    "linformer": _repeated({"kind": "linformer", "features": 32}),
    "sra64": _reduced(8, 4, 2),
    "sra32": _reduced(4, 2, 1),
    "global": _repeated({"kind": "global_memory"}),
    "performer": _repeated({"kind": "performer", "features": 64}),
}
"""Attention by stage, in the paper's proportions: the keys of SRA/32 are as many as the last map's."""

MEMORY = (32, 16, 4)
"""Global tokens by stage of global memory."""


def mechanisms() -> Study:
    """Tables 3 and 13. The paper's ViL equals full attention in its last two stages, ours in its last one."""

    def row(mechanism: str) -> Row:
        _, _, paper = MECHANISMS[mechanism]
        name = mechanism.removeprefix("partial_")
        attention = SMALL_MECHANISMS[name]
        tokens = MEMORY if name == "global" else (1, 1, 1)
        if name != mechanism:
            attention, tokens = [attention[0], FULL, FULL], (tokens[0], 1, 1)
        full = {"recipe": f"imagenet1k_small_{mechanism}"}
        return Row(
            MECHANISM_NAMES[mechanism], paper, {"small": small_model(attention, tokens=tokens), "imagenet": full}
        )

    model = {"model": "msvit_small_1_2_8_1_partial_vil"}
    return Study(
        name="mechanisms",
        about="Attention mechanisms in all stages, or in the first stages and then full attention",
        task="classification",
        table="Tables 3 and 13 (tab:eff_attns, tab:attention_overall), top-1 on ImageNet-1K, small 1-2-8-1",
        baseline=MECHANISM_NAMES["partial_vil"],
        scales={"small": SMALL_CLASSIFIER, "imagenet": {"recipe": "imagenet1k_small"}},
        rows=(
            Row(MECHANISM_NAMES["partial_vil"], 81.99, {"small": small_model(), "imagenet": model}),
            *map(row, MECHANISMS),
        ),
    )


def random_shift() -> Study:
    """Figure 10, of which the paper prints no numbers."""

    def row(name: str, **shift: Any) -> Row:
        return Row(name, None, {"small": {**small_model(), **shift}, "imagenet": shift})

    def switch(part: float) -> Row:
        return row(f"random, all from {part:.0%} on", neighbours="random", shift_until=part)

    return Study(
        name="random_shift",
        about="What local attention sees in training: all neighbours, a random one and all from some point on, or none",
        task="classification",
        table="Figure 10 (fig:random_shift_top1), without printed values",
        baseline="all",
        scales={"small": SMALL_CLASSIFIER, "imagenet": {"recipe": "imagenet1k_small"}},
        rows=(row("all"), *map(switch, (0.0, 0.25, 0.5, 0.75, 1.0)), row("none but itself", neighbours="self")),
    )


def relative_absolute() -> Study:
    """Table 4, and what the two do at sizes that they were not trained for."""

    def row(name: str, paper: float, position: str, recipe: str) -> Row:
        return Row(name, paper, {"small": small_model(position=position), "imagenet": {"recipe": recipe}})

    return Study(
        name="relative_absolute",
        about="Relative bias and absolute position, at the size of training and at larger ones",
        task="classification",
        table="Table 4 (tab:overall_comp_cls), top-1 on ImageNet-1K, small",
        baseline="absolute",
        scales={
            "small": SMALL_CLASSIFIER,
            "imagenet": {"recipe": "imagenet1k_small", "image_size": 224},
        },
        rows=(
            row("absolute", ABSOLUTE_POSITION["small"], "absolute", "imagenet1k_small_ape"),
            row("relative", 82.4, "relative", "imagenet1k_small"),
        ),
        sizes=(1.5, 2),
    )


# Studies of detectors

SMALL_DETECTOR: Settings = {
    "recipe": "quickstart",
    "data": "garments:160",
    "model": "vision_longformer_nano",
    "detector_options": {
        "levels": [1, 2, 3],
        "channels": 32,
        "min_size": [160],
        "max_size": 160,
        "anchor_scale": 3,
        "box_width": 128,
        "mask_channels": 32,
        "mask_layers": 2,
        "proposals": 128,
        "samples": 64,
    },
    "steps": 1500,
    "warmup_steps": 100,
    "eval_every": 1000,
    "log_every": 25,
    "workers": 0,
    "checkpoint_minutes": 1,
}
"""1,500 steps of 4 images from random weights; the first map has 40×40 tokens, and chunks are 4×4 by default."""


def _backbone(model: str, window: int, tokens: int = 1, rule: str = "chunk") -> Settings:
    """A named model with other windows, global tokens (also in a stage that has none) or another rule."""
    stages: list[Settings] = model_config(model).to_dict()["stages"]
    attention = {"kind": "longformer", "window": window, "rule": rule}
    changed = [{**stage, "attention": attention, "global_tokens": tokens} for stage in stages]
    return {"model": model, "model_options": {"stages": changed}}


def _detectors(small_window: int, window: int, tokens: int = 1, rule: str = "chunk") -> dict[str, Settings]:
    """The settings of a row by scale; the paper's windows are 2w + 1 wide."""
    return {
        "small": _backbone("vision_longformer_nano", small_window, tokens, rule),
        "coco": _backbone("vision_longformer_small", window, tokens, rule),
    }


DETECTOR_SCALES = {"small": SMALL_DETECTOR, "coco": {"recipe": "mask_rcnn_small_1x"}}


def window_global() -> Study:
    """Figure 3, of which the paper prints no numbers: windows 9, 15 and 21, and 0, 1, 2 and 4 global tokens."""
    return Study(
        name="window_global",
        about="Windows and numbers of global tokens in Mask R-CNN",
        task="detection",
        table="Figure 3 (fig:vil_winsize_nglo), without printed values",
        baseline="default window, 1 global token",
        scales=DETECTOR_SCALES,
        rows=(
            Row("smaller window", None, _detectors(2, 4)),
            Row("default window, 1 global token", None, _detectors(4, 7)),
            Row("larger window", None, _detectors(8, 10)),
            Row("no global token", None, _detectors(4, 7, tokens=0)),
            Row("2 global tokens", None, _detectors(4, 7, tokens=2)),
            Row("4 global tokens", None, _detectors(4, 7, tokens=4)),
        ),
    )


def rules() -> Study:
    """Figure 8, of which the paper prints no numbers."""
    return Study(
        name="rules",
        about="Which keys a window admits in Mask R-CNN: whole chunks, the exact window, or chunks of a cyclic map",
        task="detection",
        table="Figure 8 (fig:vil_exact), without printed values",
        baseline="chunk",
        scales=DETECTOR_SCALES,
        rows=tuple(Row(rule, None, _detectors(4, 7, rule=rule)) for rule in ("chunk", "exact", "cyclic")),
    )


_DECLARED = (
    *(layer_norm_position, flat_multiscale, pooling, mechanisms, random_shift, relative_absolute),
    *(window_global, rules),
)

STUDY_NAMES = tuple(declare.__name__ for declare in _DECLARED)
"""In the order in which they run."""


def find_study(name: str) -> Study:
    """A shipped study by name, or one's own by its .yaml file."""
    if name.endswith((".yaml", ".yml")):
        study = load_study(Path(name))
        if study.name in STUDY_NAMES:
            raise ValueError(
                f"{name} has the name of a study that comes with the package; name it otherwise, as my_{study.name}"
            )
        return study
    if name not in STUDY_NAMES:
        raise unknown_name("study", name, STUDY_NAMES)
    return _DECLARED[STUDY_NAMES.index(name)]()
