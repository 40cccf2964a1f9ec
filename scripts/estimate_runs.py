"""What the paper's training runs would take on stated hardware: ``python scripts/estimate_runs.py`` prints a table.

An estimate, not a measurement: multiply-accumulates of a forward pass as our models execute them, times 3 for the
backward pass, times the images of the run, over the maker's peak rate times an assumed utilisation.
"""

from __future__ import annotations

from typing import NamedTuple

from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.costs import executed_macs
from vision_longformer.costs.detection import executed_detector_macs
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.models.zoo import model_config
from vision_longformer.training.recipe import resolve

UTILISATION = 0.1
HARDWARE = {"8 V100": 8 * 125e12, "8 A100": 8 * 312e12, "64 A100": 64 * 312e12, "8 H100": 8 * 989e12}
"""Dense 16-bit tensor-core peak in FLOP/s, from the makers' data sheets."""

IMAGENET_1K, IMAGENET_1K_CLASSES = 1_281_167, 1000
COCO_IMAGE = (800, 1344)
"""800×1333 padded to whole cells; smaller photos take less."""

CLASSIFICATION_RUNS = (
    "imagenet1k_tiny",
    "imagenet1k_small",
    "imagenet1k_medium",
    "imagenet1k_base",
    "imagenet21k_medium",
    "imagenet21k_base",
    "imagenet1k_384_medium",
    "imagenet1k_384_base",
)
DETECTION_RUNS = ("mask_rcnn_tiny_1x", "mask_rcnn_small_1x", "mask_rcnn_medium_1x", "mask_rcnn_base_1x")


class Run(NamedTuple):
    """A training run: images it looks at in all, and multiply-accumulates of one forward pass."""

    recipe: str
    images: int
    macs: int

    @property
    def flops(self) -> int:
        """Of forward and backward passes over all images; a multiply-accumulate is two."""
        return 2 * 3 * self.macs * self.images

    def duration(self, peak: float) -> str:
        hours = self.flops / (peak * UTILISATION) / 3600
        return f"{hours:.1f} h" if hours < 24 else f"{hours / 24:.1f} d"


def classification_run(name: str) -> Run:
    recipe = resolve(ClassificationRecipe, name)
    config = recipe.model_config(recipe.num_classes or IMAGENET_1K_CLASSES)
    return Run(name, recipe.epochs * (recipe.num_images or IMAGENET_1K), executed_macs(config).total)


def detection_run(name: str) -> Run:
    recipe = resolve(DetectionRecipe, name)
    macs = executed_detector_macs(recipe.detector, model_config(recipe.model), COCO_IMAGE)
    return Run(name, (recipe.steps or 0) * recipe.batch_size, macs.total)


def table_head() -> list[str]:
    """The first two lines of a Markdown table."""
    columns = ("recipe", "images in all (M)", "GMACs per image", "EFLOP", *HARDWARE)
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def table_row(run: Run) -> str:
    durations = " | ".join(run.duration(peak) for peak in HARDWARE.values())
    cells = f"{run.images / 1e6:,.1f} | {run.macs / 1e9:.1f} | {run.flops / 1e18:,.1f}"
    return f"| `{run.recipe}` | {cells} | {durations} |"


def main() -> None:
    runs = [*map(classification_run, CLASSIFICATION_RUNS), *map(detection_run, DETECTION_RUNS)]
    print("\n".join([*table_head(), *map(table_row, runs)]))


if __name__ == "__main__":
    main()
