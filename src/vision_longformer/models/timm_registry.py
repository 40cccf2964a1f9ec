"""Every model of the zoo in timm's registry: ``timm.create_model("vision_longformer_small", img_size=512)``.

``import vision_longformer`` has this module imported right after timm, be it earlier or later, perhaps while one of our
own modules is at its first line: at import, it needs nothing but timm and the zoo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import PretrainedCfg, build_model_with_cfg, generate_default_cfgs, register_model

from .config import ModelConfig
from .zoo import MODELS, SHIPPED, model_config

if TYPE_CHECKING:
    from torch import Tensor

    from .vision_longformer import VisionLongformer

__all__: list[str] = []  # timm adds the models' names

FIRST_CONV, CLASSIFIER = "stages.0.patch_embed.proj", "head"
FITTED_BY_TIMM = (f"{FIRST_CONV}.weight", f"{CLASSIFIER}.")

PRETRAINED: dict[str, dict[str, Any]] = {
    "vision_longformer_micro.cifar10": {
        "file": str(SHIPPED / "cifar10_micro.safetensors"),
        "crop_pct": 1.0,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    },
    "vision_longformer_nano.cifar10": {"file": str(SHIPPED / "cifar10_nano.safetensors"), "crop_pct": 1.0},
}
"""What ``pretrained=True`` loads, and how images are prepared for it."""


def create_model(name: str, **options: Any) -> Any:
    """A model of the zoo by name, as timm would make it; an unknown name is refused with the nearest ones."""
    model_config(name)
    return timm.create_model(name, **options)


def default_crop_pct(img_size: tuple[int, int]) -> float:
    """Part of the resized image's shorter side that the centre crop keeps; larger images need less of a border."""
    return 0.875 if min(img_size) <= 224 else 0.922


def data_config(config: ModelConfig) -> dict[str, Any]:
    """What timm's loader of weights and its transforms need to know of a model."""
    return {
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, *config.img_size),
        "crop_pct": default_crop_pct(config.img_size),
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": FIRST_CONV,
        "classifier": CLASSIFIER,
    }


def checkpoint_filter_fn(state: dict[str, Tensor], model: VisionLongformer) -> dict[str, Tensor]:
    """Weights of another image size or window, their tables resized to the model's.

    The first convolution and the head stay as they are, since timm itself fits them to other channels and classes.
    """
    from .adapt import adapt_state

    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(FITTED_BY_TIMM)}
    given = {name: tensor for name, tensor in state.items() if name.startswith(FITTED_BY_TIMM)}
    others = {name: tensor for name, tensor in state.items() if name not in given}
    return {**adapt_state({**own, **others}, model)[0], **given}


def _check_output_stride(name: str, wanted: int | None, patches: Sequence[int]) -> None:
    """Decoders such as DeepLabV3's ask for maps that stay large, which dilated convolutions give."""
    strides = list(accumulate(patches, mul))
    if wanted not in (None, strides[-1]):
        raise ValueError(
            f"output_stride is {wanted}, but the stages of {name} have strides {', '.join(map(str, strides))}: there "
            f"are no convolutions to dilate; leave it at {strides[-1]} and take a decoder that uses all maps, such as "
            "Unet, FPN, UPerNet or Segformer"
        )


def _entry_point(name: str, config: ModelConfig) -> Callable[..., Any]:
    def create(pretrained: bool = False, **options: Any) -> Any:
        from .vision_longformer import VisionLongformer

        stages = config.override(stages=options.get("stages", config.stages)).stages
        _check_output_stride(name, options.pop("output_stride", None), [stage.patch for stage in stages])
        out_indices = options.pop("out_indices", tuple(range(len(stages))))
        return build_model_with_cfg(
            VisionLongformer,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            config=config,
            **options,
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name} of the zoo; options override fields of its ModelConfig."
    return create


def _default_cfgs() -> dict[str, dict[str, Any] | PretrainedCfg]:
    untrained = {name: data_config(config) for name, config in MODELS.items()}
    trained = {name: {**untrained.pop(name.partition(".")[0]), **changes} for name, changes in PRETRAINED.items()}
    return {**untrained, **trained}


default_cfgs = generate_default_cfgs(_default_cfgs())

for _name, _config in MODELS.items():
    register_model(_entry_point(_name, _config))
