"""From an image to a model's input, as evaluation and prediction do it; checkpoints and exported files carry it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torchvision.transforms import Compose

from ..errors import CheckpointError
from ..models.config import ModelConfig, size_pair
from ..models.timm_registry import default_crop_pct
from .recipe import ClassificationRecipe

GREY_MEAN = (0.449,)
GREY_STD = (0.226,)
"""Averages of ImageNet's over the three colours."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input, and the names of its outputs.

    - ``size``: (height, width) of the input.
    - ``mean``, ``std``: of its one or three channels, whose values lie in [0, 1] before normalisation.
    - ``crop_pct``: part of the resized image's shorter side that the centre crop keeps.
    - ``interpolation``: bicubic, bilinear or nearest.
    - ``classes``: names of the outputs, in order.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", size_pair(self.size))
        object.__setattr__(self, "classes", tuple(str(name) for name in self.classes))
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError(f"mean is {self.mean} and std is {self.std}; give both for 1 channel or for 3")
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; it must be positive")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct is {self.crop_pct}; it must be above 0 and at most 1")

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        classes: Sequence[str],
        *,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        crop_pct: float | None = None,
        interpolation: str = "bicubic",
    ) -> Preprocessing:
        """For a model's own image size; ImageNet's where nothing else is said."""
        if config.in_chans not in (1, 3):
            raise ValueError(f"in_chans is {config.in_chans}; images have 3 channels, or 1 if they are grey")
        colour = config.in_chans == 3
        mean = mean or (IMAGENET_DEFAULT_MEAN if colour else GREY_MEAN)
        std = std or (IMAGENET_DEFAULT_STD if colour else GREY_STD)
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != config.in_chans:
                raise ValueError(f"{name} is {values}, but the model's images have {config.in_chans} channels")
        if crop_pct is None:
            crop_pct = default_crop_pct(config.img_size)
        return cls(config.img_size, mean, std, crop_pct, interpolation, tuple(classes))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an input."""
        return len(self.mean), *self.size

    def transform(self, size: tuple[int, int] | None = None) -> Callable[[Image.Image], Tensor]:
        """From an RGB image to (C, H, W): shorter side to ``size / crop_pct``, centre crop, normalisation."""
        to_input = create_transform(
            (len(self.mean), *(size or self.size)),
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
        )
        return Compose([grey_image, to_input]) if len(self.mean) == 1 else to_input

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) as float inputs, to the last bit as :meth:`transform` does it."""
        return images.float().div_(255).sub_(_per_channel(self.mean)).div_(_per_channel(self.std))

    def denormalise(self, images: Tensor) -> Tensor:
        """Inputs (B, C, H, W) as uint8 images to look at; the inverse of :meth:`normalise`."""
        images = images.detach().float().cpu() * _per_channel(self.std) + _per_channel(self.mean)
        return (images * 255).round().clamp(0, 255).to(torch.uint8)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str) -> Preprocessing:
        """The inverse of :meth:`to_dict`; ``source`` is the file that an error names."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in data]
        if missing:
            raise CheckpointError(f"{source} does not say how images are prepared: {', '.join(missing)} missing")
        try:
            return cls(**{name: data[name] for name in names})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{source} does not say how images are prepared: {error}") from error


def recipe_preprocessing(recipe: ClassificationRecipe, config: ModelConfig, classes: Sequence[str]) -> Preprocessing:
    """What the recipe says, and ImageNet's where it says nothing."""
    return Preprocessing.for_model(
        config,
        classes,
        mean=recipe.mean,
        std=recipe.std,
        crop_pct=recipe.crop_pct,
        interpolation="bicubic" if recipe.interpolation == "random" else recipe.interpolation,
    )


def grey_image(image: Image.Image) -> Image.Image:
    """An image of one channel."""
    return image.convert("L")


def _per_channel(values: tuple[float, ...]) -> Tensor:
    """A (C, 1, 1) tensor."""
    return torch.tensor(values).view(-1, 1, 1)
