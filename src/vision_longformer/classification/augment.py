"""Augmentation in training: of one image, by timm's pieces, or of a whole batch of small images at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from timm.data.auto_augment import (
    AugmentOp,
    augment_and_mix_transform,
    auto_augment_transform,
    posterize,
    rand_augment_transform,
)
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import (
    RandomResizedCropAndInterpolation,
    ResizeKeepRatio,
    str_to_interp_mode,
    str_to_pil_interp,
)
from torch import Tensor
from torchvision.transforms import (
    ColorJitter,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    Resize,
    ToTensor,
)

from ..data.randomness import derive_seed
from .preprocessing import Preprocessing, grey_image
from .recipe import ClassificationRecipe


def image_augmentation(recipe: ClassificationRecipe, preprocessing: Preprocessing) -> Callable[[Image.Image], Tensor]:
    """From an RGB image to an augmented, normalised input (C, H, W); draws from the global generators."""
    steps: list[Any] = [*_crop(recipe, preprocessing), RandomHorizontalFlip(recipe.hflip)]
    if recipe.auto_augment:
        steps.append(_policy(recipe, preprocessing))
    elif recipe.color_jitter:
        steps.append(ColorJitter(*(recipe.color_jitter,) * 3))
    if len(preprocessing.mean) == 1:
        steps.append(grey_image)
    steps += [ToTensor(), Normalize(preprocessing.mean, preprocessing.std)]
    if recipe.erase:
        steps.append(RandomErasing(recipe.erase, mode="pixel", device="cpu"))
    return Compose(steps)


def resize_before_crop(recipe: ClassificationRecipe, preprocessing: Preprocessing) -> Callable[[Any], Any]:
    """Brings images or image tensors to the size that 'random' crops from, or else to that of the input."""
    if recipe.crop == "random":
        covering = tuple(int(side / preprocessing.crop_pct) for side in preprocessing.size)
        return ResizeKeepRatio(covering, interpolation=preprocessing.interpolation)
    return Resize(preprocessing.size, str_to_interp_mode(preprocessing.interpolation))


def crop_padding(recipe: ClassificationRecipe, size: tuple[int, int]) -> tuple[int, int]:
    """Black pixels added above and below, and left and right, before the crop."""
    part = recipe.crop_pad if recipe.crop == "pad" else 0
    return round(size[0] * part), round(size[1] * part)


def _crop(recipe: ClassificationRecipe, preprocessing: Preprocessing) -> list[Any]:
    size = preprocessing.size
    if recipe.crop == "random_resized":
        return [RandomResizedCropAndInterpolation(size, recipe.crop_scale, recipe.crop_ratio, recipe.interpolation)]
    vertical, horizontal = crop_padding(recipe, size)
    crop = [] if recipe.crop == "none" else [RandomCrop(size, padding=(horizontal, vertical))]
    return [resize_before_crop(recipe, preprocessing), *crop]


def _policy(recipe: ClassificationRecipe, preprocessing: Preprocessing) -> Any:
    """The recipe's ``auto_augment``, with the options that timm's own training gives it."""
    name = str(recipe.auto_augment)
    grey_or_colours = preprocessing.mean * (3 // len(preprocessing.mean))
    options: dict[str, Any] = {
        "translate_const": int(min(preprocessing.size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in grey_or_colours),
    }
    if recipe.interpolation != "random":
        options["interpolation"] = str_to_pil_interp(recipe.interpolation)
    try:
        if name.startswith("rand"):
            policy = rand_augment_transform(name, options)
        elif name.startswith("augmix"):
            policy = augment_and_mix_transform(name, {**options, "translate_pct": 0.3})
        else:
            policy = auto_augment_transform(name, options)
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"auto_augment is {name!r}, which timm does not know; an example is rand-m9-mstd0.5-inc1"
        ) from error
    for operation in _operations(policy):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return policy


def _operations(policy: Any) -> list[AugmentOp]:
    return policy.ops if hasattr(policy, "ops") else [operation for pair in policy.policy for operation in pair]


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm asks for 0 bits at times, which is black, and which newer versions of Pillow refuse."""
    return posterize(image, bits) if bits else Image.new(image.mode, image.size)


ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)
"""Ranges of an erased box: its part of the image's area, and its height by its width, as timm draws them."""


@dataclass(frozen=True)
class BatchAugmentation:
    """Crop, horizontal flip and random erasing of a global batch of ``batch_size`` images, to inputs of ``size``.

    Everything is drawn for the global batch, of which a process takes its ``part``, so that what is drawn does not
    depend on the number of processes.
    """

    size: tuple[int, int]
    batch_size: int
    hflip: float
    erase_probability: float

    def crop(self, images: Tensor, samples: Tensor, seed: int, part: slice) -> Tensor:
        """Random crops (b, C, H, W) of ``images[samples]``, some flipped; ``images`` are (N, C, H', W'), no smaller."""
        generator = torch.Generator().manual_seed(seed)
        top, left, flip = torch.rand(3, self.batch_size, 1, generator=generator)[:, part]
        height, width = self.size
        rows = (top * (images.shape[2] - height + 1)).long() + torch.arange(height)
        columns = (left * (images.shape[3] - width + 1)).long() + torch.arange(width)
        columns = torch.where(flip < self.hflip, columns.flip(1), columns)
        channels = torch.arange(images.shape[1])
        return images[
            samples[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
        ]

    def erase(self, images: Tensor, seed: int, part: slice) -> Tensor:
        """Normalised images (b, C, H, W), some with a box replaced by normal noise."""
        if not self.erase_probability:
            return images
        generator = torch.Generator().manual_seed(derive_seed(seed, "erase"))
        erased, area, aspect, top, left = torch.rand(5, self.batch_size, 1, generator=generator)[:, part]
        noise = torch.randn(self.batch_size, *images.shape[1:], generator=generator)[part]
        height, width = self.size
        area = _between(area, *ERASED_AREA) * height * width
        aspect = _between(aspect, *map(math.log, ERASED_ASPECT)).exp()
        rows = _interval(height, (area * aspect).sqrt(), top)
        columns = _interval(width, (area / aspect).sqrt(), left)
        box = rows[:, None, :, None] & columns[:, None, None, :] & (erased < self.erase_probability)[..., None, None]
        return torch.where(box, noise, images)


def _between(fraction: Tensor, low: float, high: float) -> Tensor:
    return low + fraction * (high - low)


def _interval(side: int, length: Tensor, start: Tensor) -> Tensor:
    """Which of ``side`` pixels are within ``length`` of ``start``, (b, side); both (b, 1).

    ``length`` is in pixels, below the whole side; ``start`` is in [0, 1), from the first to the last that fits.
    """
    length = length.round().clamp(max=side - 1)
    first = (start * (side - length + 1)).floor()
    pixels = torch.arange(side)
    return (pixels >= first) & (pixels < first + length)
