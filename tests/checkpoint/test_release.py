"""Released checkpoints: names and shapes of real configurations, aliases, resizing, damage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vision_longformer import VisionLongformer, adapt_model, load_release, model_config
from vision_longformer.checkpoint.release import release_config
from vision_longformer.checkpoint.release_names import model_names, stages_of, to_arch_string
from vision_longformer.errors import CheckpointError

DATA = Path(__file__).parents[1] / "assets"
MODELS: dict[str, Any] = json.loads(gzip.decompress((DATA / "checkpoint_keys.json.gz").read_bytes()))["models"]
SMALL = "l1,h1,d8,n1,s1,g1,p4,f2,a0_l2,h2,d16,n1,s0,g1,p2,f2,a0_l3,h2,d16,n1,s0,g0,p2,f2,a0"


def _release_state(entry: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the names and shapes of a real release file, shared ones shared."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in entry["keys"].items():
        if entry["buffers"].get(name) == "int64":
            state[name] = torch.zeros(shape, dtype=torch.int64)
        else:
            state[name] = torch.randn(shape, generator=generator) * 0.1
    return {name: state[entry["shared"].get(name, name)] for name in state}


@pytest.mark.parametrize("name", MODELS)
def test_names_of_real_configurations(name: str) -> None:
    """Our table of names has exactly the names of the file, with its aliases and its derived tensors."""
    entry = MODELS[name]
    names = model_names(release_config(entry["arch"], img_size=entry["img_size"], **entry["args"]))
    assert names.all() == set(entry["keys"])
    assert names.aliases == entry["shared"]


def _check_loads(name: str) -> None:
    entry = MODELS[name]
    state = _release_state(entry)
    model = load_release(
        {"net": state, "arch": "msvit"}, arch=entry["arch"], img_size=entry["img_size"], **entry["args"]
    )
    assert sum(p.numel() for p in model.parameters()) == entry["n_params"]
    theirs = {k: v for k, v in state.items() if k not in entry["shared"] and v.is_floating_point()}
    ours = model.state_dict()
    assert sum(v.numel() for v in ours.values()) == sum(v.numel() for v in theirs.values())
    total = sum(v.double().square().sum() for v in theirs.values())
    torch.testing.assert_close(sum(v.double().square().sum() for v in ours.values()), total)


@pytest.mark.parametrize("name", ["vil_tiny_rpb_224", "vil_tiny_ape_384", "small_performer_partial_ape_224"])
def test_real_configurations_load(name: str) -> None:
    """Every value of the file arrives, once."""
    _check_loads(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_real_configurations_load(name: str) -> None:
    _check_loads(name)


def test_released_small_becomes_a_named_model_exactly(caplog: pytest.LogCaptureFixture) -> None:
    """Full-attention stages into the all-Longformer model, tables padded by offset: the same logits at 224."""
    entry = MODELS["vil_small_rpb_224"]
    state = {name: t.double() if t.is_floating_point() else t for name, t in _release_state(entry).items()}
    caplog.set_level("INFO")
    released = load_release(state, arch=entry["arch"])
    converted = adapt_model(released, model_config("vision_longformer_small"))
    assert "resized 1 tables:\n  stages.3.blocks.0.attn.bias.table: (12, 13, 13) -> (12, 27, 27)" in caplog.text
    image = torch.randn(1, 3, 224, 224, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(converted(image), released(image), atol=1e-10, rtol=1e-10)


def _small_state(**changes: Any) -> dict[str, Tensor]:
    """A release state of SMALL at 32×32, made from the names and an own model's shapes."""
    config = release_config(SMALL, img_size=32, num_classes=3, **changes)
    names, ours = model_names(config), VisionLongformer(config).state_dict()
    state: dict[str, Tensor] = {}
    for name, source in names.sources.items():
        tensor = ours[name]
        if name.endswith("bias.table"):
            state[source.parts[0]] = tensor.flatten(1).t().clone()
        elif "g2l" in source.parts[0]:
            pair = state.setdefault(source.parts[0], torch.zeros(2, *tensor.shape))
            pair[int(name.endswith("local_to_global"))] = tensor
        elif name.endswith(("global_tokens", "rows", "columns")):
            state[source.parts[0]] = tensor[None].clone()
        elif len(source.parts) == 2:
            width = tensor.shape[0] // 3
            state[source.parts[0]], state[source.parts[1]] = tensor[:width].clone(), tensor[width:].clone()
        else:
            state[source.parts[0]] = tensor.clone()
    state.update({alias: state[canonical] for alias, canonical in names.aliases.items()})
    state.update({name: torch.zeros(1, dtype=torch.int64) for name in names.derived})
    return state


def _load(state: Any, **options: Any) -> Any:
    return load_release(state, **{"arch": SMALL, "img_size": 32, **options})


def test_file_and_module_prefix(tmp_path: Path) -> None:
    state = _small_state()
    path = tmp_path / "model.pth"
    torch.save({"net": {f"module.{k}": v for k, v in state.items()}, "arch": "msvit", "epoch": 3}, path)
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(_load(path)(image), _load(state)(image))


def test_missing_and_unexpected_are_named() -> None:
    state = _small_state()
    del state["layer2.2.mlp.fc1.bias"]
    state["stranger"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"1 missing:\n  layer2\.2\.mlp\.fc1\.bias\n1 unexpected:\n  stranger"):
        _load(state)


def test_separate_weights_are_not_mistaken_for_shared_ones() -> None:
    state = _small_state()
    state["layer1.1.attn.query_global.weight"] = state["layer1.1.attn.query_global.weight"] + 1
    with pytest.raises(CheckpointError, match=r"1 not shared in the file:\n  layer1\.1\.attn\.query_global\.weight"):
        _load(state)
    assert _load(state, sharew=False).stages[0].blocks[0].attn.qkv_global is not None


def test_other_size_is_resized_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """At 64×64 the full-attention tables grow; the release's bilinear resize is used and logged."""
    state = _small_state()
    model = _load(state, img_size=64)
    assert "stages.1.blocks.0.attn.bias.table: (2, 7, 7) -> (2, 15, 15)" in caplog.text
    table = state["layer2.1.attn.local_relative_position_bias_table"].t().reshape(1, 2, 7, 7)
    expected = torch.nn.functional.interpolate(table, size=(15, 15), mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(model.stages[1].blocks[0].attn.bias.table.detach(), expected)


def test_other_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"head\.weight: \(3, 16\) in the file, \(5, 16\) in the model"):
        _load(_small_state(), num_classes=5)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "cut.pth"
    torch.save({"net": _small_state()}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        _load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({"epoch": 1, "state": 3}, "no weights under 'net'"),
        ({"net": {"a": torch.zeros(1)}, "arch": "resnet"}, "checkpoint of 'resnet'"),
    ],
)
def test_foreign_file(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "foreign.pth"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        _load(path)


def test_foreign_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "objects.pth"
    torch.save({"net": Path("x")}, path)
    with pytest.raises(CheckpointError, match="plain tensors"):
        _load(path)


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.pth"):
        _load("nowhere.pth")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("l1,h3,d96,z4", "letter in 'z4', stage 1"),
        ("l1,h12,d796", r"dim=796 is not divisible by heads=12; use dim=792 or dim=804"),
        ("l1,h3,d96_l3,h3,d96", "l3 stands at stage 2"),
        ("l1,hx", "'hx' in stage 1"),
        ("", "letter in '', stage 1"),
        ("l1,h3,d96,f0", "window is 0"),
    ],
)
def test_bad_arch_strings(arch: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages_of(arch, "longformerhand")


@pytest.mark.parametrize(
    ("mode", "neighbours", "evaluation"),
    [(0, "all", "all"), (1, "random", "all"), (8, "random", "all"), (-1, "self", "self")],
)
def test_modes_of_the_release(mode: int, neighbours: str, evaluation: str) -> None:
    """-1 is without neighbours in evaluation, too; random shift is for training only."""
    config = release_config(SMALL, img_size=32, mode=mode)
    assert (config.neighbours, config.eval_neighbours) == (neighbours, evaluation)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="did you mean 'longformerhand'"):
        stages_of(SMALL, "longformerhandy")
    with pytest.raises(ValueError, match="sw_exact is 2"):
        stages_of(SMALL, "longformerhand", sw_exact=2)


@pytest.mark.parametrize("name", ["vil_small_rpb_384", "small_srformer64_ape_224", "small_full_ape_224"])
def test_arch_string_round_trip(name: str) -> None:
    entry = MODELS[name]
    config = release_config(entry["arch"], img_size=entry["img_size"], **entry["args"])
    again = release_config(to_arch_string(config), img_size=entry["img_size"], **entry["args"])
    assert again == config
