"""How good a classifier is on a data set, over any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed, nn

from ..data.loading import Batch, Progress
from ..data.order import Process
from ..errors import check_choice
from ..export.runtime import is_exported
from ..training.distributed import autocast
from ..training.recipe import PRECISIONS
from .dataset import EvalSet, build_eval_set, find_images
from .export import open_classifier
from .metrics import Meter, Result


def evaluate(
    checkpoint: str | Path,
    data: str | None = None,
    split: str | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    batch_size: int = 64,
    workers: int = 2,
    precision: str = "fp32",
    skip_bad_images: bool | None = None,
    progress: Progress | None = None,
) -> Result:
    """Accuracy and loss of a checkpoint on the ``split`` of ``data``, with its own preprocessing.

    Under ``torchrun``, each process takes a share, every image is counted once, and all return the whole result.

    Args:
        checkpoint: a .safetensors file of ours, a run directory, or a .onnx, .xml or .pt2 file exported from one.
        data: as in recipes: a folder, .npz, .tar or .zip file, shards, hfds/…, torch/…, or the built-in fashion-mnist;
            that of the checkpoint's run if None.
        split: which part of it; the run's evaluation images, or "validation" of other data, if None.
        size: (height, width) that the model sees of each image, or the side of a square; as in training if None.
        batch_size: images at a time in each process.
        workers: data-loading processes.
        precision: fp32, bf16 or fp16.
        skip_bad_images: leave out images that cannot be read, instead of stopping; if None, as the run did on its own
            data, and not on other data.
        progress: called with what is done and what there is in all.
    """
    check_choice("precision", precision, PRECISIONS)
    if is_exported(checkpoint) and precision != "fp32":
        raise ValueError(f"{checkpoint} computes in the precision that it was exported with; leave out {precision}")
    where = find_images(checkpoint, data, split)
    model, preprocessing, named = open_classifier(checkpoint, size)
    state = PartialState(cpu=not torch.cuda.is_available())
    eval_set = build_eval_set(
        where.open(preprocessing, named),
        preprocessing,
        batch_size=batch_size,
        workers=workers,
        skip_bad_images=where.skip_bad_images if skip_bad_images is None else skip_bad_images,
        process=Process(state.process_index, state.num_processes),
    )
    result = evaluate_model(model.to(state.device), eval_set, state.device, precision, progress)
    if not result.samples:
        raise ValueError(f"none of the {len(result.skipped)} images of {where.data} could be read")
    return result


def evaluate_model(
    model: nn.Module,
    eval_set: EvalSet,
    device: torch.device,
    precision: str = "fp32",
    progress: Progress | None = None,
    group: distributed.ProcessGroup | None = None,
) -> Result:
    """Accuracy and loss of a model, over all processes of a group; the model is left in the mode it was in.

    Without gradients, but not in inference mode: what the attention caches there could not be trained with later.
    """
    training = model.training
    meter = Meter(len(eval_set.classes), device)
    processes = distributed.get_world_size(group) if distributed.is_initialized() else 1
    batches = eval_set.batches()
    if processes > 1:
        batches = pad_to_longest(batches, eval_set.shape, device, group)
    model.eval()
    done = 0
    try:
        with torch.no_grad(), autocast(device, precision):
            for images, labels in batches:
                logits = model(images.to(device, non_blocking=True))
                meter.add(logits[: len(labels)], labels.to(device, non_blocking=True))
                done += len(labels)
                if progress is not None:
                    progress(min(done * processes, eval_set.size), eval_set.size)
    finally:
        model.train(training)
    meter.reduce(group)
    return meter.result()._replace(classes=eval_set.classes, skipped=_names_of_all(eval_set.skipped, group))


def _names_of_all(own: list[str], group: distributed.ProcessGroup | None) -> tuple[str, ...]:
    """The names that the processes of a group have, in order."""
    if not distributed.is_initialized():
        return tuple(own)
    shares: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(shares, own, group=group)
    return tuple(sorted(chain.from_iterable(shares)))


def pad_to_longest(
    batches: Iterable[Batch],
    shape: tuple[int, int, int],
    device: torch.device,
    group: distributed.ProcessGroup | None = None,
) -> Iterator[Batch]:
    """As many batches in each process as in the one with the most: a sharded model runs in all processes or in none.

    The extra ones are an image of ``shape`` (C, H, W) and no labels, to be run and not counted.
    """
    own = iter(batches)
    extra = torch.zeros(1, *shape), torch.zeros(0, dtype=torch.int64)
    while True:
        batch = next(own, None)
        remaining = torch.tensor(int(batch is not None), device=device)
        distributed.all_reduce(remaining, group=group)
        if not remaining:
            return
        yield extra if batch is None else batch
