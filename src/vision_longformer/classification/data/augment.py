"""Augmentation of one image, by timm's pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from ..preprocessing import Preprocessing, grey_image
from ..recipe import ClassificationRecipe


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
    """Brings images or image tensors to the size that 'random' crops, or else to that of the input."""
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
