"""Our own files, and weights adapted to another image size, window or mechanism."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import pytest
import torch
from builders import SMALL_MODELS, assert_close, build, image, small_config
from safetensors import safe_open
from safetensors.torch import save_file

from vision_longformer import ModelConfig, VisionLongformer, adapt_model, load, load_release, save
from vision_longformer.checkpoint import native
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.detection.checkpoint import load_backbone
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.errors import CheckpointError
from vision_longformer.export.runtime import LOADERS
from vision_longformer.models import config as cfg
from vision_longformer.models.adapt import AdaptReport, adapt_state
from vision_longformer.models.position import resize_axis, resize_bias_table, resize_map
from vision_longformer.models.zoo import SHIPPED

# Files


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    """The file alone gives back the model: configuration, weights, output."""
    model = build(name).eval()
    path = save(model, tmp_path / "new" / "model.safetensors")
    again = load(path)
    assert again.config == model.config
    assert not again.training
    assert torch.equal(again(image(97, 143)), model(image(97, 143)))
    assert list(path.parent.iterdir()) == [path]


def test_a_run_directory_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    run, model = tmp_path / "run", build("vil").eval()
    best = save(model, run / "best.safetensors", info={"classes": ["cat"]})
    save(build("vil_ape"), run / "last.safetensors")
    assert native.resolve_checkpoint(run) == native.resolve_checkpoint(best) == best
    assert native.resolve_checkpoint("hf-hub:owner/name") == Path("hf-hub:owner/name")
    assert torch.equal(load(run)(image()), model(image()))
    assert native.load_info(run) == {"classes": ["cat"]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("vil", dtype).eval()
    again = load(save(model, tmp_path / "model.safetensors"))
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert torch.equal(again(image(dtype=dtype)), model(image(dtype=dtype)))


def test_float16_is_for_files(tmp_path: Path) -> None:
    """0.1 is 0.0999755859375 in float16, and stays that in float32."""
    model = build("vil", torch.float32).eval()
    torch.nn.init.constant_(model.head.bias, 0.1)
    again = load(save(model.half(), tmp_path / "model.safetensors"))
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert set(again.head.bias.tolist()) == {0.0999755859375}


def test_changed_settings_are_saved(tmp_path: Path) -> None:
    model = build("vil_ape").eval()
    model.set_input_size((96, 160))
    model.reset_classifier(9)
    model.set_neighbours("random", "self")
    again = load(save(model, tmp_path / "model.safetensors"))
    assert again.config == model.config
    assert (again.config.img_size, again.num_classes) == ((96, 160), 9)
    assert (again.config.neighbours, again.config.eval_neighbours) == ("random", "self")
    assert torch.equal(again(image()), model(image()))


def test_an_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    path = save(build("flat"), tmp_path / "model.safetensors")
    before = path.read_bytes()
    other = build("two_stages")
    with pytest.raises(FileExistsError, match=r"model.safetensors exists; choose another name or allow overwriting"):
        save(other, path)
    assert path.read_bytes() == before
    save(other, path, overwrite=True)
    assert load(path).config == other.config


def test_the_name_must_say_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.pth should end in .safetensors"):
        save(build("flat"), tmp_path / "model.pth")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_a_failing_write_leaves_the_old_file(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(build("flat"), tmp_path / "model.safetensors")
    before = path.read_bytes()

    def full_disk(*arguments: object) -> None:
        if moment == "write":
            Path(str(arguments[1])).write_bytes(b"half a fi")
        raise OSError("no space left on device")

    monkeypatch.setattr(*((native, "save_file") if moment == "write" else (os, "replace")), full_disk)
    with pytest.raises(OSError, match="no space left"):
        save(build("two_stages"), path, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(build("flat"), tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_a_truncated_file(keep: float, tmp_path: Path) -> None:
    path = save(build("flat"), tmp_path / "model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match=r"is not a valid safetensors file .* nothing was loaded"):
        load(path)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "released.pth"
    torch.save({"net": {}}, path)
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        load(path)
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="is a safetensors file, but not one of ours"):
        load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "absent.safetensors")


def test_exported_files_are_no_checkpoints(tmp_path: Path) -> None:
    assert set(native.EXPORTED) == set(LOADERS)
    for suffix in native.EXPORTED:
        path = tmp_path / f"best{suffix}"
        path.write_bytes(b"a graph")
        with pytest.raises(
            CheckpointError, match=rf"best\{suffix} is an exported file, .* give the \.safetensors file"
        ):
            load(path)


def test_built_in_weights_beside_a_folder_of_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data does not hide them, a checkpoint does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10" / "train").mkdir(parents=True)
    assert native.weights_file("cifar10") == SHIPPED / "cifar10.safetensors"
    with pytest.raises(FileNotFoundError, match=r"the folder .*cifar10 has neither best\.safetensors nor model"):
        native.weights_file(tmp_path / "cifar10")
    for name in (native.WEIGHTS, native.BEST):
        (tmp_path / "cifar10" / name).write_bytes(b"")
        assert native.weights_file("cifar10") == Path("cifar10") / name


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


@pytest.mark.parametrize("change", ["missing", "empty", "extra", "shape", "config", "json", "kind"])
def test_a_file_that_contradicts_itself(change: str, tmp_path: Path) -> None:
    path = save(build("flat"), tmp_path / "model.safetensors")
    tensors, metadata = contents(path)
    if change == "missing":
        del tensors["head.weight"]
    elif change == "extra":
        tensors["more"] = torch.zeros(1)
    elif change == "shape":
        tensors["head.weight"] = torch.zeros(2, 2)
    elif change == "empty":
        tensors.clear()
    elif change == "config":
        del metadata["config"]
    elif change == "json":
        metadata["config"] = metadata["config"][:-5]
    elif change == "kind":
        data = json.loads(metadata["config"])
        data["stages"][0]["attention"]["kind"] = "unheard of"
        metadata["config"] = json.dumps(data)
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(path)


# Other sizes, windows and mechanisms


LOCAL, FULL = cfg.Longformer(window=4), cfg.Full()


def double(config: ModelConfig) -> VisionLongformer:
    """A model in float64 whose tables are large enough to matter."""
    model = VisionLongformer(config).double().eval()
    for name, parameter in model.named_parameters():
        if ".bias." in name or "position" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def report_of(source: VisionLongformer, config: ModelConfig) -> AdaptReport:
    return adapt_state(source.state_dict(), VisionLongformer(config), source_grids=source.config.grids())[1]


@pytest.mark.parametrize("position", ["relative", "absolute"])
def test_full_attention_becomes_longformer(position: str) -> None:
    """At the original size both see all tokens, and agree; the 8×8 and 4×4 maps have tables of 15² and 7²."""
    options = {"position": position, "tokens": (1, 1, 0)}
    source = double(small_config(LOCAL, FULL, FULL, **options))
    config = small_config(LOCAL, LOCAL, LOCAL, **options)
    target = adapt_model(source, config)
    x = image(dtype=torch.float64)
    for got, expected in zip(target.forward_intermediates(x)[1], source.forward_intermediates(x)[1], strict=True):
        assert_close(got, expected, 1e-10)
    assert_close(target(x), source(x), 1e-10)
    expected = {"stages.2.blocks.0.attn.bias.table": ((2, 7, 7), (2, 15, 15))} if position == "relative" else {}
    assert report_of(source, config).resized == expected
    assert not target.training


def test_one_default_resize_for_each_purpose() -> None:
    """Bilinear where weights are used as in the paper: released ones at another size, and backbones of detectors."""
    callables = (load_release, load_backbone, adapt_model, adapt_state, resize_bias_table)
    defaults = [
        next(p.default for name, p in inspect.signature(one).parameters.items() if name in ("table_resize", "method"))
        for one in callables
    ]
    assert defaults == ["bilinear", "bilinear", "offset", "offset", "offset"]
    assert DetectionRecipe().table_resize == "bilinear"
    assert ClassificationRecipe().table_resize == "offset"


def test_the_released_resize_does_not_agree_there() -> None:
    """Stretching a table gives offsets another meaning: why ``offset`` is the default."""
    options = {"position": "relative", "tokens": (1, 1, 0)}
    source = double(small_config(LOCAL, FULL, FULL, **options))
    target = adapt_model(source, small_config(LOCAL, LOCAL, LOCAL, **options), table_resize="bilinear")
    name = "stages.2.blocks.0.attn.bias.table"
    assert_close(target.state_dict()[name], resize_bias_table(source.state_dict()[name], (15, 15), "bilinear"), 1e-12)
    assert (target(image(dtype=torch.float64)) - source(image(dtype=torch.float64))).abs().max() > 1e-6


def test_windows_changed() -> None:
    """Tables are cropped or extended by offset; nothing else changes."""
    source = double(small_config(LOCAL, LOCAL, position="relative"))
    config = small_config(cfg.Longformer(window=2), cfg.Longformer(window=6), position="relative")
    target = adapt_model(source, config)
    old, new = source.state_dict(), target.state_dict()
    tables = [f"stages.{stage}.blocks.0.attn.bias.table" for stage in (0, 1)]
    assert torch.equal(new[tables[0]], old[tables[0]][:, 4:11, 4:11])
    assert torch.equal(new[tables[1]][:, 4:19, 4:19], old[tables[1]])
    report = report_of(source, config)
    assert report.resized == {
        tables[0]: ((2, 15, 15), (2, 7, 7)),
        tables[1]: ((2, 15, 15), (2, 23, 23)),
    }
    assert all(torch.equal(old[name], new[name]) for name in old if name not in tables)
    assert str(report).startswith("resized 2 tables:\n  stages.0.blocks.0.attn.bias.table: (2, 15, 15)")


def test_image_size_changed() -> None:
    """Absolute tables are stretched; what the model computes at the new size stays what it was there."""
    config = small_config(LOCAL, cfg.Linformer(5), FULL, position="absolute")
    source = double(config.override(img_size=(64, 48)))
    target = adapt_model(source, config.override(img_size=(96, 112)))
    x = image(96, 112, dtype=torch.float64)
    assert_close(target(x), source(x), 1e-10)
    rows = "stages.0.position.rows"
    assert_close(target.state_dict()[rows], resize_axis(source.state_dict()[rows], 24), 1e-12)
    resized = report_of(source, target.config).resized
    axes = {f"stages.{stage}.position.{axis}" for stage in range(3) for axis in ("rows", "columns")}
    assert set(resized) == axes | {"stages.1.blocks.0.attn.project_keys"}
    assert resized["stages.1.blocks.0.attn.project_keys"] == ((1 + 8 * 6, 5), (1 + 12 * 14, 5))


def test_plain_vit_embedding_of_a_rectangle() -> None:
    """Its table does not distinguish height from width; the source's own grid does."""
    config = small_config(FULL, position="absolute_1d", patches=(16,))
    source = double(config.override(img_size=(64, 32)))
    target = adapt_model(source, config.override(img_size=(48, 80)))
    name = "stages.0.position.table"
    expected = resize_map(source.state_dict()[name], source.config.grids()[0], target.config.grids()[0])
    assert_close(target.state_dict()[name], expected, 1e-12)


def test_nothing_to_resize(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source = double(small_config(LOCAL, FULL, position="relative"))
    target = adapt_model(source, source.config)
    assert caplog.messages == ["nothing was resized"]
    assert torch.equal(target(image(dtype=torch.float64)), source(image(dtype=torch.float64)))


def test_adapting_does_not_touch_or_share_the_source() -> None:
    source = double(small_config(LOCAL, FULL, position="relative"))
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    target = adapt_model(source, small_config(LOCAL, LOCAL, position="relative"))
    for parameter in target.parameters():
        torch.nn.init.zeros_(parameter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small_config(LOCAL, FULL, position="relative", num_classes=7), r"head.weight: \(5, 8\) in the file, \(7, 8\)"),
        (small_config(LOCAL, FULL, position="absolute"), "of another model: .* missing: stages.0.position.columns"),
        (small_config(LOCAL, position="relative"), "unexpected: stages.1"),
        (
            small_config(LOCAL, cfg.Longformer(share_weights=False), position="relative"),
            "4 missing: stages.1.blocks.0.attn.proj_global.bias",
        ),
        (
            small_config(LOCAL, FULL, position="relative", tokens=(1, 2)),
            r"stages.1.global_tokens: \(1, 8\) in the file",
        ),
    ],
    ids=["classes", "position", "stages", "separate", "tokens"],
)
def test_misfits_are_named(config: ModelConfig, message: str) -> None:
    source = double(small_config(LOCAL, FULL, position="relative"))
    with pytest.raises(CheckpointError, match=message):
        adapt_model(source, config)


def test_an_unknown_way_to_resize_is_refused() -> None:
    source = double(small_config(LOCAL, FULL, position="relative"))
    with pytest.raises(ValueError, match="unknown table resize 'crop'"):
        adapt_model(source, small_config(cfg.Longformer(window=2), FULL, position="relative"), table_resize="crop")


def test_a_pruned_model_is_not_saved(tmp_path: Path) -> None:
    model = build("vil")
    model.prune_intermediate_layers([0, 1])
    model.set_input_size(96)
    assert model.config.img_size == (96, 96)
    with pytest.raises(ValueError, match="pruned"):
        save(model, tmp_path / "model.safetensors")
