"""Weights of a run for the package, as ``src/vision_longformer/assets/weights/NAME.safetensors``."""

from __future__ import annotations

import argparse

from vision_longformer.checkpoint.native import describe, read, write
from vision_longformer.models.zoo import SHIPPED


def ship(checkpoint: str, name: str, half: bool) -> None:
    about = describe(checkpoint)
    _, tensors = read(checkpoint, about.format)
    if half:
        tensors = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    path = SHIPPED / f"{name}.safetensors"
    write(path, tensors, format=about.format, config=about.config, info=about.info, overwrite=True)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a .safetensors file or a run directory")
    parser.add_argument("name", help="what the weights are called in the package; earlier ones are replaced")
    parser.add_argument(
        "--half",
        action="store_true",
        help="store float16 numbers, which are read into float32 models; do it where 'vil evaluate' or "
        "'vil detect evaluate' shows no difference",
    )
    arguments = parser.parse_args()
    ship(arguments.checkpoint, arguments.name, arguments.half)
