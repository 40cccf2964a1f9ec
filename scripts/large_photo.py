"""A large photo through a backbone on this machine: ``python scripts/large_photo.py PHOTO [MODEL]``.

Prints time, the maps, and the peak memory of the process.
"""

from __future__ import annotations

import resource
import sys
import time

import timm
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

import vision_longformer  # noqa: F401  (registers the models)


def peak_gigabytes() -> float:
    """Memory of this process at its highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(photo: str, name: str = "vision_longformer_small") -> None:
    image = ImageOps.exif_transpose(Image.open(photo)).convert("RGB")
    pixels = normalize(
        pil_to_tensor(image).float() / 255, timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD
    )
    model = timm.create_model(name, features_only=True).eval()
    start = time.perf_counter()
    with torch.inference_mode():
        maps = model(pixels[None])
    seconds = time.perf_counter() - start
    peak = f"peak memory of the process {peak_gigabytes():.2f} GB"
    print(f"{name} on {image.width}×{image.height}: {seconds:.2f} s, {peak}")
    print("maps:", ", ".join(f"{m.shape[1]}×{m.shape[2]}×{m.shape[3]}" for m in maps))


if __name__ == "__main__":
    main(*sys.argv[1:])
