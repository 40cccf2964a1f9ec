"""A large scene of garments by one detector: streamed, in tiles and, where it fits, whole; and errors at the seams.

    python scripts/compare_large_detection.py runs/detect-quickstart-1 --side 8192 --tile 320

The scene is made of the garments and photos that are kept for validation, at the scale of the training. Errors are
counted on annotated objects, apart for those that a border of some tile crosses and for the others:

- found: exactly one detection of its label has an IoU of 0.5 or more with it;
- lost: no detection has;
- split: two or more detections of its label lie in it, each with half of its own area or more;
- cut: one of these ends at a border of a tile, though the object goes on. Of detections that know of no tiles, some end
  there by chance.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vision_longformer.data.images import decode_image
from vision_longformer.detection import load_detector, stream_detections
from vision_longformer.detection.detections import Detection
from vision_longformer.detection.garments import (
    LARGEST_SCALE,
    Placed,
    cutouts,
    paint,
    place,
    random_background,
    random_sprite,
    visible_owners,
)
from vision_longformer.detection.predict import TOUCHING, predict_image, tiles

PHOTO = 1024
"""Side of the parts of photos that a background is made of."""

DENSITY = 7.5 / 320**2
"""Garments per pixel, as in the quick start's images."""

SAME = 0.5

Boxes = np.ndarray
"""(n, 4) as left, top, right, bottom."""


def make_scene(side: int, seed: int) -> tuple[np.ndarray, Boxes, np.ndarray]:
    """A square image (side, side, 3), and boxes and labels (n,) of what is seen in it."""
    random = np.random.default_rng(seed)
    scene = np.zeros((side, side, 3), dtype=np.uint8)
    for top in range(0, side, PHOTO):
        for left in range(0, side, PHOTO):
            part = scene[top : top + PHOTO, left : left + PHOTO]
            part[:] = random_background(False, PHOTO * 4 // 3 + 1, random)[: part.shape[0], : part.shape[1]]
    sprites = [random_sprite(cutouts(False), random, LARGEST_SCALE) for _ in range(round(DENSITY * side**2))]
    placed, owners = visible_owners(place(sprites, side, side, random), side, side)
    boxes = []
    for number, one in enumerate(placed, 1):
        (rows, columns), _ = one.windows(side, side)
        seen = owners[rows, columns] == number
        down, across = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
        left, right = columns.start + across[0], columns.start + across[-1] + 1
        boxes.append((left, rows.start + down[0], right, rows.start + down[-1] + 1))
    for top in range(0, side, PHOTO):  # some rows at a time, since painting takes 12 bytes per pixel
        bottom = min(top + PHOTO, side)
        near = [Placed(one.sprite, one.top - top, one.left) for one in placed if _touches(one, top, bottom)]
        scene[top:bottom] = paint(scene[top:bottom], near)
    return scene, np.array(boxes, dtype=float), np.array([one.sprite.label for one in placed])


def _touches(one: Placed, top: int, bottom: int) -> bool:
    return one.top < bottom and one.top + one.sprite.opacity.shape[0] > top


# Counting


def tile_borders(side: int, tile: int) -> np.ndarray:
    """Where tiles begin or end inside a square image, in both directions."""
    return np.array(sorted({edge for part in tiles(side, side, tile) for edge in (part.left, part.right)} - {0, side}))


def crossed(boxes: Boxes, borders: np.ndarray) -> np.ndarray:
    """Which boxes a border of some tile crosses."""
    inside = np.zeros(len(boxes), dtype=bool)
    for edge in borders:
        inside |= (boxes[:, 0] < edge) & (boxes[:, 2] > edge)
        inside |= (boxes[:, 1] < edge) & (boxes[:, 3] > edge)
    return inside


def common_areas(one: Boxes, other: Boxes) -> np.ndarray:
    """(n, m)"""
    lower, upper = np.maximum(one[:, None, :2], other[None, :, :2]), np.minimum(one[:, None, 2:], other[None, :, 2:])
    return np.clip(upper - lower, 0, None).prod(2)


def outcomes(
    boxes: Boxes, labels: np.ndarray, found: Sequence[Detection], borders: np.ndarray
) -> dict[str, np.ndarray]:
    """For each annotated object whether it is found, lost, split or cut."""
    other = np.array([one.box for one in found]).reshape(-1, 4)
    same = labels[:, None] == np.array([one.label for one in found], dtype=int)[None]
    common = common_areas(boxes, other)
    area, other_area = ((one[:, 2:] - one[:, :2]).prod(1) for one in (boxes, other))
    iou = common / (area[:, None] + other_area[None] - common)
    hits = ((iou >= SAME) & same).sum(1)
    inside = (common >= SAME * other_area[None]) & same
    pieces = inside.sum(1)
    ends = np.abs(other[:, :, None] - borders).min(2, initial=np.inf) <= TOUCHING
    goes_on = np.concatenate([other[None, :, :2] - boxes[:, None, :2], boxes[:, None, 2:] - other[None, :, 2:]], 2)
    cut = (inside & (ends[None] & (goes_on > 2 * TOUCHING)).any(2)).any(1)
    return {"found": (hits == 1) & (pieces < 2), "lost": hits == 0, "split": pieces >= 2, "cut": cut}


def compare(one: Sequence[Detection], other: Sequence[Detection]) -> dict[str, float]:
    """Largest differences between two lists of detections, which should be the same."""
    pairs = list(zip(one, other, strict=False))
    boxes = [abs(a - b) for first, second in pairs for a, b in zip(first.box, second.box, strict=True)]
    masks = [(first.mask, second.mask) for first, second in pairs if first.mask is not None]
    unlike = [a for a, b in masks if (a.top, a.left) != (b.top, b.left) or not np.array_equal(a.pixels, b.pixels)]
    return {
        "objects": len(one),
        "objects of the other": len(other),
        "labels that differ": sum(first.label != second.label for first, second in pairs),
        "score": max((abs(first.score - second.score) for first, second in pairs), default=0.0),
        "box, pixels": max(boxes, default=0.0),
        "masks with another pixel": len(unlike),
    }


# Running


def run(name: str, model: torch.nn.Module, image: Image.Image, options: argparse.Namespace) -> list[Detection]:
    """What one of the ways finds, with its processor time and the peak of the process so far."""
    start = time.process_time()
    if name == "streamed":
        found = stream_detections(
            model, np.asarray(image), threshold=options.threshold, memory=options.memory, storage=options.storage
        )
    else:
        tile = options.tile if name == "tiled" else None
        found = predict_image(model, image, threshold=options.threshold, tile=tile)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    seconds = time.process_time() - start
    print(
        f"{name}: {len(found)} objects, {seconds:.0f} s of the processor, peak of the process {peak:.2f} GB", flush=True
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--tile", type=int, default=320)
    parser.add_argument("--ways", default="streamed,tiled", help="of streamed, tiled and whole, in this order")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--memory", default="3GB")
    parser.add_argument("--storage")
    parser.add_argument("--proposals", type=int, default=64, help="for each 320×320 pixels")
    parser.add_argument("--detections", type=int, help="of the image; twice the number of garments by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", help="a PNG file for the scene, which is read instead of made if it exists")
    parser.add_argument("--json", help="a file for the counts")
    options = parser.parse_args()
    path = None if options.scene is None else Path(options.scene)
    if path is not None and path.exists():
        scene = np.asarray(decode_image(path))
        stored = np.load(path.with_suffix(".npz"))
        boxes, labels = stored["boxes"], stored["labels"]
    else:
        scene, boxes, labels = make_scene(options.side, options.seed)
        if path is not None:
            Image.fromarray(scene).save(path, compress_level=1)
            np.savez(path.with_suffix(".npz"), boxes=boxes, labels=labels)
    side, image = len(scene), Image.fromarray(scene)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{len(boxes)} garments in {side}×{side} pixels; peak of the process so far {peak:.2f} GB", flush=True)
    limits = {"proposals": options.proposals * side**2 // 320**2, "detections": options.detections or 2 * len(boxes)}
    whole = load_detector(options.checkpoint, scale=1.0, **limits)
    of_tiles = load_detector(options.checkpoint, scale=1.0, proposals=options.proposals * options.tile**2 // 320**2)
    found = {
        name: run(name, of_tiles if name == "tiled" else whole, image, options) for name in options.ways.split(",")
    }
    report(found, boxes, labels, tile_borders(side, options.tile), options.json)


def report(
    found: dict[str, list[Detection]], boxes: Boxes, labels: np.ndarray, borders: np.ndarray, path: str | None
) -> None:
    """The counts as lines, and as a file if one is asked for."""
    counts: dict[str, dict[str, float]] = {}
    at_border = crossed(boxes, borders)
    results = {name: outcomes(boxes, labels, detections, borders) for name, detections in found.items()}
    for place_name, chosen in (("crossed by a border of a tile", at_border), ("not crossed", ~at_border)):
        for name, result in results.items():
            counts[f"{name}, {place_name}"] = {
                "objects": int(chosen.sum()),
                **{outcome: int(which[chosen].sum()) for outcome, which in result.items()},
            }
    if {"streamed", "tiled"} <= results.keys():
        for one, other in (("streamed", "tiled"), ("tiled", "streamed")):
            only = results[one]["found"] & ~results[other]["found"]
            key = f"found {one} but not {other}"
            counts[key] = {"crossed": int(only[at_border].sum()), "not crossed": int(only[~at_border].sum())}
    if {"streamed", "whole"} <= results.keys():
        counts["streamed against whole"] = compare(found["whole"], found["streamed"])
    for key, values in counts.items():
        print(f"{key}: " + ", ".join(f"{name} {value:g}" for name, value in values.items()))
    if path is not None:
        Path(path).write_text(json.dumps(counts, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
