"""The model that a run starts from: newly drawn, or from a checkpoint of the same or of other classes and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vision_longformer import VisionLongformer, load, save
from vision_longformer.classification.model import initial_model
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.errors import CheckpointError
from vision_longformer.training.recipe import resolve

CLASSES = ("dark", "middle", "bright")


def _recipe(**changes: Any) -> ClassificationRecipe:
    return resolve(ClassificationRecipe, "quickstart", image_size=16, **changes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model = VisionLongformer(_recipe().model_config(3))
    info = {"preprocessing": Preprocessing.for_model(model.config, CLASSES).to_dict()}
    return save(model, tmp_path / "model.safetensors", info=info)


def test_weights_are_drawn_by_the_seed(checkpoint: Path) -> None:
    before = torch.get_rng_state()
    first, again, other = (initial_model(_recipe(seed=seed), CLASSES)[0].state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    digest = bytes.fromhex("2a6dd5a80d8b4150")  # printf "(1, 'weights')" | b2sum -l 64
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    assert torch.equal(first["head.weight"], VisionLongformer(_recipe().model_config(3)).head.weight)


def test_a_checkpoint_of_the_same_classes_keeps_its_head(checkpoint: Path) -> None:
    model, report = initial_model(_recipe(init=str(checkpoint)), CLASSES)
    state, expected = model.state_dict(), load(checkpoint).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert report == f"{checkpoint}, with its head"


def test_other_classes_get_a_new_head(checkpoint: Path) -> None:
    classes = ("bright", "purple")
    drawn = initial_model(_recipe(), classes)[0].head.weight
    model, report = initial_model(_recipe(init=str(checkpoint)), classes)
    assert torch.equal(model.head.weight, drawn)
    assert torch.equal(model.norm.weight, load(checkpoint).norm.weight)
    assert report.endswith("with a new head")


def test_classes_are_matched_by_a_file(checkpoint: Path, tmp_path: Path) -> None:
    classes = ("bright", "purple", "7")
    class_map = tmp_path / "map.yaml"
    recipe = _recipe(init=str(checkpoint), class_map=str(class_map))
    drawn, old = initial_model(_recipe(), classes)[0].head, load(checkpoint).head
    class_map.write_text("bright: bright\n7: 0\n")
    model, report = initial_model(recipe, classes)
    for new, expected in ((0, old.weight[2]), (1, drawn.weight[1]), (2, old.weight[0])):
        assert torch.equal(model.head.weight[new], expected)
    assert report.endswith("with its head for 2 of 3 classes")
    for text, message in (
        ("bright: 7\n", "unknown class of the checkpoint"),
        ("brigt: bright\n", "did you mean 'bright'"),
        ("- bright\n", "should hold lines of 'class of the data: class of the checkpoint'"),
        ("bright: [\n", "is not readable as YAML or JSON"),
    ):
        class_map.write_text(text)
        with pytest.raises(ValueError, match=message):
            initial_model(recipe, classes)


def test_tables_are_resized_to_another_image_size(tmp_path: Path) -> None:
    source = VisionLongformer(_recipe().model_config(3), img_size=(40, 40))
    path = save(source, tmp_path / "other.safetensors")
    assert "resized" in initial_model(_recipe(init=str(path)), CLASSES)[1]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    config = _recipe().model_config(3)
    path = save(VisionLongformer(config, stages=config.stages[:1]), tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"last stage has|weights are of another model"):
        initial_model(_recipe(init=str(path)), CLASSES)
