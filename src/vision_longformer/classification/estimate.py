"""What a run is about to do, how long it would take on this machine and in how much memory, from two trial steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from ..data.check import count_loose
from ..data.images import count_kinds
from ..data.loading import UNREADABLE
from ..data.shards import ShardSource
from ..data.sources import Source
from ..models import VisionLongformer
from ..models.zoo import describe_model
from ..training.callbacks import counted, duration
from ..training.distributed import autocast
from ..training.estimate import Estimate, Trial, scale_up, trial_step
from .augment import image_augmentation
from .dataset import Splits, build_train_set, open_splits
from .preprocessing import recipe_preprocessing
from .recipe import ClassificationRecipe

TRIAL_BATCH_SIZE = 4
"""Images of the trial step."""

IMAGENET_IMAGES, IMAGENET_EVALUATED, IMAGENET_CLASSES = 1_281_167, 50_000, 1000
"""What is assumed where the data is not here: ImageNet-1K."""

TRIAL_READS = 8
"""Images that are read and augmented for trial."""


def estimate(recipe: ClassificationRecipe, splits: Splits | None = None) -> Estimate:
    """Run a trial step and scale it up. Data that is not there is taken to be as large as ImageNet-1K."""
    if splits is None:
        with suppress(FileNotFoundError):
            splits = open_splits(recipe)
    train, evaluated, classes, per_epoch = _data_size(recipe, splits)
    assumed = "" if splits else " (assumed; the data were not found)"
    model = VisionLongformer(recipe.model_config(classes)).train()
    trial = _trial(model, recipe.precision)._replace(reading_seconds=_trial_read(recipe, splits, model))
    data = f"{train:,} images of {classes:,} classes{assumed}"
    return scale_up(recipe, model, data, per_epoch, evaluated, trial)


def _data_size(recipe: ClassificationRecipe, splits: Splits | None) -> tuple[int, int, int, int]:
    """Images to train on and to evaluate on, classes, and micro-batches of a process in an epoch."""
    if splits is None:
        images = recipe.num_images or IMAGENET_IMAGES
        return (
            images,
            IMAGENET_EVALUATED,
            recipe.num_classes or IMAGENET_CLASSES,
            images // recipe.batch_size * recipe.accumulate,
        )
    classes = splits.train.classes
    config = recipe.model_config(len(classes))
    train_set = build_train_set(splits.train, recipe, recipe_preprocessing(recipe, config, classes))
    per_epoch = train_set.batches_per_epoch
    return _count(splits.train, recipe.num_images), _count(splits.evaluation), len(classes), per_epoch


def _count(images: Source | ShardSource, stated: int | None = None) -> int:
    """Images of a source; of shards, the stated number or else those that are there."""
    return stated or images.count_samples() if isinstance(images, ShardSource) else len(images)


def _trial(model: VisionLongformer, precision: str) -> Trial:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    images = torch.randn(TRIAL_BATCH_SIZE, model.config.in_chans, *model.config.img_size, device=device)

    def step() -> Tensor:
        with autocast(device, precision):
            return model(images).float().logsumexp(1).mean()

    return trial_step(model, step, TRIAL_BATCH_SIZE)


def _trial_read(recipe: ClassificationRecipe, splits: Splits | None, model: VisionLongformer) -> float:
    """Seconds to read and augment an image; none where images are in memory, or in shards, which are not opened."""
    if splits is None or recipe.in_memory or isinstance(splits.train, ShardSource):
        return 0.0
    preprocessing = recipe_preprocessing(recipe, model.config, splits.train.classes)
    augment = image_augmentation(recipe, preprocessing)
    start, read = time.perf_counter(), 0
    for index in range(0, len(splits.train), max(1, len(splits.train) // TRIAL_READS)):
        try:
            augment(splits.train.read(index)[0])
            read += 1
        except UNREADABLE:  # the run will say so, or skip it
            continue
    return (time.perf_counter() - start) / max(1, read)


# What people look at before the first step

LISTED_CLASSES = 12


def run_summary(recipe: ClassificationRecipe, splits: Splits, starts_from: str) -> dict[str, str]:
    """The start banner's rows: images per split and class, size, model, starting weights, steps, expected time."""
    plan = estimate(recipe, splits)
    held_out = f", {splits.how} (split.json)" if splits.how else ""
    config = recipe.model_config(len(splits.train.classes))
    found = "images as found" if recipe.skip_bad_images else "images"
    rows = {
        "data": recipe.data,
        "training": f"{_count(splits.train, recipe.num_images):,} {found}: {_by_class(splits.train)}",
        "evaluation": f"{_count(splits.evaluation):,} {found}: {_by_class(splits.evaluation)}{held_out}",
        "ignored": "" if isinstance(splits.train, ShardSource) else _counted(count_kinds(splits.train.ignored)),
        "warning": "; ".join(_doubts(splits)),
        "model": f"{describe_model(recipe.model, config)}, images of {'×'.join(map(str, config.img_size))}",
        "starts from": starts_from,
        "schedule": (
            f"{counted(plan.epochs, 'epoch')}, {counted(plan.steps, 'step')} of {counted(recipe.batch_size, 'image')}"
        ),
        "expected": f"about {duration(plan.seconds)}",
    }
    return {name: text for name, text in rows.items() if text}


def _doubts(splits: Splits) -> list[str]:
    """What suggests that images are not where they should be, or too few."""
    train, evaluation = splits.train, splits.evaluation
    if isinstance(train, ShardSource) or isinstance(evaluation, ShardSource) or not len(evaluation.labels):
        return []
    doubts, there = [], set(map(int, evaluation.labels))
    if (loose := count_loose(train)) > len(train) + len(evaluation):
        doubts.append(f"most images ({loose}) lie outside of class folders, and are not used")
    if missing := [name for number, name in enumerate(evaluation.classes) if number not in there]:
        doubts.append(f"not in the evaluation images: {', '.join(missing)}")
    return doubts


def _by_class(images: Source | ShardSource) -> str:
    """``cat 12, dog 30``; of many classes, how many there are and the least and most images of one."""
    if isinstance(images, ShardSource) or not len(images.labels):
        return f"{len(images.classes)} classes"
    counts = Counter(map(int, images.labels))
    if len(images.classes) <= LISTED_CLASSES:
        return ", ".join(f"{name} {counts[number]}" for number, name in enumerate(images.classes))
    return f"{len(images.classes)} classes of {min(counts.values())} to {max(counts.values())}"


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
