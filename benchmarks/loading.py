"""Images per second of the data loader alone beside those of training: the quick start, and a JPEG folder for ViL-Tiny.

    python benchmarks/loading.py FOLDER

FOLDER holds photos to cut 500×375 JPEGs from, 200 of them, in a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vision_longformer import VisionLongformer
from vision_longformer.classification.dataset import train_data
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.classification.task import CLASSIFICATION

SIZE = (500, 375)


def make_folder(photos: list[Path], folder: Path, count: int = 200) -> None:
    """JPEGs of random crops in four classes."""
    drawn = np.random.default_rng(0)
    opened = [Image.open(path).convert("RGB") for path in photos]
    for index in range(count):
        photo = opened[index % len(opened)]
        left, top = (int(drawn.integers(0, side - part)) for side, part in zip(photo.size, SIZE, strict=True))
        path = folder / "train" / f"class_{index % 4}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + SIZE[0], top + SIZE[1])).save(path, quality=90)


def loading_rate(recipe: ClassificationRecipe, classes: int) -> float:
    """Images per second of a whole epoch, after one to warm up."""
    data = train_data(recipe, recipe.model_config(classes))
    for _ in data.batches(0):
        pass
    start = time.perf_counter()
    images = sum(len(labels) for _, labels in data.batches(1))
    return images / (time.perf_counter() - start)


def training_rate(recipe: ClassificationRecipe, classes: int, rounds: int = 5) -> float:
    """Images per second of forward and backward."""
    model = VisionLongformer(recipe.model_config(classes)).train()
    images = torch.randn(recipe.batch_size, model.config.in_chans, *model.config.img_size)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        model(images).logsumexp(1).mean().backward()
        times.append(time.perf_counter() - start)
    return recipe.batch_size / sorted(times)[rounds // 2]


def main() -> None:
    photos = sorted(Path(sys.argv[1]).glob("*.jpg"))
    with tempfile.TemporaryDirectory() as folder:
        make_folder(photos, Path(folder))
        recipes = {
            "quick start": (CLASSIFICATION.resolve("quickstart"), 10),
            "JPEG folder, ViL-Tiny at 224": (
                CLASSIFICATION.resolve("imagenet1k_tiny", data=folder, batch_size=20, workers=2),
                4,
            ),
        }
        for name, (recipe, classes) in recipes.items():
            loading, training = loading_rate(recipe, classes), training_rate(recipe, classes)
            print(f"{name}: loader {loading:.0f}, training {training:.0f} images/s: {loading / training:.1f} times")


if __name__ == "__main__":
    main()
