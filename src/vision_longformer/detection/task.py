"""Detection as a training task: data, losses, COCO's metrics, the saved detector and its pictures."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from ..data.loading import Progress
from ..data.randomness import derive_seed, seeded
from ..data.split import SPLIT_FILE
from ..large.spatial import check_divisible, spatial_parallel
from ..training import run
from ..training.callbacks import Callback, counted, duration
from ..training.distributed import replica
from ..training.estimate import scale_up
from ..training.run import TrainedRun
from ..training.task import SkippedImages, TrainingTask
from . import garments
from .augment import Augmentation
from .checkpoint import freeze_stages, load_backbone, save_detector
from .dataset import Batch, EvalSet, TrainSet, open_splits
from .derive import derive
from .detections import annotated_objects
from .detectors import build_detector
from .estimate import trial_of_detector
from .evaluate import evaluate_detector
from .export import open_detector
from .pictures import draw_pair, page, save_image
from .predict import predict_image
from .recipe import DetectionRecipe
from .statistics import ObjectStatistics, missing_categories, object_statistics, span

logger = logging.getLogger(__name__)

NUM_PICTURES = 6
"""Images on the page of predictions."""

MAX_CATEGORIES = 12
"""Named at the start of a run, with their objects."""

MIN_PICTURED_SCORE = 0.3
"""Lowest score of what is drawn there: a detector that has just begun is not sure of anything."""

REDRAW_STEPS = 1000
"""Between new Performer features, as in the paper."""


class DetectionTask(TrainingTask):
    """A detector with its training and evaluation images."""

    recipe_type = DetectionRecipe
    best_metric = "box_AP"
    curves = ("box_AP50", "mask_AP50", "box_AP", "mask_AP")

    def __init__(self, recipe: DetectionRecipe, accelerator: Accelerator, run: Path | None = None) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        process = replica(accelerator, recipe)
        self.splits = open_splits(recipe, run)
        train_data, eval_data = self.splits.train, self.splits.evaluation
        self.train_set = TrainSet(
            train_data,
            seed=recipe.seed,
            batch_size=recipe.batch_size,
            accumulate=recipe.accumulate,
            process=process,
            workers=recipe.workers,
            augmentation=Augmentation(recipe.hflip, recipe.scale_jitter, recipe.color_jitter),
            skip_bad=recipe.skip_bad,
        )
        self.eval_set = EvalSet(eval_data, process=process, workers=recipe.workers, skip_bad=recipe.skip_bad)
        with seeded(derive_seed(recipe.seed, "weights")):
            self.model = build_detector(recipe.detector_config(len(train_data.categories)))
        if recipe.spatial > 1:
            check_divisible(self.model, recipe.spatial)
        if recipe.init is not None:
            logger.info("%s", load_backbone(self.model, recipe.init, recipe.table_resize))
        if recipe.freeze:
            freeze_stages(self.model, recipe.freeze)
        self.batches_per_epoch = self.train_set.batches_per_epoch
        self._skipped = SkippedImages()

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derive(values)

    def files(self) -> dict[str, str]:
        return {} if self.splits.split is None else {SPLIT_FILE: self.splits.split.to_json()}

    def summary(self) -> dict[str, str]:
        """The images and their objects, the detector, where its weights come from, and how long it will take."""
        recipe, splits = self.recipe, self.splits
        config = recipe.detector_config(len(self.train_set.categories))
        statistics = object_statistics(splits.train)
        counts = ", ".join(f"{name} {count}" for name, count in islice(statistics.counts.items(), MAX_CATEGORIES))
        more = len(statistics.counts) - MAX_CATEGORIES
        held_out = f"{splits.how}; split.json" if splits.split else recipe.eval_split
        trial = trial_of_detector(self.model, statistics, self.accelerator.device)
        plan = scale_up(recipe, self.model, "", self.batches_per_epoch, len(splits.evaluation), trial)
        as_found = " as found" if recipe.skip_bad else ""
        frozen = f", with the first {recipe.freeze} stages frozen" if recipe.freeze else ""
        parameters = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        return {
            "data": recipe.data,
            "training": f"{_images(len(splits.train) - statistics.empty)}{as_found}, {_objects(statistics)}",
            "evaluation": f"{_images(len(splits.evaluation))}{as_found} ({held_out})",
            **self._warning(),
            **({"small objects": small} if (small := statistics.too_small(config.max_size)) else {}),
            "categories": counts + (f" and {more} more" if more > 0 else ""),
            **statistics.rows(),
            "detector": f"{recipe.detector}, images of {span(config.min_sizes[-1], config.max_size)} pixels",
            "anchors": f"from {config.cells * 4 * 2 ** (config.stages[0] - 1):g} pixels",
            "model": f"{config.backbone_in_words}, {parameters:.1f} million parameters",
            "starts from": (recipe.init or "random weights") + frozen,
            "schedule": (
                f"{counted(plan.epochs, 'epoch')}, {counted(plan.steps, 'step')} of "
                f"{counted(recipe.batch_size, 'image')}"
            ),
            "expected": f"about {duration(plan.seconds)}",
        }

    def _warning(self) -> dict[str, str]:
        """Categories that cannot be evaluated; the built-in images, made on the fly, show all."""
        if isinstance(self.splits.evaluation, garments.Garments):
            return {}
        missing = missing_categories(self.splits.evaluation)
        return {"warning": f"not in the evaluation images: {', '.join(missing)}"} if missing else {}

    def divide_images(self, mesh: DeviceMesh) -> None:
        """The backbone's maps are computed in bands and gathered; every process then runs the neck and the heads."""
        spatial_parallel(self.model, mesh["spatial"])
        self.eval_group = mesh.get_group("data")

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        device = self.accelerator.device
        for images, targets in self.train_set.batches(epoch, start):
            moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
            yield [image.to(device) for image in images], moved

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        losses: dict[str, Tensor] = model(images, targets)
        total = sum(losses.values(), start=next(iter(losses.values())).new_zeros(()))
        return total, {name.removeprefix("loss_"): value for name, value in losses.items()}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        device, precision = self.accelerator.device, self.recipe.precision
        result = evaluate_detector(self.model, self.eval_set, device, precision, progress, self.eval_group)
        results = {
            f"{part}_{name}": value
            for part, metrics in (("box", result.boxes), ("mask", result.masks))
            if metrics is not None
            for name, value in metrics.overall.items()
        }
        if self.recipe.skip_bad:
            results |= self._skipped.report(self.train_set.skipped, result.skipped)
        return results

    def save(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.accelerator.is_main_process:
            config = self.recipe.detector_config(len(self.train_set.categories))
            whole = build_detector(config.without_pretrained())
            whole.load_state_dict(state)
            categories = [category._asdict() for category in self.train_set.categories]
            save_detector(whole, path, info={"categories": categories}, overwrite=True)

    def draw(self, folder: Path) -> None:
        """A page of evaluation images, each with what is annotated and with what the best detector finds."""
        detector = open_detector(folder / "best.safetensors")
        names = [category.name for category in detector.categories]
        pictures = []
        for image, target in self.eval_set.examples(NUM_PICTURES):
            detections = predict_image(detector.model, image, threshold=MIN_PICTURED_SCORE)
            pictures.append(draw_pair(image, annotated_objects(target), detections, names))
        where = f"{self.recipe.data}, {'held out' if self.splits.split else self.recipe.eval_split}"
        caption = f"{where}: annotated, and found with a score of at least {MIN_PICTURED_SCORE}"
        save_image(page(pictures, caption, columns=2), folder / "predictions.png", overwrite=True)

    @staticmethod
    def redraws_features(step: int, epoch: int, step_of_epoch: int) -> bool:
        return step > 0 and step % REDRAW_STEPS == 0


def _images(count: int) -> str:
    return counted(count, "image")


def _objects(statistics: ObjectStatistics) -> str:
    """How many there are, and how many images have none, which are not trained on."""
    objects = counted(sum(statistics.counts.values()), "object")
    unused = f"{statistics.empty:,} more without objects {'is' if statistics.empty == 1 else 'are'} not used"
    return f"{objects}; {unused}" if statistics.empty else objects


def train(
    recipe: str | DetectionRecipe | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    **changes: Any,
) -> TrainedRun:
    """Train a detector as a recipe says, in a new run directory; see :func:`vision_longformer.classification.train`.

    Without a recipe, ``own_objects`` is for ``data`` that is given, and otherwise ``quickstart`` for the built-in data.
    """
    recipe = recipe or DetectionRecipe.default_name(changes)
    return run.train(DetectionTask, recipe, output=output, resume=resume, callback=callback, **changes)


def resume(directory: str | Path, *, epochs: int | None = None, callback: Callback | None = None) -> TrainedRun:
    """Resume a run, or train a finished one for more epochs; see :func:`vision_longformer.classification.resume`."""
    return run.resume(DetectionTask, directory, epochs=epochs, callback=callback)
