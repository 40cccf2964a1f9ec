"""Models as folders: what is in them, who can load them, and their way to the hub and back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from builders import SMALL_MODELS, build
from hub_server import Hub, hub_server
from huggingface_hub import ModelCard, constants
from safetensors.torch import save_file

from vision_longformer import MODELS, VisionLongformer, load, save
from vision_longformer.checkpoint import load_info
from vision_longformer.checkpoint.native import _from_hub
from vision_longformer.classification import ClassificationRecipe
from vision_longformer.cli.hub import hub_push, hub_save
from vision_longformer.costs import count_parameters, paper_macs
from vision_longformer.detection import DetectorConfig, build_detector, save_detector
from vision_longformer.errors import CheckpointError
from vision_longformer.hub import from_pretrained, push_to_hub, save_pretrained
from vision_longformer.hub.card import _public
from vision_longformer.models.zoo import nearest_model
from vision_longformer.training.recipe import resolve, to_yaml

INFO = {
    "preprocessing": {
        "size": [28, 28],
        "mean": [0.25],
        "std": [0.5],
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "classes": ["boot", "shirt", "bag"],
    },
}


def _micro(**options: Any) -> VisionLongformer:
    """A classifier of grey images, its weights drawn anew."""
    torch.manual_seed(0)
    given = {"img_size": 28, "in_chans": 1, "num_classes": 3, **options}
    return VisionLongformer(MODELS["vision_longformer_micro"], **given).eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The best checkpoint in a run directory."""
    run = tmp_path / "run"
    path = save(_micro(), run / "best.safetensors", info=INFO)
    recipe = ClassificationRecipe(data="/home/somebody/garments", init="/home/somebody/first.safetensors", epochs=7)
    (run / "recipe.yaml").write_text(to_yaml(recipe))
    (run / "environment.json").write_text(json.dumps({"packages": {"torch": "9.8.7"}}))
    top1 = (41.5, 62.25, 60.0)
    records = [{"step": step, "evaluation": {"top1": value, "loss": step}} for step, value in enumerate(top1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that this process takes for the real one, with an empty cache, and is logged in to."""
    with hub_server("secret") as (server, address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "".join(template[1:]))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "secret")
        _from_hub.cache_clear()
        yield server
        _from_hub.cache_clear()


# Folders


def test_a_folder_holds_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_pretrained(checkpoint, tmp_path / "out" / "garments")
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["garments"]
    assert (folder / "model.safetensors").read_bytes() == checkpoint.read_bytes()
    assert load_info(folder) == INFO
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(load(folder)(x), load(checkpoint)(x))
    assert torch.equal(from_pretrained(str(folder))(x), load(checkpoint)(x))


def test_timm_loads_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_pretrained(checkpoint, tmp_path / "garments")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(x), load(checkpoint)(x))
    assert model.pretrained_cfg["label_names"] == ["boot", "shirt", "bag"]
    data = timm.data.resolve_model_data_config(model)
    assert tuple(data["input_size"]) == (1, 28, 28)  # a list or a tuple, by timm's version
    expected = {"mean": [0.25], "std": [0.5], "interpolation": "bilinear", "crop_pct": 1.0}
    assert {name: data[name] for name in expected} == expected


@pytest.mark.parametrize("name", sorted(SMALL_MODELS))
def test_timm_loads_models_that_have_no_name(name: str, tmp_path: Path) -> None:
    """Their stages and options go through ``config.json``."""
    model = build(name).eval()
    again = timm.create_model(f"local-dir:{save_pretrained(model, tmp_path / 'm')}", pretrained=True).eval()
    assert again.config == model.config
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("name", ["vision_longformer_small_ape", "vision_longformer_micro", "evit_tiny_patch16"])
def test_named_models_keep_their_names(name: str) -> None:
    assert nearest_model(replace(MODELS[name], img_size=(96, 64), num_classes=7, drop_rate=0.5)) == name


def test_timm_fits_a_folder_to_other_classes_channels_and_features(tmp_path: Path) -> None:
    model = build("five_stages", num_classes=4)
    where = f"local-dir:{save_pretrained(model, tmp_path / 'm')}"
    tuned = timm.create_model(where, pretrained=True, num_classes=9, in_chans=1)
    grey = model.get_parameter("stages.0.patch_embed.proj.weight").sum(1, keepdim=True)
    assert torch.equal(tuned.get_parameter("stages.0.patch_embed.proj.weight"), grey)
    assert torch.equal(tuned.norm.weight, model.norm.weight)
    assert tuned.head.weight.shape == (9, 16)
    maps = timm.create_model(where, pretrained=True, features_only=True).eval()(torch.ones(1, 3, 64, 64))
    expected = model.eval().forward_intermediates(torch.ones(1, 3, 64, 64), intermediates_only=True)
    assert [torch.equal(*pair) for pair in zip(maps, expected, strict=True)] == [True] * 5


def test_channels_that_timm_cannot_fit_are_loaded_as_they_are(tmp_path: Path) -> None:
    model = _micro(in_chans=6)
    again = timm.create_model(f"local-dir:{save_pretrained(model, tmp_path / 'm')}", pretrained=True)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_detectors(tmp_path: Path) -> None:
    options = {"levels": (1, 2), "channels": 8, "min_size": (64,), "max_size": 64}
    detector = build_detector(DetectorConfig("retinanet", "vision_longformer_micro", 2, **options)).eval()
    info = {"categories": [{"id": 1, "name": "shirt"}, {"id": 2, "name": "bag"}]}
    folder = save_pretrained(save_detector(detector, tmp_path / "d.safetensors", info=info), tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    assert config["detector"]["backbone"] == "vision_longformer_micro"
    assert config["label_names"] == ["shirt", "bag"]
    again = from_pretrained(folder)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in detector.state_dict().items())
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "object-detection"
    count = sum(parameter.numel() for parameter in detector.parameters())
    assert f"| parameters | {count / 1e6:.2f} M |" in card.text
    assert "Classes: shirt, bag." in card.text
    assert from_pretrained(save_pretrained(detector, tmp_path / "again")).config == detector.config


# Cards


def test_the_card_describes_model_and_run(checkpoint: Path, tmp_path: Path) -> None:
    hub_save(str(checkpoint), str(tmp_path / "garments"), license="mit")
    card = ModelCard.load(tmp_path / "garments" / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "image-classification")
    assert (card.data.datasets, card.data.metrics) == (["garments"], ["accuracy"])
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_split) == (62.25, "validation")
    config = _micro().config
    assert f"| parameters | {count_parameters(config).trainable / 1e6:.2f} M |" in card.text
    assert f"an image of 28×28 | {paper_macs(config).total / 1e6:.1f} M |" in card.text
    assert "Classes: boot, shirt, bag." in card.text
    assert "torch 9.8.7" in card.text
    assert "epochs: 7\n" in card.text
    assert "| top1 | 62.25 |\n| loss | 1 |" in card.text
    assert "somebody" not in card.content
    assert "init: first.safetensors" in card.text


def test_the_last_checkpoint_has_the_last_results(checkpoint: Path, tmp_path: Path) -> None:
    last = checkpoint.rename(checkpoint.with_name("last.safetensors"))
    card = (save_pretrained(last, tmp_path / "garments") / "README.md").read_text()
    assert "| top1 | 60 |" in card
    other = last.rename(last.with_name("mine.safetensors"))
    assert "## Results" not in (save_pretrained(other, tmp_path / "mine") / "README.md").read_text()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (["null", "41.5", "null", "62.25", "62.25", "60.0"], "| top1 | 62.25 |\n| loss | 3 |"),
        (["NaN", "41.5"], "| top1 | 41.5 |\n| loss | 1 |"),
        (["null", "null"], "| loss | 1 |"),
    ],
)
def test_the_best_checkpoint_has_the_best_results(
    scores: list[str], expected: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The first of those with the highest score; a score that is not a number is no score."""
    lines = [f'{{"step": {n}, "evaluation": {{"top1": {score}, "loss": {n}}}}}\n' for n, score in enumerate(scores)]
    checkpoint.with_name("metrics.jsonl").write_text("".join(lines))
    card = ModelCard.load(save_pretrained(checkpoint, tmp_path / "garments") / "README.md")
    assert card.text.rstrip().endswith(f"split `validation`:\n\n| | |\n|---|---|\n{expected}")
    assert "nan" not in card.content.lower()


@pytest.mark.parametrize(
    ("data", "public", "name"),
    [
        ("torch/cifar10:/home/somebody", "torch/cifar10", "cifar10"),
        ("hfds/owner/leaves", "hfds/owner/leaves", "owner/leaves"),
        ("garments:320", "garments:320", "garments"),
    ],
)
def test_names_of_data(data: str, public: str, name: str, checkpoint: Path, tmp_path: Path) -> None:
    recipe = to_yaml(ClassificationRecipe(data=data))
    checkpoint.with_name("recipe.yaml").write_text(recipe)
    card = ModelCard.load(save_pretrained(checkpoint, tmp_path / "m") / "README.md")
    assert card.data.datasets == [name]
    assert f"Trained on `{public}`, split `train`" in card.text
    assert "somebody" not in card.content


TINY = "ViL-Tiny; 76.7% in the paper"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, True),
        ({"data": "/data/imagenet", "workers": 7, "init": "/home/first.safetensors"}, True),
        ({"epochs": 1}, False),
        ({"data": "/data/trees"}, False),
        ({"model_options": {"qkv_bias": False}}, False),
    ],
)
def test_what_a_shipped_recipe_is_about_is_not_said_of_the_model(
    changes: dict[str, Any], named: bool, checkpoint: Path, tmp_path: Path
) -> None:
    """Beside the recipe's name if it ran as it is; not at all if a setting was changed. The results are the run's."""
    recipe = resolve(ClassificationRecipe, "imagenet1k_tiny", **changes)
    assert recipe.about == TINY
    (checkpoint.parent / "recipe.yaml").write_text(to_yaml(recipe))
    card = (save_pretrained(checkpoint, tmp_path / "folder") / "README.md").read_text()
    sentence = f"Trained with recipe `imagenet1k_tiny` (“{TINY}”, which describes the recipe, not this model)."
    assert (sentence in card) == named
    assert card.count("in the paper") == named
    assert "about:" not in card
    assert "| top1 | 62.25 |" in card


def test_what_ones_own_recipe_is_about_is_in_the_card(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint.parent / "recipe.yaml").write_text(to_yaml(ClassificationRecipe(about="Boots of our shop")))
    card = (save_pretrained(checkpoint, tmp_path / "folder") / "README.md").read_text()
    assert "\nabout: Boots of our shop\n" in card
    assert "Trained with recipe" not in card


def test_a_card_says_nothing_that_is_not_known(tmp_path: Path) -> None:
    card = ModelCard.load(save_pretrained(_micro(), tmp_path / "m") / "README.md")
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    assert not any(word in card.text for word in ("Classes", "Data", "Results"))
    features = ModelCard.load(save_pretrained(_micro(num_classes=0), tmp_path / "f") / "README.md")
    assert features.data.pipeline_tag == "image-feature-extraction"
    assert "vil predict" not in features.text


def test_many_labels_are_in_the_config_only(tmp_path: Path) -> None:
    """A card lists a hundred at most."""
    names = [f"class{number}" for number in range(101)]
    for count, sentence in ((100, f"Classes: {', '.join(names[:100])}."), (101, "Classes: `label_names` in `config.j")):
        info = {"preprocessing": {**INFO["preprocessing"], "classes": names[:count]}}
        path = save(_micro(num_classes=count), tmp_path / f"{count}.safetensors", info=info)
        folder = save_pretrained(path, tmp_path / f"m{count}")
        assert sentence in (folder / "README.md").read_text()
        assert json.loads((folder / "config.json").read_text())["label_names"] == names[:count]


# Mistakes


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="taken exists; give the name of a new folder"):
        save_pretrained(_micro(), tmp_path / "taken")
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    message = rf"^{re.escape(str(tmp_path / 'broken.safetensors'))} is not a valid safetensors file"
    with pytest.raises(CheckpointError, match=message):
        save_pretrained(tmp_path / "broken.safetensors", tmp_path / "new")
    (tmp_path / "graph.onnx").write_bytes(b"a graph")
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path / 'graph.onnx'))} is an exported file"):
        save_pretrained(tmp_path / "graph.onnx", tmp_path / "new")
    with pytest.raises(ValueError, match="a Linear was not built by build_detector"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.safetensors", "graph.onnx", "taken"]
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"


def test_places_where_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder .* has neither best\.safetensors nor model"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere; give one, or OWNER/NAME"):
        from_pretrained("nowhere")
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere; 'vil hub save CHECKPOINT nowhere' makes"):
        push_to_hub("nowhere", "somebody/garments")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not one of ours; a classifier or a detector is needed here"):
        push_to_hub(tmp_path, "somebody/garments")


@pytest.mark.parametrize(
    ("data", "public"),
    [
        ("/home/somebody/trees", "trees"),
        ("../data/trees", "trees"),
        ("data/trees/", "trees"),
        ("torch/cifar10:../data", "torch/cifar10"),
        ("wds/shards/train-{0..9}.tar", "wds/train-{0..9}.tar"),
        ("hfds/somebody/trees", "hfds/somebody/trees"),
        ("garments:320", "garments:320"),
        ("hf-hub:somebody/trees", "hf-hub:somebody/trees"),
    ],
)
def test_folders_of_this_machine_are_left_out(data: str, public: str) -> None:
    assert _public(data) == public


def test_images_that_were_held_out_are_no_split(checkpoint: Path, tmp_path: Path) -> None:
    """3 of 20 are 15%."""
    names = [str(number) for number in range(20)]
    (checkpoint.parent / "split.json").write_text(json.dumps({"train": names[3:], "evaluation": names[:3]}))
    card = ModelCard.load(save_pretrained(checkpoint, tmp_path / "garments") / "README.md")
    assert "Trained on `garments`, 85% of the images, with" in card.text
    assert "On `garments`, 15% of the images, held out:" in card.text
    (result,) = card.data.eval_results
    assert result.dataset_split == "15% of the images, held out"


# The hub


def test_to_the_hub_and_back(
    hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pretrained(checkpoint, tmp_path / "garments")
    (folder / "split.json").write_text("{}")
    hub_push(str(folder), "somebody/garments")
    assert f"uploaded to {constants.ENDPOINT}/somebody/garments" in capsys.readouterr().out
    (folder / "split.json").unlink()  # which stays here
    assert hub.repositories["somebody/garments"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    x = torch.randn(1, 1, 28, 28)
    expected = load(checkpoint)(x)
    assert torch.equal(load("hf-hub:somebody/garments")(x), expected)
    assert torch.equal(from_pretrained("somebody/garments@main")(x), expected)
    cache = tmp_path / "cache"
    assert torch.equal(
        timm.create_model("hf-hub:somebody/garments", pretrained=True, cache_dir=cache).eval()(x), expected
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _from_hub.cache_clear()
    assert torch.equal(load("hf-hub:somebody/garments")(x), expected)


def test_models_on_the_hub_are_replaced_only_when_asked(hub: Hub) -> None:
    push_to_hub(_micro(), "somebody/garments")
    first = dict(hub.repositories["somebody/garments"])
    assert b"# garments" in first["README.md"]
    with pytest.raises(FileExistsError, match="somebody/garments holds a model already; ask to overwrite"):
        push_to_hub(_micro(num_classes=4), "somebody/garments")
    assert hub.repositories["somebody/garments"] == first
    push_to_hub(_micro(num_classes=4), "somebody/garments", overwrite=True)
    assert from_pretrained("somebody/garments").num_classes == 4


def test_a_revision_on_the_hub(hub: Hub) -> None:
    """An earlier commit by its hash, the newest one without, and none where there is none."""
    push_to_hub(_micro(num_classes=3), "somebody/garments")
    (first,) = hub.commits
    push_to_hub(_micro(num_classes=4), "somebody/garments", overwrite=True)
    assert load(f"hf-hub:somebody/garments@{first}").num_classes == 3
    assert load("hf-hub:somebody/garments").num_classes == 4
    with pytest.raises(
        FileNotFoundError, match="the hub has no model somebody/garments@v9, or you have no access to it"
    ):
        load("hf-hub:somebody/garments@v9")


def test_what_the_hub_refuses(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="the hub has no model somebody/nothing, or you have no access to it"):
        load("hf-hub:somebody/nothing")
    hub.repositories["somebody/empty"] = {"README.md": b"hello"}
    with pytest.raises(FileNotFoundError, match=r"somebody/empty on the hub has no model\.safetensors"):
        load("hf-hub:somebody/empty")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(PermissionError, match=r"the hub refused somebody/garments \(Invalid username or password\.\)"):
        push_to_hub(_micro(), "somebody/garments")


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One sentence, at once, whether there is no network or none is wanted."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    folder = save_pretrained(_micro(), tmp_path / "m")
    start = time.monotonic()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(
            ConnectionError, match=r"cannot be reached .*/m was not downloaded before; use a local folder"
        ):
            load("hf-hub:somebody/m")
        with pytest.raises(ConnectionError, match=r"cannot be reached .* nothing was uploaded from .*/m; use a local"):
            push_to_hub(folder, "somebody/m")
    assert time.monotonic() - start < 15
