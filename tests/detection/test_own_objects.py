"""Training on someone's own annotated images: what is derived from them, what is held out, and what is said of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import COCO_CATEGORIES, coco_annotation, coco_content, write_coco, write_detector, write_garments
from PIL import Image

from vision_longformer import create_model, save
from vision_longformer.cli.main import main
from vision_longformer.data.images import ImageError
from vision_longformer.detection.dataset import Subset, hold_out_images, open_detection, open_splits
from vision_longformer.detection.derive import derive
from vision_longformer.detection.estimate import estimate
from vision_longformer.detection.evaluate import eval_images, evaluate
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.detection.statistics import ObjectStatistics, object_statistics
from vision_longformer.detection.task import DetectionTask, train
from vision_longformer.hub import save_pretrained
from vision_longformer.training.callbacks import Callback
from vision_longformer.training.distributed import make_accelerator
from vision_longformer.training.recipe import load_recipe, resolve

SMALL = {
    "detector_options": {
        **{"channels": 8, "box_width": 8, "mask_channels": 8, "mask_layers": 1, "min_size": [48], "max_size": 64},
        **{"levels": [2, 3, 4], "proposals": 8, "samples": 8},
    },
    "model_options": {
        "stages": [
            {"dim": 8, "depth": 1, "heads": 2, "patch": patch, "attention": {"kind": "longformer", "window": 2}}
            for patch in (4, 2, 2, 2)
        ]
    },
    "workers": 0,
}


def statistics(sides: list[float], longer: int) -> ObjectStatistics:
    """Images of ``longer`` × 300 pixels with one square object each."""
    sizes = np.array([[longer, 300.0]] * len(sides))
    return ObjectStatistics({"tree": len(sides)}, sizes, np.ones(len(sides)), np.array(sides), np.ones(len(sides)))


def test_statistics_of_objects(tmp_path: Path) -> None:
    """Images of 40×30: a 10×10 square (side 10 of 40) twice, and a box of 40×20 (root of 800 of 40); no crowd."""
    crowd = coco_annotation(4, image=2, iscrowd=1, bbox=[0, 0, 40, 30])
    content = coco_content()
    content["annotations"].append(crowd)
    data = open_detection(str(write_coco(tmp_path, content)), "train")
    found = object_statistics(data)
    assert found.counts == {"train": 2, "dog": 0, "toothbrush": 1}
    assert found.per_image.tolist() == [2, 1]
    assert found.longer_side == 40
    assert found.sides.tolist() == pytest.approx([0.25, 800**0.5 / 40, 0.25])
    assert found.ratios.tolist() == [1, 0.5, 1]
    assert found.rows()["image sizes"] == "40 × 30 pixels"
    assert found.rows()["objects in an image"] == "1 to 2, median 1.5; 1 image has none"


@pytest.mark.parametrize(
    ("side", "longer", "limit", "expected", "cells"),
    [
        (0.05, 1000, 1333, 480, 3.0),  # 24 pixels of 5 % are 480 in all; 24 pixels are 3 cells of 8
        (0.05, 400, 1333, 416, 2.5),  # nothing is enlarged but to a multiple of 32; 20.8 pixels
        (0.01, 4000, 512, 512, 1.0),  # the machine's limit; 5 pixels, but an anchor has a cell at least
        (0.5, 1000, 1333, 320, 8.0),  # 320 pixels at least; 160 pixels, but larger anchors follow by themselves
    ],
)
def test_image_size_and_anchors(side: float, longer: int, limit: int, expected: int, cells: float) -> None:
    found = statistics([side] * 3, longer)
    assert found.image_side(limit) == expected
    assert found.anchor_scale(expected) == cells


def test_objects_that_are_too_small() -> None:
    """24 pixels of 2 % need 1,200 in all, 1,216 as a multiple of 32; in 512, 2 % are 10 pixels."""
    found = statistics([0.02] * 3, 2400)
    assert found.too_small(1216) == ""
    assert found.too_small(512) == (
        "a tenth have sides of 10 pixels or less in images of 512; cut the images into tiles, or train with "
        "--detector-options '{\"min_size\": [1216]}'"
    )


def test_settings_from_the_data(tmp_path: Path) -> None:
    """12 images of 40×30 on a CPU: batches of 2, 720 passes in 60 epochs of 6 steps."""
    annotations = [coco_annotation(number, image=number) for number in range(1, 13)]
    masks = write_coco(tmp_path / "masks", coco_content(annotations, 12))
    derived = derive({"data": str(masks), "auto": True})
    assert (derived["detector"], derived["batch_size"], derived["epochs"]) == ("mask_rcnn", 2, 60)
    assert (derived["warmup_steps"], derived["ema"], derived["eval_every"]) == (25, 0.9722, 12)
    assert derived["detector_options"]["min_size"] == [64]
    assert derived["detector_options"]["anchor_scale"] == 2.0  # 10 pixels of 40 are 16 of 64, two cells
    assert len(derived["model_options"]["stages"]) == 4
    for annotation in annotations:
        del annotation["segmentation"]
    boxes = write_coco(tmp_path / "boxes", coco_content(annotations, 12))
    assert derive({"data": str(boxes)})["detector"] == "retinanet"
    given = resolve(DetectionRecipe, "own_objects", derive, data=str(boxes), epochs=3, lr=0.5, batch_size=4)
    assert (given.epochs, given.lr, given.batch_size, given.warmup_steps) == (3, 0.5, 4, 1)
    with pytest.raises(ValueError, match="a recipe with auto needs --data"):
        derive({})


def test_backbone_of_the_starting_weights(tmp_path: Path) -> None:
    path = save(create_model("vision_longformer_small", num_classes=2), tmp_path / "small.safetensors")
    data = write_coco(tmp_path / "data")
    recipe = resolve(DetectionRecipe, "own_objects", derive, data=str(data), init=str(path))
    depths = [stage.depth for stage in recipe.detector_config(3).backbone_config.stages]
    assert (depths, recipe.lr, recipe.model) == ([1, 2, 8, 1], 2e-4, "vision_longformer_small")


@pytest.mark.parametrize(("options", "levels"), [({}, (2, 3)), ({"levels": [1, 2]}, (1, 2))])
def test_levels_of_starting_weights_with_three_stages(
    options: dict[str, Any], levels: tuple[int, ...], tmp_path: Path
) -> None:
    """The model is that of the weights, its levels those from stride 8 on unless they are given."""
    data = str(write_coco(tmp_path))
    recipe = resolve(DetectionRecipe, "own_objects", derive, data=data, init="cifar10_nano", detector_options=options)
    config = recipe.detector_config(3)
    assert (config.backbone_in_words, config.stages) == ("vision_longformer_nano", levels)


def test_settings_that_the_recipe_leaves_open(tmp_path: Path) -> None:
    """Those that 'vil detect train --help' calls derived."""
    values = derive({"data": str(write_coco(tmp_path))})
    assert set(values).difference(load_recipe(DetectionRecipe, "own_objects")) == DetectionRecipe.derived


def test_held_out_images(tmp_path: Path) -> None:
    """Two images with a dog among 20 with trains: one of either is held out with every category on both sides."""
    annotations = [coco_annotation(number, image=number) for number in range(1, 21)]
    annotations += [coco_annotation(20 + image, image=image, category_id=18) for image in (3, 4)]
    data = open_detection(str(write_coco(tmp_path, coco_content(annotations, 20))), "train")
    split = hold_out_images(data, 0.15, seed=0)
    assert (len(split.train), len(split.evaluation)) == (16, 4)  # 1 of 2 dogs, 3 of 18 others
    assert len({"2.png", "3.png"} & set(split.evaluation)) == 1
    part = Subset(data, split.evaluation)
    assert list(part.names) == list(split.evaluation)
    assert part.read(0)[1].image_id == 1 + int(part.names[0].partition(".")[0])
    assert list(part.with_objects()) == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match=r"the data no longer has lost\.png, which the run's split names"):
        Subset(data, ["lost.png"])


class Summary(Callback):
    rows: dict[str, str]

    def on_summary(self, summary: Any) -> None:
        self.rows = dict(summary)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """A folder with annotations that are not split, a run on it, and what was said at its start."""
    folder = write_garments(tmp_path_factory.mktemp("data"), ("train", 8))
    (folder / "annotations" / "instances_train.json").rename(folder / "annotations" / "instances_default.json")
    (folder / "train").rename(folder / "images")
    summary = Summary()
    run = train(output=folder / "run", callback=summary, data=str(folder), epochs=1, eval_every=1, **SMALL).run
    return folder, run, summary.rows


def test_a_run_remembers_what_it_held_out(own: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, _ = own
    split = json.loads((run / "split.json").read_text())
    assert len(split["train"]) + len(split["evaluation"]) == 8
    recipe = resolve(DetectionRecipe, str(run / "recipe.yaml"))
    again = DetectionTask(recipe, make_accelerator(recipe), run)
    assert list(again.splits.evaluation.names) == split["evaluation"]
    assert list(again.splits.train.names) == split["train"]
    assert eval_images(run, None, None) == (str(folder), "train", tuple(split["evaluation"]), False)
    assert eval_images(run, str(folder), None) == (str(folder), "train", tuple(split["evaluation"]), False)
    assert eval_images(run, str(folder), "train") == (str(folder), "train", tuple(split["train"]), False)
    assert eval_images(run, None, "test") == (str(folder), "test", None, False)
    assert evaluate(run, workers=0).images == len(split["evaluation"])


def test_the_split_of_a_run_is_read_not_drawn_again(own: tuple[Path, Path, dict[str, str]], tmp_path: Path) -> None:
    """A split that no seed would draw."""
    _, run, _ = own
    written = {"train": [f"{number}.png" for number in range(1, 8)], "evaluation": ["0.png"]}
    (tmp_path / "split.json").write_text(json.dumps(written))
    recipe = resolve(DetectionRecipe, str(run / "recipe.yaml"))
    task = DetectionTask(recipe, make_accelerator(recipe), tmp_path)
    assert (list(task.splits.train.names), list(task.splits.evaluation.names)) == (
        written["train"],
        written["evaluation"],
    )


def test_starting_weights_bring_their_split(own: tuple[Path, Path, dict[str, str]], tmp_path: Path) -> None:
    """That of a folder which 'vil hub save' made, whatever the seed, if it is of these images."""
    save(create_model("vision_longformer_nano", num_classes=2), tmp_path / "model.safetensors")
    recipe = resolve(DetectionRecipe, "own_objects", data=str(own[0]), init=str(tmp_path))
    written = {"train": [f"{number}.png" for number in range(1, 8)], "evaluation": ["0.png"]}
    (tmp_path / "split.json").write_text(json.dumps(written))
    assert open_splits(recipe).evaluation.names == ["0.png"]
    assert open_splits(recipe).how == "the same images that the run it starts from held out"
    (tmp_path / "split.json").write_text(json.dumps({"train": ["a.png"], "evaluation": ["b.png"]}))
    assert open_splits(recipe).how.startswith("newly held out: most images")


def test_what_is_said_at_the_start(own: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, rows = own
    split = json.loads((run / "split.json").read_text())
    assert rows["data"] == str(folder)
    assert rows["training"].startswith(f"{len(split['train'])} images, ")
    assert rows["training"].endswith(" objects")
    assert rows["small objects"].startswith("a tenth have sides of ")
    assert rows["evaluation"] == f"{len(split['evaluation'])} images (held out from the training images; split.json)"
    assert rows["categories"].startswith("T-shirt/top ")
    assert rows["detector"] == "mask_rcnn, images of 48 to 64 pixels"
    assert rows["starts from"] == "random weights"
    assert rows["schedule"].endswith(" images")
    assert rows["expected"].startswith("about ")


def test_images_without_objects_are_told(tmp_path: Path) -> None:
    """One of the three; the others have 1 and 2."""
    recipe = resolve(DetectionRecipe, "own_objects", DetectionTask.derive, data=str(write_coco(tmp_path)), **SMALL)
    task = DetectionTask(replace(recipe, eval_split="train"), make_accelerator(recipe))
    assert task.summary()["evaluation"] == "3 images (train)"
    assert task.summary()["training"] == "2 images, 3 objects; 1 more without objects is not used"


def test_a_folder_of_a_run_is_evaluated_on_what_was_held_out(
    own: tuple[Path, Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, run, _ = own
    split = json.loads((run / "split.json").read_text())
    saved = save_pretrained(run, tmp_path / "my_detector")
    assert eval_images(saved, str(folder), None) == (str(folder), "train", tuple(split["evaluation"]), False)
    assert eval_images(saved, str(folder), "train") == (str(folder), "train", tuple(split["train"]), False)
    other = write_coco(tmp_path / "other")
    assert eval_images(saved, str(other), None) == (str(other), "validation", None, False)


def test_evaluation_of_a_run_by_its_directory(
    own: tuple[Path, Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run, _ = own
    main(["detect", "evaluate", str(run), "--workers", "0"])
    assert f"{run} on {folder}, images that the run held out" in capsys.readouterr().out


def test_a_run_that_skips_bad_images_is_evaluated_as_it_was_trained(
    own: tuple[Path, Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A held-out image cannot be read; on other data such an image stops the command."""
    data, other = (shutil.copytree(own[0], tmp_path / name) for name in ("data", "other"))
    run = data / "run"
    held = json.loads((run / "split.json").read_text())["evaluation"]
    for folder in (data, other):
        (folder / "images" / held[0]).write_bytes(b"no image")
    text = (run / "recipe.yaml").read_text().replace(str(own[0]), str(data))
    (run / "recipe.yaml").write_text(text.replace("skip_bad: false", "skip_bad: true"))
    main(["detect", "evaluate", str(run), "--workers", "0", "--json"])
    reported = json.loads(capsys.readouterr().out)
    assert (reported["images"], reported["skipped"]) == (len(held) - 1, 1)
    main(["detect", "evaluate", str(run), "--workers", "0"])
    assert f"\n1 image could not be read and was skipped: {held[0]}\n" in capsys.readouterr().out
    assert eval_images(run / "best.onnx", None, None).skip_bad
    for options in ({"skip_bad": False}, {"data": str(other)}):
        with pytest.raises(ImageError, match=rf"{held[0]} cannot be read"):
            evaluate(run, workers=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("predict {run} {image}", "is a detector, which is for 'vil detect predict' and 'vil detect evaluate'"),
        ("evaluate {run}", "is a detector, which is for 'vil detect predict' and 'vil detect evaluate'"),
        ("detect predict cifar10_nano {image}", "is a classifier, which is for 'vil predict' and 'vil evaluate'"),
        ("detect evaluate cifar10_nano --data {data}", "is a classifier, which is for 'vil predict' and"),
        ("detect predict {run}-1 {image}", "there is no file or run directory {run}-1; did you mean {run}?"),
        ("detect train --resume {run}-1", "there is no directory {run}-1; did you mean {run}?"),
        ("detect train {data}", "{data} is not a recipe; did you mean --data {data}?"),
        ("train {data}", "{data} is not a recipe; did you mean --data {data}?"),
    ],
)
def test_mistakes_with_runs_and_folders(
    command: str, sentence: str, own: tuple[Path, Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"data": own[0], "run": own[1], "image": own[0] / "images" / "0.png"}
    with pytest.raises(SystemExit, match="2"):
        main(command.format(**names).split())
    assert sentence.format(**names) in " ".join(capsys.readouterr().err.split())


def test_categories_that_are_not_evaluated(
    own: tuple[Path, Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named at the start of the run and by the evaluation, which has a dash for them."""
    folder, run, rows = own
    content = json.loads((folder / "annotations" / "instances_default.json").read_text())
    held = json.loads((run / "split.json").read_text())["evaluation"]
    ids = {image["id"] for image in content["images"] if image["file_name"] in held}
    there = {one["category_id"] for one in content["annotations"] if one["image_id"] in ids and not one["iscrowd"]}
    missing = [one["name"] for one in content["categories"] if one["id"] not in there]
    assert len(missing) > 1
    assert rows["warning"] == f"not in the evaluation images: {', '.join(missing)}"
    main(["detect", "evaluate", str(run), "--workers", "0", "--per-category"])
    printed = capsys.readouterr().out
    assert rows["warning"] in " ".join(printed.split())
    assert [f"{missing[0]} – –"] == [line for line in map(_spaced, printed.splitlines()) if line.startswith(missing[0])]


def _spaced(line: str) -> str:
    return " ".join(line.split())


def test_a_dry_run_of_own_objects(
    own: tuple[Path, Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"--{key.replace('_', '-')}={json.dumps(value)}" for key, value in SMALL.items()]
    main(["detect", "train", "--data", str(own[0]), "--epochs", "3", "--dry-run", *options])
    printed = capsys.readouterr().out
    assert "auto: true\ndetector: mask_rcnn" in printed
    training = len(json.loads((own[1] / "split.json").read_text())["train"])
    assert f"{training} images of 10 categories" in printed
    for text in ("Schedule", "one image, forward and backward", "with 2 images at a time"):
        assert text in printed
    assert not list(tmp_path.iterdir())


def test_estimates_scale_with_the_run(tmp_path: Path) -> None:
    plan = estimate(resolve(DetectionRecipe, "quickstart", data=str(tmp_path / "none"), steps=9, **SMALL))
    assert plan.data == "117,266 images of 80 categories (assumed; the data were not found)"
    assert (plan.steps, plan.images) == (9, 4)
    assert plan.bytes == plan.fixed_bytes + 4 * plan.trial.activation_bytes > 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1.xml": "<annotation/>"}, r"is in the format of Pascal VOC \(\.xml\), not in COCO's; 'python examples/to_c"),
        ({"Annotations/1.xml": "<annotation/>"}, r"Pascal VOC \(\.xml\)"),
        ({"1.json": '{"shapes": [], "imagePath": "1.jpg"}'}, r"labelme \(\.json\), not in COCO's; 'python examples"),
    ],
)
def test_other_formats_say_how_to_convert(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        train(data=str(tmp_path), output=tmp_path / "run")


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("result.json", "images"),
        ("annotations/instances_default.json", "images/default"),
        ("train/_annotations.coco.json", "train"),
    ],
)
def test_where_other_tools_put_annotations(file: str, images: str, tmp_path: Path) -> None:
    data = open_detection(str(write_coco(tmp_path, file=file, images=images)), "train")
    assert [category.name for category in data.categories] == [
        one["name"] for one in sorted(COCO_CATEGORIES, key=lambda one: one["id"])
    ]
    assert isinstance(data.read(0)[0], Image.Image)


def test_a_detector_elsewhere_is_evaluated_on_what_is_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not in a run directory.* give --data DATA\. .* RUN/best\.onnx by default"):
        eval_images(write_detector(tmp_path / "detector.safetensors", ["tree"], num_classes=1), None, None)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        eval_images(tmp_path / "none.safetensors", None, None)
    assert eval_images(tmp_path / "detector.onnx", "trees", None) == ("trees", "validation", None, False)
