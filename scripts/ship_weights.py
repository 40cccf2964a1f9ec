"""Weights of a run for the package: ``python scripts/ship_weights.py CHECKPOINT NAME [--half]``.

Writes ``src/vision_longformer/assets/weights/NAME.safetensors``. ``--half`` stores float16 numbers, which are read into
float32 models; do it where ``vil evaluate`` or ``vil detect evaluate`` shows no difference.
"""

from __future__ import annotations

import sys

import torch

from vision_longformer.checkpoint.native import describe, read, write
from vision_longformer.models.zoo import SHIPPED


def ship(checkpoint: str, name: str, half: bool) -> None:
    about = describe(checkpoint)
    _, tensors = read(checkpoint, about.format)
    if half:
        tensors = {key: tensor.to(torch.float16) for key, tensor in tensors.items()}
    path = SHIPPED / f"{name}.safetensors"
    write(path, tensors, format=about.format, config=about.config, info=about.info, overwrite=True)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    checkpoint, name, *options = sys.argv[1:]
    ship(checkpoint, name, options == ["--half"])
