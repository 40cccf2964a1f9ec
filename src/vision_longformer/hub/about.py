"""What a checkpoint says about its model, as a model card and ``config.json`` want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..analysis import count_parameters, paper_macs
from ..checkpoint.container import DETECTOR, Description
from ..config import ModelConfig
from .timm_config import timm_config


@dataclass(frozen=True)
class About:
    """A model in words: ``task`` as the hub calls it, ``facts`` as rows of a table, ``use`` as code by language."""

    task: str
    summary: str
    facts: dict[str, str]
    labels: tuple[str, ...]
    use: dict[str, str]
    config: dict[str, Any]


def about(description: Description) -> About:
    """The model of a classifier's or a detector's file."""
    of = _about_detector if description.format == DETECTOR else _about_classifier
    return of(description.config, description.info)


def _about_classifier(data: Mapping[str, Any], info: Mapping[str, Any]) -> About:
    config = ModelConfig.from_dict(data)
    plain = timm_config(config, info)
    prepared = plain["pretrained_cfg"]
    changed = ", ".join(plain["model_args"])
    facts = {
        "architecture": plain["architecture"] + (f", with its own {changed}" if changed else ""),
        "parameters": f"{count_parameters(config).trainable / 1e6:.2f} M",
        f"multiply-accumulates of an image of {_by(config.img_size)}": f"{paper_macs(config).total / 1e6:,.1f} M",
        "input": f"{config.in_chans} × {_by(prepared['input_size'][1:])}",
        "mean, standard deviation": f"{_numbers(prepared['mean'])}; {_numbers(prepared['std'])}",
        "resizing": f"{prepared['interpolation']}, then the centre {prepared['crop_pct']:.1%} of the shorter side",
    }
    use = {
        "bash": "vil predict FOLDER IMAGE\nvil evaluate FOLDER --data DATA",
        "python": (
            "import timm\n"
            "from vision_longformer.hub import from_pretrained  # makes timm know our models, too\n\n"
            'model = from_pretrained("FOLDER")\n'
            'same = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or "hf-hub:OWNER/NAME"'
        ),
    }
    if not config.num_classes:
        del use["bash"]
        return About("image-feature-extraction", "A Vision Longformer without a head.", facts, (), use, plain)
    summary = f"A Vision Longformer that tells {config.num_classes} classes of images apart."
    labels = tuple(plain.get("label_names", ()))
    return About("image-classification", summary, facts, labels, use, plain)


def _about_detector(data: Mapping[str, Any], info: Mapping[str, Any]) -> About:
    from ..detection import DetectorConfig, build_detector

    config = DetectorConfig.from_dict(data)
    labels = tuple(str(category["name"]) for category in info.get("categories", ()))
    name, finds = {"retinanet": ("RetinaNet", "boxes"), "mask_rcnn": ("Mask R-CNN", "boxes and masks")}[config.kind]
    parameters = sum(parameter.numel() for parameter in build_detector(config).parameters())
    facts = {
        "backbone": config.backbone,
        "parameters": f"{parameters / 1e6:.2f} M",
        "input": f"shorter side {config.min_size[-1]}, longer side at most {config.max_size}",
    }
    use = {
        "bash": "vil detect predict FOLDER IMAGE",
        "python": 'from vision_longformer.hub import from_pretrained\n\nmodel = from_pretrained("FOLDER")',
    }
    summary = f"A {name} on a Vision Longformer that finds {config.num_classes} kinds of objects, with {finds}."
    plain = {"detector": config.to_dict(), "label_names": labels}
    return About("object-detection", summary, facts, labels, use, plain)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
