"""Batches to train on and images to evaluate on: which, in what order, how they are flipped, what is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import coco_annotation, coco_content, write_coco
from PIL import Image

from vision_longformer.data.order import Process
from vision_longformer.detection.augment import Augmentation, flip
from vision_longformer.detection.coco import CocoData
from vision_longformer.detection.dataset import EvalSet, TrainSet, image_tensor, training_target
from vision_longformer.detection.detections import Target


def _data(folder: Path, annotations: list[dict[str, Any]] | None = None, **options: Any) -> CocoData:
    return CocoData(write_coco(folder, coco_content(annotations)), "train", **options)


def _sample() -> tuple[Image.Image, Target]:
    """An image with a red rectangle, its only object, beside a crowd."""
    pixels = np.zeros((20, 40, 3), dtype=np.uint8)
    pixels[4:10, 2:12, 0] = 255
    masks = torch.zeros(2, 20, 40, dtype=torch.bool)
    masks[0, 4:10, 2:12] = True
    boxes = torch.tensor([[2.0, 4, 12, 10], [20, 0, 40, 20]])
    target = Target(3, boxes, torch.tensor([5, 6]), masks, torch.tensor([False, True]), torch.tensor([60.0, 400]))
    return Image.fromarray(pixels), target


def _red(image: Image.Image) -> torch.Tensor:
    return image_tensor(image)[0] > 0.5


def test_flipped_together() -> None:
    image, target = flip(*_sample())
    assert target.boxes.tolist() == [[28, 4, 38, 10], [0, 0, 20, 20]]
    assert target.masks is not None
    assert torch.equal(target.masks[0], _red(image))


def test_crowds_are_not_learned() -> None:
    learned = training_target(_sample()[1])
    assert learned["labels"].tolist() == [5]
    assert learned["boxes"].tolist() == [[2, 4, 12, 10]]
    assert (learned["masks"].dtype, learned["masks"].sum().item()) == (torch.uint8, 60)


def _many(folder: Path, images: int = 8) -> CocoData:
    annotations = [coco_annotation(1 + index, image=1 + index) for index in range(images)]
    return CocoData(write_coco(folder, coco_content(annotations, images)), "train")


def _numbers(images: list[torch.Tensor]) -> list[int]:
    """Which image it is, by its blue."""
    return [round(float(image[2, 0, 0]) * 255) for image in images]


def test_batches_are_functions_of_their_place(tmp_path: Path) -> None:
    """A resumed epoch, other workers and two processes show what a single uninterrupted run shows."""
    data = _many(tmp_path)
    options: dict[str, Any] = {"seed": 3, "batch_size": 4}
    train_set = TrainSet(data, **options)
    assert train_set.batches_per_epoch == 2
    epochs = [list(train_set.batches(epoch)) for epoch in (0, 1)]
    orders = [[number for images, _ in epoch for number in _numbers(images)] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(8))] * 2
    assert orders[0] != orders[1]
    resumed = list(TrainSet(data, workers=1, **options).batches(1, 1))
    parts = [TrainSet(data, process=Process(rank, 2), **options).batches(1, 1) for rank in (0, 1)]
    halves = [next(part) for part in parts]
    joined = [halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]]
    for images, targets in (*resumed, joined):
        for image, expected in zip(images, epochs[1][1][0], strict=True):
            assert torch.equal(image, expected)
        for target, learned in zip(targets, epochs[1][1][1], strict=True):
            assert all(torch.equal(target[name], learned[name]) for name in ("boxes", "labels", "masks"))


def test_flipped_half_of_the_time(tmp_path: Path) -> None:
    """Both ways of an image are seen, and never or always if so asked."""
    data = _many(tmp_path)
    for hflip, expected in ((0.0, {5.0}), (0.5, {5.0, 25.0}), (1.0, {25.0})):
        train_set = TrainSet(data, seed=0, batch_size=8, augmentation=Augmentation(hflip=hflip))
        _, targets = next(train_set.batches(0))
        assert {float(target["boxes"][0, 0]) for target in targets} == expected


def test_flips_of_a_run(tmp_path: Path) -> None:
    """By position in the epoch, for seed 3: ``random.Random(key).random() < 0.5``, where ``key`` is half of the first
    eight bytes, lowest first, of blake2b of "(3, 'augment', EPOCH, POSITION)"."""
    train_set = TrainSet(_many(tmp_path), seed=3, batch_size=8)
    for epoch, expected in ((0, [0, 0, 1, 1, 0, 1, 1, 1]), (1, [1, 1, 0, 0, 1, 1, 1, 0])):
        _, targets = next(train_set.batches(epoch))
        assert [int(target["boxes"][0, 0] == 25) for target in targets] == expected


def test_images_without_objects_are_not_trained_on(tmp_path: Path) -> None:
    train_set = TrainSet(_data(tmp_path), seed=0, batch_size=2)
    assert train_set.batches_per_epoch == 1
    assert sorted(_numbers(next(train_set.batches(0))[0])) == [0, 2]
    with pytest.raises(ValueError, match="batch_size is 3, but there are only 2 images to train on"):
        TrainSet(_data(tmp_path), seed=0, batch_size=3)


def test_missing_images(tmp_path: Path) -> None:
    data = _data(tmp_path)
    (tmp_path / "train/2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*2\.png, which is image 3 of .*train\.json"):
        data.read(2)
    eval_set = EvalSet(data, skip_bad=True)
    assert [target.image_id for _, target in eval_set.images()] == [1, 2]
    assert eval_set.skipped == ["2.png"]
    assert _numbers([image_tensor(image) for image, _ in eval_set.examples(3)]) == [0, 1]
    train_set = TrainSet(data, seed=0, batch_size=2, skip_bad=True)
    (batch,) = train_set.batches(0)
    assert len(batch[0]) == 2
    assert train_set.skipped == {"2.png"}
    with pytest.raises(FileNotFoundError, match="which is image 3"):
        list(EvalSet(data, workers=1).images())


def test_shares_show_every_image_once(tmp_path: Path) -> None:
    data = _many(tmp_path, 5)
    eval_sets = [EvalSet(data, process=Process(rank, 2)) for rank in (0, 1)]
    seen = [[target.image_id for _, target in eval_set.images()] for eval_set in eval_sets]
    assert seen == [[1, 3, 5], [2, 4]]
    assert [eval_set.size for eval_set in eval_sets] == [5, 5]
