"""Training detectors: what a run leaves, that it resumes exactly, and that its settings have their effect."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import StopAt, small_detector, write_garments
from torch import nn

from vision_longformer.cli.detect.train import _print_end
from vision_longformer.cli.main import main
from vision_longformer.detection import task as task_module
from vision_longformer.detection.detectors import build_detector
from vision_longformer.detection.evaluate import evaluate
from vision_longformer.detection.export import open_detector
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.detection.task import DetectionTask, resume, train
from vision_longformer.models.vision_longformer import Block
from vision_longformer.training.checkpointer import latest_checkpoint, load_state
from vision_longformer.training.distributed import make_accelerator
from vision_longformer.training.optimizer import parameter_groups
from vision_longformer.training.recipe import resolve, to_yaml
from vision_longformer.training.run import TrainedRun
from vision_longformer.training.run_directory import RunDirectory

LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)

SMALL = {"channels": 8, "box_width": 8, "mask_channels": 8, "mask_layers": 1, "min_size": [48, 64], "max_size": 96}

STAGES = [
    {"dim": 8, "depth": 1, "heads": 2, "patch": patch, "attention": {"kind": "longformer", "window": 2}}
    for patch in (4, 2, 2, 2)
]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_garments(tmp_path_factory.mktemp("coco"), ("train", 8), ("validation", 4))


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
    model, config, categories, named = open_detector(trained / "best.safetensors")
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
        train("quickstart", output=tmp_path / "run", callback=StopAt(6), **settings(coco))
    resumed = resume(tmp_path / "run")
    one, other = (
        load_state(path) for run in (trained, resumed.run) if (path := latest_checkpoint(run / "checkpoints"))
    )
    for part in ("model", "average"):
        assert [name for name in one[part] if not torch.equal(one[part][name], other[part][name])] == []


def test_retinanet_learns_without_masks(coco: Path, tmp_path: Path) -> None:
    changes = {"detector": "retinanet", "detector_options": {"channels": 8, "min_size": [64], "max_size": 96}}
    result = train("quickstart", output=tmp_path / "run", **settings(coco, **changes, epochs=1))
    record = RunDirectory(result.run).records()[0]
    assert record["loss"] == pytest.approx(record["classification"] + record["bbox_regression"], rel=1e-4)
    assert "mask_AP" not in result.best


def test_run_directories_are_apart_from_those_of_classifiers(
    coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tasks have a quick start; the README's runs/quickstart-1 is a classifier's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DetectionTask, "draw", lambda self, folder: None)
    brief = settings(coco, epochs=1, steps=1)
    Path("trees.yaml").write_text("base: quickstart\n")
    runs = [train(recipe, **brief).run for recipe in ("quickstart", "quickstart", "trees.yaml")]
    assert runs == [Path("runs/detect-quickstart-1"), Path("runs/detect-quickstart-2"), Path("runs/detect-trees-1")]


def test_gradient_checkpointing(coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs once more in the backward pass, and the step is the same."""
    monkeypatch.setattr(DetectionTask, "draw", lambda self, folder: None)
    calls: dict[bool, Counter[Block]] = {False: Counter(), True: Counter()}
    weights = {}
    forward = Block.forward
    for enabled, counter in calls.items():

        def counted(self: Block, *inputs: Any, counter: Counter[Block] = counter) -> torch.Tensor:
            counter[self] += self.training
            return forward(self, *inputs)

        monkeypatch.setattr(Block, "forward", counted)
        brief = settings(coco, epochs=1, steps=1, batch_size=1, optimizer="sgd", lr=1.0, warmup_factor=1.0, ema=None)
        run = train("quickstart", output=tmp_path / str(enabled), grad_checkpointing=enabled, **brief).run
        weights[enabled] = open_detector(run / "last.safetensors").model.state_dict()
    trained = {enabled: [count for count in counter.values() if count] for enabled, counter in calls.items()}
    assert trained == {False: [1] * len(STAGES), True: [2] * len(STAGES)}
    for name, expected in weights[False].items():
        torch.testing.assert_close(weights[True][name], expected)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_of_the_evaluation(
    precision: str, dtype: torch.dtype, coco: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the task itself: accelerate sees to it only in models that it has wrapped, and not in sharded ones."""
    recipe = resolve(DetectionRecipe, "quickstart", **settings(coco, precision=precision))
    task = DetectionTask(recipe, make_accelerator(recipe))
    dtypes = set()
    forward = nn.Linear.forward

    def recorded(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        dtypes.add(forward(self, x).dtype)
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", recorded)
    results = task.evaluate(lambda done, total: None)
    assert dtypes == {dtype}
    assert 0 <= results["box_AP"] <= 100


def test_bad_images_are_named_once_and_counted(coco: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of eight to train on and one of four to evaluate on cannot be read."""
    data = shutil.copytree(coco, tmp_path / "coco")
    for split in ("train", "validation"):
        (data / split / "1.png").write_bytes(b"")
    recipe = resolve(DetectionRecipe, "quickstart", **settings(data, skip_bad=True))
    task = DetectionTask(recipe, make_accelerator(recipe))
    named = [f"{part}: 1 image could not be read and was skipped: 1.png" for part in ("training", "evaluation")]
    for epoch in (0, 1):
        assert len(list(task.batches(epoch, 0))) == 4
        results = task.evaluate(lambda done, total: None)
        assert (results["skipped"], results["skipped_in_training"]) == (1, 1)
        assert caplog.messages == named
    assert task.summary()["training"].startswith("8 images as found, ")


BIASES = ("table", "local_to_global", "global_to_local", "global_to_global")

EXEMPT_MATRICES = {
    "vil": {
        *(f"stages.{stage}.global_tokens" for stage in (0, 1, 2)),
        *(f"stages.{stage}.blocks.0.attn.bias.{name}" for stage in (0, 1, 2) for name in BIASES),
        *(f"stages.2.blocks.1.attn.bias.{name}" for name in BIASES),
        "stages.3.blocks.0.attn.bias.table",
    },
    "vil_ape": {
        *(f"stages.{stage}.global_tokens" for stage in (0, 1, 2)),
        *(f"stages.{stage}.position.global_tokens" for stage in (0, 1, 2)),
        *(f"stages.{stage}.position.{axis}" for stage in (0, 1, 2, 3) for axis in ("rows", "columns")),
    },
}
"""Of the backbone; its last stage has no global tokens, its third has two blocks with relative position."""


@pytest.mark.parametrize("backbone", EXEMPT_MATRICES)
def test_tokens_and_tables_of_a_detector_do_not_decay(backbone: str) -> None:
    """With ``decay: matrices``, weights of linear layers and convolutions decay, and nothing else does."""
    model = small_detector("mask_rcnn", backbone=backbone)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, exempt = (group["params"] for group in parameter_groups(model, 0.05, "matrices"))
    layers = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, LAYERS)}
    assert {names[parameter] for parameter in decayed} == layers
    matrices = {names[parameter] for parameter in exempt if parameter.dim() > 1}
    assert matrices == {f"backbone.body.model.{name}" for name in EXEMPT_MATRICES[backbone]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_one_detector(coco: Path, tmp_path: Path, strategy: str) -> None:
    """What is saved scores what the processes measured together, each on its share of the images."""
    options = {**SMALL, "score_threshold": 0.0}
    recipe = resolve(
        DetectionRecipe, "quickstart", **settings(coco, strategy=strategy, detector_options=options, ema=None)
    )
    (tmp_path / "mine.yaml").write_text(to_yaml(recipe))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "vision_longformer"]
    command = ["detect", "train", str(tmp_path / "mine.yaml"), "--output", str(tmp_path / "run")]
    subprocess.run([*launch, *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    records = RunDirectory(tmp_path / "run").records()
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6, 8]
    alone = evaluate(tmp_path / "run" / "last.safetensors", str(coco), workers=0)
    assert alone.images == 4
    assert alone.boxes.overall["AR100"] > 0
    assert records[-1]["evaluation"]["box_AR100"] == pytest.approx(alone.boxes.overall["AR100"], abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "unknown recipe 'nosuch'"),
        (["--detctor", "retinanet"], "unknown option '--detctor'; did you mean '--detector'"),
        (["--data", "nowhere"], "there is no data nowhere"),
        (["--init", "nowhere.safetensors"], "there is no file or run directory nowhere.safetensors"),
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


def test_boxes_alone_are_not_enough_for_mask_rcnn(coco: Path, tmp_path: Path) -> None:
    data = shutil.copytree(coco, tmp_path / "boxes")
    for path in data.rglob("*.json"):
        content = json.loads(path.read_text())
        for annotation in content["annotations"]:
            del annotation["segmentation"]
        path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="has boxes but no masks, which mask_rcnn learns from; use --detector retinanet"
    ):
        train("quickstart", output=tmp_path / "run", **settings(data))
    assert not (tmp_path / "run").exists()


def test_splits_have_the_same_categories(coco: Path, tmp_path: Path) -> None:
    data = shutil.copytree(coco, tmp_path / "coco")
    path = data / "annotations" / "instances_validation.json"
    content = json.loads(path.read_text())
    content["categories"][3]["name"] = "Gown"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"the categories of train and validation in .* differ; use one list"):
        train("quickstart", output=tmp_path / "run", **settings(data))


def test_frozen_stages_do_not_train(coco: Path, tmp_path: Path) -> None:
    """Patch embedding and blocks of the first two stages stay as they are, without drop path; the others learn."""
    recipe = resolve(DetectionRecipe, "quickstart", **settings(coco, freeze=2, epochs=1, decay="all"))
    start = DetectionTask(recipe, make_accelerator(recipe)).model
    frozen = {name for name, parameter in start.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in start.named_parameters() if ".stages.0." in name or ".stages.1." in name}
    assert any("patch_embed" in name for name in frozen)
    start.train()
    assert [stage.training for stage in start.backbone.body.model.stages] == [False, False, True, True]
    end = open_detector(train(recipe, output=tmp_path / "run").run / "best.safetensors").model.state_dict()
    changed = {name for name, value in start.state_dict().items() if not torch.equal(value, end[name])}
    assert not changed & frozen
    assert {name.split(".")[4] for name in changed if ".stages." in name} == {"2", "3"}


def test_too_many_frozen_stages(coco: Path) -> None:
    recipe = resolve(DetectionRecipe, "quickstart", **settings(coco, freeze=5))
    with pytest.raises(ValueError, match="freeze is 5, but the backbone has 4 stages"):
        DetectionTask(recipe, make_accelerator(recipe))


def test_patience_ends_a_run(coco: Path, tmp_path: Path) -> None:
    """With a rate of nearly nothing nothing becomes better after the first evaluation."""
    changes = settings(coco, epochs=6, lr=1e-12, patience=2, drop_path=0.0)
    records = RunDirectory(train("quickstart", output=tmp_path / "run", **changes).run).records()
    assert [record["epoch"] for record in records if "evaluation" in record] == [1, 2, 3]


def test_saving_fetches_no_pretrained_weights(coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"channels": 8, "min_size": [64], "max_size": 96}
    changes = {"detector": "retinanet", "detector_options": options, "model": "test_resnet", "model_options": {}}
    recipe = resolve(DetectionRecipe, "quickstart", **settings(coco, **changes))
    task = DetectionTask(recipe, make_accelerator(recipe))
    task.recipe = replace(recipe, model_options={"pretrained": True})
    built = []
    monkeypatch.setattr(task_module, "build_detector", lambda config: built.append(config) or build_detector(config))
    task.save(tmp_path / "best.safetensors")
    assert [config.backbone_options for config in built] == [{}]


def test_the_end_of_a_run(coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best evaluation and the last are named apart, with the digits of the lines after each epoch."""
    best, last = {"box_AP": 3.04, "box_AP50": 9.96, "box_AR1": 1.0}, {"box_AP": 2.0, "box_AP50": 8.0}
    _print_end(TrainedRun(tmp_path, best, last))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"best: box_AP 3.04%, box_AP50 9.96%; {tmp_path}/best.safetensors"
    assert lines[1] == f"last: box_AP 2.00%, box_AP50 8.00%; {tmp_path}/last.safetensors"
