"""``vil convert`` and ``vil detect convert``."""

from __future__ import annotations

from typing import Any

from .output import check_free, log_lines, millions, print_line, size_text
from .parser import Size


def convert(
    released: str,
    converted: str,
    *,
    arch: str,
    attn_type: str = "longformerhand",
    img_size: Size = (224, 224),
    to: str | None = None,
    overwrite: bool = False,
    num_classes: int | None = None,
    sharew: bool | None = None,
    share_kv: bool | None = None,
    norm_embed: bool | None = None,
    avg_pool: bool | None = None,
    sw_exact: int | None = None,
    mode: int | None = None,
    only_glo: bool | None = None,
    qkv_bias: bool | None = None,
) -> None:
    """Convert a checkpoint of the authors' release to a .safetensors file with weights and configuration.

    The options after --overwrite are the release's own, for checkpoints that were not trained with its defaults.

    Args:
        released: the .pth file.
        converted: the .safetensors file to write.
        arch: the architecture string that the checkpoint was trained with, such as 'l1,h3,d96,n1,s1,g1,p4,f7,a0_…'.
        attn_type: full, longformerhand, longformerauto, linformer, srformer or performer.
        img_size: image size that the checkpoint was trained with; 224 by default.
        to: a model from 'vil models' to convert the weights for; position tables are resized.
        overwrite: replace an existing file.
        num_classes: number of classes; as in the file by default.
        sharew: share weights between global and local tokens.
        share_kv: share the Linformer projection of keys and values.
        norm_embed: LayerNorm after the patch embedding.
        avg_pool: classify the average of the tokens instead of the first one.
        sw_exact: window rule; 0: chunk, 1: exact, -1: cyclic.
        mode: 0: attend to all neighbouring chunks, -1: to the own chunk only, above 0: random shift in training.
        only_glo: only global memory, no local attention.
        qkv_bias: a bias in the projection to queries, keys and values.
    """
    from .. import adapt_model, load_release, model_config, save

    options: dict[str, Any] = {
        "num_classes": num_classes,
        "sharew": sharew,
        "share_kv": share_kv,
        "norm_embed": norm_embed,
        "avg_pool": avg_pool,
        "sw_exact": sw_exact,
        "mode": mode,
        "only_glo": only_glo,
        "qkv_bias": qkv_bias,
    }
    check_free(converted, overwrite)
    given = {name: value for name, value in options.items() if value is not None}
    target = None if to is None else model_config(to)
    model = load_release(released, arch=arch, attn_type=attn_type, img_size=img_size, **given)
    if target is not None:
        same = ("num_classes", "in_chans", "global_pool")
        target = target.override(**{name: getattr(model.config, name) for name in same})
        with log_lines():
            model = adapt_model(model, target)
    path = save(model, converted, overwrite=overwrite)
    count = sum(parameter.numel() for parameter in model.parameters())
    print_line(f"wrote {path}: {millions(count)} M parameters, for images of {size_text(model.config.img_size)}")


def detect_convert(
    released: str, converted: str, *, model: str, detector: str = "mask_rcnn", overwrite: bool = False
) -> None:
    """Convert a detector of the authors' release, trained on COCO, to a .safetensors file with its category names.

    Args:
        released: the .pth file, in detectron2's format.
        converted: the .safetensors file to write.
        model: name of its backbone from 'vil models', such as vision_longformer_small.
        detector: mask_rcnn or retinanet.
        overwrite: replace an existing file.
    """
    from ..detection import DetectorConfig, load_release_detector, save_detector
    from ..detection.release import coco_categories

    check_free(converted, overwrite)
    categories = coco_categories()
    network = load_release_detector(released, DetectorConfig(detector, model, len(categories)))
    info = {"categories": [category._asdict() for category in categories]}
    path = save_detector(network, converted, info=info, overwrite=overwrite)
    count = sum(parameter.numel() for parameter in network.parameters())
    print_line(f"wrote {path}: {detector} on {model}, {millions(count)} M parameters, {len(categories)} categories")
