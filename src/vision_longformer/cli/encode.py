"""``vil encode``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import check_choice
from .output import print_line, print_table, progress_bar, size_text

if TYPE_CHECKING:
    from torch import Tensor

    from ..classification.model import Classifier

TOP = 5
"""Classes that are printed."""

DTYPES = ("float32", "bfloat16")


def encode(
    checkpoint: str,
    image: str,
    *,
    output: str,
    stages: str | None = None,
    memory: str = "4GB",
    level: int = 0,
    dtype: str = "float32",
    storage: str | None = None,
    allow_large: bool = False,
    overwrite: bool = False,
) -> None:
    """Compute the feature maps of an image of any size, strip by strip, and write them to files.

    Args:
        checkpoint: a run directory, a .safetensors file of a classifier, a folder or hub name of 'vil hub', a built-in
            one (cifar10, cifar10_micro, cifar10_nano, fashion_mnist), or a name from 'vil models', for random weights.
        image: a TIFF (also BigTIFF, OME-TIFF), zarr, .npy, JPEG or PNG file. It is not resized.
        output: NAME.zarr, a folder for .npy files, or NAME.npy for one map; with a picture NAME.png beside it.
        stages: the stages whose maps are written, as 3,4; the last one by default.
        memory: memory limit, on top of the model and a decoded JPEG or PNG.
        level: level of a pyramid; 0 is the largest image.
        dtype: type in which tokens are stored during the run: float32, or bfloat16 for half the memory.
        storage: a folder for tokens, instead of memory; a run that was killed is resumed from there.
        allow_large: decode a JPEG or PNG of any size; refused above 179 megapixels by default.
        overwrite: replace an output that exists.
    """
    check_choice("dtype", dtype, DTYPES)

    import torch

    from ..large import encode as encode_image
    from ..large import open_image
    from ..large.encode import check_output, picture_path

    model, preprocessing, named = _open(checkpoint)
    chosen = parse_stages(stages, len(model.stages))
    check_output(Path(output), chosen, overwrite, {"image": Path(image), "checkpoint": Path(checkpoint)})
    opened = open_image(image, model.config.in_chans, level=level, allow_large=allow_large)
    normalisation = {"mean": list(preprocessing.mean), "std": list(preprocessing.std)}
    attributes = {"model": checkpoint, "image": image, "level": level, "normalisation": normalisation}
    with progress_bar(f"encoding {size_text(opened.shape[:2])}") as bar:
        streamed = encode_image(
            model.to("cuda" if torch.cuda.is_available() else "cpu"),
            opened,
            output,
            stages=chosen,
            memory=memory,
            storage=storage,
            dtype=getattr(torch, dtype),
            mean=preprocessing.mean,
            std=preprocessing.std,
            attributes={**attributes, "classes": list(preprocessing.classes) if named else []},
            overwrite=overwrite,
            progress=lambda now: bar(1000 * now.done // now.total, 1000, 1000 * now.resumed // now.total),
        )
    for stage, tensor in streamed.maps.items():
        print_line(f"stage {stage + 1}: {size_text((tensor.shape[0], tensor.shape[1]))} tokens of {tensor.shape[2]}")
    if model.num_classes:
        _print_classes(streamed.logits, preprocessing.classes)
    print_line(f"wrote {output}")
    print_line(f"wrote {picture_path(Path(output))}")


def _open(checkpoint: str) -> Classifier:
    """The model of a checkpoint; of a name, one with random weights and without classes, which is said."""
    from ..classification.model import Classifier, load_encoder
    from ..classification.preprocessing import Preprocessing
    from ..data.randomness import seeded
    from ..models import VisionLongformer
    from ..models.zoo import MODELS

    if checkpoint not in MODELS or Path(checkpoint).exists():
        return load_encoder(checkpoint)
    config = MODELS[checkpoint].override(num_classes=0)
    with seeded(0):
        model = VisionLongformer(config).eval()
    print_line(f"{checkpoint} is not trained: its weights are random")
    return Classifier(model, Preprocessing.for_model(config, []), named=False)


def parse_stages(text: str | None, count: int) -> list[int]:
    """``"3,4"`` as stages counted from 0, in order; the last of ``count`` by default."""
    if text is None:
        return [count - 1]
    stages = [int(part) for part in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not stages or not all(1 <= stage <= count for stage in stages):
        raise ValueError(f"stages is {text!r}; write numbers from 1 to {count} with commas, such as 1,{count}")
    return sorted({stage - 1 for stage in stages})


def _print_classes(logits: Tensor, classes: tuple[str, ...]) -> None:
    best = logits.double().softmax(0).sort(descending=True, stable=True)
    rows = zip(best.indices[:TOP].tolist(), best.values[:TOP].tolist(), strict=True)
    print_table("", ("class", "%"), [(classes[index], f"{100 * share:.2f}") for index, share in rows])
