"""The ``config.json`` that timm reads: a registered model, what to change of it, and how images are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ..config import ModelConfig
from ..timm_models import data_config
from ..zoo import MODELS


def timm_config(config: ModelConfig, info: Mapping[str, Any]) -> dict[str, Any]:
    """For ``timm.create_model("local-dir:FOLDER", pretrained=True)``, once ``vision_longformer`` is imported.

    ``info`` is that of the checkpoint; without preprocessing in it, images are prepared as for ImageNet.
    """
    name = nearest_model(config)
    prepared = dict(info.get("preprocessing", {}))
    classes = prepared.pop("classes", None)
    size = prepared.pop("size", config.img_size)
    pretrained = {**data_config(config), **prepared, "input_size": (config.in_chans, *size)}
    if config.in_chans != 3:  # what timm knows to fit to other channels are weights for three
        del pretrained["first_conv"]
    return {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.stages[-1].dim,
        "model_args": model_args(name, config),
        **({} if classes is None else {"label_names": classes}),
        "pretrained_cfg": pretrained,
    }


def nearest_model(config: ModelConfig) -> str:
    """The named model that needs the fewest changes to become ``config``, in its stages first of all."""

    def changes(name: str) -> tuple[int, int]:
        pairs = zip_longest(MODELS[name].stages, config.stages)
        return sum(named != own for named, own in pairs), len(model_args(name, config))

    return min(MODELS, key=changes)


def model_args(name: str, config: ModelConfig) -> dict[str, Any]:
    """The fields in which ``config`` differs from a named model, as JSON data; timm has its own for classes."""
    named = {**MODELS[name].to_dict(), "num_classes": config.num_classes}
    return {field: value for field, value in config.to_dict().items() if value != named[field]}
