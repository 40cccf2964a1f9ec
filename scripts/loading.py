"""Images per second of the data loader alone beside those of training: the quick start, and a JPEG folder for ViL-Tiny.

    python scripts/loading.py FOLDER

FOLDER holds photos to cut 500×375 JPEGs from, 200 of them, in a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

from vision_longformer import ModelConfig, VisionLongformer
from vision_longformer.classification.dataset import build_train_set, open_images
from vision_longformer.classification.preprocessing import recipe_preprocessing
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.data.shards import ShardSource
from vision_longformer.data.sources import Source
from vision_longformer.training.recipe import resolve

SIZE = (500, 375)


def make_folder(photos: list[Path], folder: Path, count: int = 200) -> None:
    """JPEGs of random crops in four classes."""
    generator = np.random.default_rng(0)
    opened = [Image.open(path).convert("RGB") for path in photos]
    for index in range(count):
        photo = opened[index % len(opened)]
        left, top = (int(generator.integers(0, side - part)) for side, part in zip(photo.size, SIZE, strict=True))
        path = folder / "train" / f"class_{index % 4}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + SIZE[0], top + SIZE[1])).save(path, quality=90)


def loading_rate(recipe: ClassificationRecipe, images: Source | ShardSource, config: ModelConfig) -> float:
    """Images per second of a whole epoch, after one to warm up."""
    train_set = build_train_set(images, recipe, recipe_preprocessing(recipe, config, images.classes))
    for _ in train_set.batches(0):
        pass
    start = time.perf_counter()
    count = sum(len(labels) for _, labels in train_set.batches(1))
    return count / (time.perf_counter() - start)


def training_rate(recipe: ClassificationRecipe, config: ModelConfig, rounds: int = 5) -> float:
    """Images per second of forward and backward."""
    model = VisionLongformer(config).train()
    images = torch.randn(recipe.batch_size, config.in_chans, *config.img_size)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        model(images).logsumexp(1).mean().backward()
        times.append(time.perf_counter() - start)
    return recipe.batch_size / median(times)


def main(photos: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_folder(sorted(Path(photos).glob("*.jpg")), Path(folder))
        own = {"data": folder, "batch_size": 20, "workers": 2}
        recipes = {
            "quick start": resolve(ClassificationRecipe, "quickstart"),
            "JPEG folder, ViL-Tiny at 224": resolve(ClassificationRecipe, "imagenet1k_tiny", **own),
        }
        for name, recipe in recipes.items():
            images = open_images(recipe.data, recipe.train_split)
            config = recipe.model_config(len(images.classes))
            loading, training = loading_rate(recipe, images, config), training_rate(recipe, config)
            print(f"{name}: loader {loading:.0f}, training {training:.0f} images/s: {loading / training:.1f} times")


if __name__ == "__main__":
    main(*sys.argv[1:])
