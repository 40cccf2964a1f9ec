"""Settings of a classification run: images and augmentation, beside what every training run has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import check_at_least, check_choice, check_fraction
from ..models.config import ADAPT_TABLE_RESIZE, TABLE_RESIZES, ModelConfig, size_pair
from ..models.zoo import model_config
from ..training.recipe import BackboneSettings

CROPS = ("random_resized", "random", "pad", "none")
BALANCES = ("none", "sample", "loss")
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "random")

MECHANISMS = {
    "full": ("Full attention", 76.06, 81.91),
    "linformer": ("Linformer", 74.71, 80.98),
    "partial_linformer": ("Linformer, then full", 75.56, 81.79),
    "sra64": ("SRA 16, 8, 4, 2", 69.08, 76.37),
    "sra32": ("SRA 8, 4, 2, 1", 73.22, 79.9),
    "partial_sra32": ("SRA 8, 4, then full", 75.2, 81.61),
    "global": ("Global memory", 71.52, 78.97),
    "partial_global": ("Global memory, then full", 75.32, 81.46),
    "performer": ("Performer", 71.12, 78.72),
    "partial_performer": ("Performer, then full", 75.34, 81.72),
}
"""The mechanisms compared, and their accuracy in the paper's Table 3 at size tiny (1-1-9-1) and small (1-2-8-1)."""

ABSOLUTE_POSITION = {"tiny": 76.3, "small": 82.0, "medium": 83.3, "base": 83.2}
"""The paper's accuracy with absolute position, by size."""


def _generated() -> dict[str, dict[str, Any]]:
    """Recipes that differ from ``imagenet1k_SIZE`` in the mechanism, in its position or in random shift."""
    recipes: dict[str, dict[str, Any]] = {}
    for column, (size, layout) in enumerate((("tiny", "1_1_9_1"), ("small", "1_2_8_1"))):
        base = {"base": f"imagenet1k_{size}"}
        for mechanism, (words, *accuracy) in MECHANISMS.items():
            about = f"{words}; {accuracy[column]:.1f}% in the paper"
            model = f"msvit_{size}_{layout}_{mechanism}"
            recipes[f"imagenet1k_{size}_{mechanism}"] = {**base, "about": about, "model": model}
        shift = {"neighbours": "random", "shift_until": 0.75}
        about = f"ViL-{size.title()} with random shift until 75%"
        recipes[f"imagenet1k_{size}_random_shift"] = {**base, "about": about, **shift}
    for size, accuracy_ape in ABSOLUTE_POSITION.items():
        about = f"ViL-{size.title()}-APE; {accuracy_ape}% in the paper"
        model = f"vision_longformer_{size}_ape"
        recipes[f"imagenet1k_{size}_ape"] = {"base": f"imagenet1k_{size}", "about": about, "model": model}
    recipes["imagenet1k_small_full"] |= {"batch_size": 256, "lr_batch": 1024}  # as the paper trained it
    return recipes


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(BackboneSettings):
    """Settings of a classification run.

    Args:
        image_size: side of the square images, or 96x128 for height and width; None for the model's own.
        init: what to start from: a checkpoint (.safetensors), a run directory, a folder or hub name of 'vil hub', or
            a built-in one (cifar10, cifar10_micro, cifar10_nano, fashion_mnist); tables are resized, and the head is
            replaced if classes differ.
        table_resize: how the relative-position tables of init are resized: offset or bilinear.
        class_map: a file that maps classes of the data to classes of the checkpoint, whose rows of the head are kept.
        data: a folder, .npz, .tar or .zip file, shards (wds/…), hfds/…, torch/…, or the built-in fashion-mnist.
        train_split: name of the split to train on.
        eval_split: name of the split to evaluate on.
        num_classes: number of classes of streamed data, which cannot be counted; None: as many as the data names.
        num_images: images per epoch of streamed data.
        balance: none; sample, so that every class is seen equally often; loss, so that rare classes weigh more.
        skip_bad_images: skip and count unreadable images instead of stopping.
        in_memory: keep decoded images of small data sets (.npz) and augment whole batches at once.
        crop: random_resized, random (a crop of a resized image), pad (a crop of a padded image), none.
        crop_pad: padding on each side for pad, as a fraction of the side.
        crop_scale: smallest and largest fraction of the image's area in random_resized.
        crop_ratio: smallest and largest ratio of width to height in random_resized.
        hflip: probability of a horizontal flip.
        color_jitter: strength; not used together with auto_augment.
        auto_augment: timm's policy string, such as rand-m9-mstd0.5-inc1.
        erase: probability of random erasing.
        mixup: alpha of Mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        mix_prob: probability that a batch is mixed at all.
        smoothing: label smoothing.
        repeats: copies of an image, each augmented differently (repeated augmentation); epochs do not get longer.
        interpolation: bicubic, bilinear, nearest, or random in training.
        crop_pct: fraction of the resized image that evaluation crops; None for the model's own.
        mean: channel means; None for ImageNet's.
        std: channel standard deviations; None for ImageNet's.
        eval_batch_size: images per evaluation batch and process; None: as in training.
    """

    task: ClassVar[str] = "classification"
    generated: ClassVar[Mapping[str, Mapping[str, Any]]] = _generated()
    own_data: ClassVar[str] = "own_images"
    derived: ClassVar[frozenset[str]] = frozenset(
        {
            *("model", "model_options", "init", "image_size", "mean", "std", "crop_pct", "batch_size"),
            *("epochs", "warmup", "ema", "lr", "eval_every", "workers"),
        }
    )

    image_size: int | tuple[int, int] | None = None
    init: str | None = None
    table_resize: str = ADAPT_TABLE_RESIZE
    class_map: str | None = None
    data: str = "imagenet"
    train_split: str = "train"
    eval_split: str = "validation"
    num_classes: int | None = None
    num_images: int | None = None
    balance: str = "none"
    skip_bad_images: bool = False
    in_memory: bool = False
    crop: str = "random_resized"
    crop_pad: float = 0.125
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.4
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    erase: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    mix_prob: float = 1.0
    smoothing: float = 0.1
    repeats: int = 1
    interpolation: str = "bicubic"
    crop_pct: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    eval_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("crop", self.crop, CROPS)
        check_choice("balance", self.balance, BALANCES)
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        check_choice("table_resize", self.table_resize, TABLE_RESIZES)
        check_at_least("repeats", self.repeats, 1)
        for name in ("num_classes", "num_images", "eval_batch_size"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name in ("crop_pad", "hflip", "erase", "mix_prob", "smoothing"):
            check_fraction(name, getattr(self, name))
        for name in ("mixup", "cutmix", "color_jitter"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative, and is 0 for none")
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ValueError(f"batch_size is {self.batch_size}; Mixup and CutMix pair images, so it must be even")
        self.model_config(self.num_classes or 1000)

    @property
    def micro_batch_multiple(self) -> int:
        return 2 if self.mixup or self.cutmix else 1

    def model_config(self, num_classes: int) -> ModelConfig:
        """The model's configuration with this recipe's changes."""
        changes: dict[str, Any] = {"num_classes": num_classes, "drop_path_rate": self.drop_path}
        if self.image_size is not None:
            changes["img_size"] = size_pair(self.image_size)
        return model_config(self.model).override(**{**changes, "neighbours": self.neighbours, **self.model_options})
