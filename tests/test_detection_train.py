"""Training detectors by the loop of classification: what a run leaves, and that it goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import StopAt

from vision_longformer.cli.main import main
from vision_longformer.detection.detector import load_named
from vision_longformer.detection.train import DETECTION, resume, train
from vision_longformer.training.recipes import recipe_names
from vision_longformer.training.run_directory import RunDirectory, load_state
from vision_longformer.training.schedules import learning_rate

NAMES = recipe_names("detection")

SMALL = {"channels": 8, "box_width": 8, "mask_channels": 8, "mask_layers": 1, "min_size": [48, 64], "max_size": 96}

STAGES = [
    {"dim": 8, "depth": 1, "heads": 2, "patch": patch, "attention": {"kind": "longformer", "window": 2}}
    for patch in (4, 2, 2, 2)
]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of the built-in data in COCO's form, four of them for evaluation."""
    from pycocotools import mask as rle

    from vision_longformer.detection.dataset import open_detection

    folder = tmp_path_factory.mktemp("coco")
    for split, count in (("train", 8), ("validation", 4)):
        data = open_detection("garments:96", split)
        content: dict[str, Any] = {"images": [], "annotations": []}
        content["categories"] = [category._asdict() for category in data.categories]
        (folder / split).mkdir()
        for index in range(count):
            image, target = data.read(index)
            image.save(folder / split / f"{index}.png")
            content["images"].append(
                {"id": index, "file_name": f"{index}.png", "width": image.width, "height": image.height}
            )
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
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def settings(data: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": str(data),
        "model_options": {"stages": STAGES},
        "detector_options": SMALL,
        "epochs": 2,
        "batch_size": 2,
        "workers": 0,
        "log_every": 2,
        "neighbours": "random",
        "drop_path": 0.2,
        "warmup_steps": 2,
        **changes,
    }


@pytest.fixture(scope="module")
def trained(coco: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("quickstart", output=tmp_path_factory.mktemp("runs") / "whole", **settings(coco)).run


def test_a_run_leaves_a_detector(trained: Path) -> None:
    model, config, categories, named = load_named(trained / "best.safetensors")
    assert named
    assert (config.kind, config.num_classes) == ("mask_rcnn", 10)
    assert categories[0].name == "T-shirt/top"
    records = RunDirectory(trained).records()
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6, 8]
    parts = ("objectness", "rpn_box_reg", "classifier", "box_reg", "mask")
    logged = records[0]
    assert logged["loss"] == pytest.approx(sum(logged[part] for part in parts), rel=1e-4)
    assert {"box_AP", "box_AP50", "mask_AP", "mask_AP50"} <= set(records[-1]["evaluation"])
    assert (trained / "predictions.png").stat().st_size > 10_000
    with torch.no_grad():
        assert {"boxes", "labels", "scores", "masks"} <= set(model([torch.rand(3, 50, 70)])[0])


def test_a_killed_run_ends_with_the_same_weights(trained: Path, coco: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("quickstart", output=tmp_path / "run", observer=StopAt(6), **settings(coco))
    resumed = resume(tmp_path / "run")
    one, other = (load_state(path) for run in (trained, resumed.run) if (path := RunDirectory(run).latest()))
    for part in ("model", "average"):
        assert [name for name in one[part] if not torch.equal(one[part][name], other[part][name])] == []


def test_retinanet_learns_without_masks(coco: Path, tmp_path: Path) -> None:
    changes = {"detector": "retinanet", "detector_options": {"channels": 8, "min_size": [64], "max_size": 96}}
    result = train("quickstart", output=tmp_path / "run", **settings(coco, **changes, epochs=1))
    record = RunDirectory(result.run).records()[0]
    assert record["loss"] == pytest.approx(record["classification"] + record["bbox_regression"], rel=1e-4)
    assert "mask_AP" not in result.results


@pytest.mark.parametrize("name", NAMES)
def test_recipes_follow_the_paper(name: str) -> None:
    recipe = DETECTION.resolve(name)
    if name == "quickstart":
        return
    kind, size, length = name.rsplit("_", 2)
    peak = 8e-5 if size == "base" else 1e-4
    total, drops = {"1x": (90_000, (60_000, 80_000)), "3x": (270_000, (180_000, 240_000))}[length]
    assert (recipe.detector, recipe.model) == (kind, f"vision_longformer_{size}")
    assert (recipe.steps, recipe.batch_size, recipe.clip_norm, recipe.weight_decay) == (total, 16, 1.0, 0.05)
    rates = [learning_rate(recipe, step, total, recipe.count_warmup(7330)) for step in (0, 1000, drops[0], drops[1])]
    assert rates == pytest.approx([0.01 * peak, peak, 0.1 * peak, 0.01 * peak])
    assert learning_rate(recipe, drops[0] - 1, total, 1000) == pytest.approx(peak)
    sizes = (800,) if length == "1x" else (640, 672, 704, 736, 768, 800)
    assert (recipe.config(80).min_size, recipe.config(80).max_size) == (sizes, 1333)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "unknown recipe 'nosuch'"),
        (["--detctor", "retinanet"], "unknown key 'detctor'; did you mean 'detector'"),
        (["--data", "nowhere"], "there is no data nowhere"),
        (["--init", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["--detector", "yolo"], "unknown detector 'yolo'"),
        (["--detector_options", "{chanels: 8}"], "unknown detector option 'chanels'; did you mean 'channels'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["detect", "train", *arguments])
    assert exit_code.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
