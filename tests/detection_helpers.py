"""A detector small enough for tests in a file, and a small data set in COCO's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pycocotools import mask as rle

from vision_longformer.detection.checkpoint import save_detector
from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.dataset import open_detection
from vision_longformer.detection.models import build_detector

SMALL: dict[str, Any] = {
    "channels": 8,
    "min_size": (64,),
    "max_size": 96,
    "box_width": 16,
    "mask_channels": 8,
    "mask_layers": 1,
    "score_threshold": 0.0,
    "detections": 5,
}


def write_detector(path: Path, categories: list[str] | None, kind: str = "mask_rcnn", num_classes: int = 10) -> Path:
    """An untrained one, which finds five things in every image; it knows its categories' names if they are given."""
    torch.manual_seed(0)
    model = build_detector(DetectorConfig(kind, "test_resnet", num_classes, **SMALL))
    named = [{"id": number, "name": name} for number, name in enumerate(categories or (), 1)]
    return save_detector(model, path, info={"categories": named} if categories else None)


def write_garments(folder: Path, *splits: tuple[str, int]) -> Path:
    """Images of the built-in data with their annotations: so many of each split, into files of its name."""
    (folder / "annotations").mkdir()
    for split, count in splits:
        data = open_detection("garments:96", "train" if "train" in split else "validation")
        content: dict[str, Any] = {"images": [], "annotations": []}
        content["categories"] = [category._asdict() for category in data.categories]
        (folder / split).mkdir()
        for index in range(count):
            image, target = data.read(index)
            name = f"{index}.png"
            image.save(folder / split / name)
            content["images"].append({"id": index, "file_name": name, "width": image.width, "height": image.height})
            assert target.masks is not None
            for box, label, mask in zip(target.boxes.tolist(), target.labels.tolist(), target.masks, strict=True):
                coded = rle.encode(mask.numpy().astype("uint8", order="F"))
                left, top, right, bottom = box
                content["annotations"].append(
                    {
                        "id": len(content["annotations"]) + 1,
                        "image_id": index,
                        "category_id": data.categories[label - 1].id,
                        "bbox": [left, top, right - left, bottom - top],
                        "area": float(rle.area(coded)),
                        "iscrowd": 0,
                        "segmentation": {"size": coded["size"], "counts": coded["counts"].decode()},
                    }
                )
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder
