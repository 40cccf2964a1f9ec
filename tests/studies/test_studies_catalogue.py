"""The shipped studies: every row resolves at every scale, small models differ as they should, and studies of files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.costs import paper_macs
from vision_longformer.models.config import Full, Longformer
from vision_longformer.models.zoo import comparison_config, flat_config, longformer_config
from vision_longformer.studies import cifar10
from vision_longformer.studies.catalogue import STUDY_NAMES, find_study
from vision_longformer.studies.declaration import Study, compared_settings, load_study
from vision_longformer.studies.results import STORED, ResultStore
from vision_longformer.training.recipe import resolve

PAGE = Path(__file__).parents[2] / "docs" / "studies" / "index.md"

ROWS = {
    "layer_norm_position": 4,
    "flat_multiscale": 4,
    "pooling": 4,
    "mechanisms": 11,
    "random_shift": 7,
    "relative_absolute": 2,
    "window_global": 6,
    "rules": 3,
}

PAPER = {
    "layer_norm_position": [79.8, None, 80.33, 80.44],
    "flat_multiscale": [80.7, None, 81.8, 82.0],
    "pooling": [81.65, 81.99, 82.12, 82.08],
    "mechanisms": [81.99, 81.91, 80.98, 81.79, 76.37, 79.9, 81.61, 78.97, 81.46, 78.72, 81.72],
    "relative_absolute": [82.0, 82.4],
}
"""As the tables print them; figures print none."""


def test_the_eight_studies() -> None:
    assert {name: len(find_study(name).rows) for name in STUDY_NAMES} == ROWS


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_rows_resolve_at_every_scale(name: str) -> None:
    study = find_study(name)
    scales = {"small", "imagenet" if study.task == "classification" else "coco"}
    assert set(study.scales) == scales
    assert [study.problem(row, scale) for row in study.rows for scale in scales] == [""] * 2 * len(study.rows)
    assert [row.paper for row in study.rows] == PAPER.get(name, [None] * len(study.rows))


@pytest.mark.parametrize(
    "name", [name for name in STUDY_NAMES if name not in ("flat_multiscale", "layer_norm_position")]
)
def test_small_windows_are_well_below_the_first_map(name: str) -> None:
    """A token sees three chunks along each axis."""
    study = find_study(name)
    for row in study.rows:
        settings: Any = study.settings(row, "small", 0)
        config = settings.model_config(10) if study.task == "classification" else None
        config = config or settings.detector_config(10).backbone_config
        size = None if study.task == "classification" else (settings.detector_config(10).max_size,) * 2
        first, grid = config.stages[0], config.grids(size)[0]
        assert min(grid) >= 16
        if isinstance(first.attention, Longformer):
            assert 3 * first.attention.window <= 0.6 * min(grid)


def test_scales_at_equal_cost() -> None:
    study = find_study("flat_multiscale")
    settings: list[Any] = [study.settings(row, "small", 0) for row in study.rows]
    assert [len(one.model_config(10).stages) for one in settings] == [1, 2, 3, 4]
    macs = [paper_macs(one.model_config(10)).total for one in settings]
    assert max(macs) < 1.15 * min(macs)


# The paper's recipes


def _paper_config(study: str, row: int, scale: str = "imagenet") -> Any:
    declared = find_study(study)
    settings: Any = declared.settings(declared.rows[row], scale, 0)
    return settings.model_config(1000) if declared.task == "classification" else settings.detector_config(80)


def test_mechanisms_are_the_papers_recipes() -> None:
    study = find_study("mechanisms")
    linformer = study.settings(study.rows[2], "imagenet", 5)
    assert linformer == resolve(ClassificationRecipe, "imagenet1k_small_linformer", seed=5)
    vil = comparison_config("small", "1_2_8_1", "partial_vil").override(drop_path_rate=0.1)
    assert _paper_config("mechanisms", 0) == vil


def test_layer_norm_and_position_of_the_flat_model() -> None:
    flat = flat_config("small").override(global_pool="token", drop_path_rate=0.1)
    assert _paper_config("layer_norm_position", 3) == flat
    neither = _paper_config("layer_norm_position", 0)
    assert (neither.norm_embed, neither.stages[0].position) == (False, "absolute_1d")
    assert neither.override(norm_embed=True, stages=flat.stages) == flat


def test_class_token_of_the_last_stage() -> None:
    token, mean = _paper_config("pooling", 2), _paper_config("pooling", 3)
    assert mean == comparison_config("small", "1_1_8_2", "partial_vil").override(drop_path_rate=0.1)
    assert ([stage.global_tokens for stage in token.stages], token.global_pool) == ([1, 1, 1, 1], "token")


def test_windows_and_tokens_of_the_detectors() -> None:
    """The paper's windows 9, 15 and 21 are 2w + 1; the default is ViL-Small but for a token in its last stage."""
    attention = [[stage.attention for stage in _backbone(row).stages] for row in range(3)]
    assert attention == [[Longformer(window=w)] * 4 for w in (4, 7, 10)]
    tokens = [[stage.global_tokens for stage in _backbone(row).stages] for row in (1, 3, 4, 5)]
    assert tokens == [[1] * 4, [0] * 4, [2] * 4, [4] * 4]
    own, named = _backbone(1), longformer_config("small")
    assert [(s.dim, s.depth, s.heads, s.patch) for s in own.stages] == [
        (s.dim, s.depth, s.heads, s.patch) for s in named.stages
    ]


def _backbone(row: int) -> Any:
    return _paper_config("window_global", row, "coco").backbone_config


def test_shift_from_the_start_of_the_run() -> None:
    study = find_study("random_shift")
    shifts = [(s.neighbours, s.shift_until) for s in (study.settings(row, "imagenet", 0) for row in study.rows[1:6])]
    assert shifts == [("random", part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]


def test_partial_mechanisms_end_with_full_attention() -> None:
    study = find_study("mechanisms")
    for row in study.rows:
        settings: Any = study.settings(row, "small", 0)
        last = [isinstance(stage.attention, Full) for stage in settings.model_config(10).stages[-2:]]
        assert last == [True, True] or not row.name.startswith("Partial")


# Studies of one's own


def test_the_study_of_the_page(tmp_path: Path) -> None:
    """The block of YAML is a study, its first row the baseline, its rows those that it says."""
    block = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    study = _study(tmp_path, yaml.safe_load(block[1]))
    assert (study.name, study.baseline) == ("own", "usual")
    assert [study.settings(row, "small", 0).lr for row in study.rows] == [1e-3, 2e-3, 5e-4]


def _study(folder: Path, data: Any) -> Study:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return load_study(path)


def _own(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"scales": {"small": {"recipe": "quickstart"}}, "rows": [*rows], **more}


def test_rows_that_cannot_be_run_are_named(tmp_path: Path) -> None:
    """An unknown key, a name that another row has already, settings under no scale, and an unknown recipe; the others
    can."""
    bad, twice = {"name": "b", "settings": {"small": {"learning_rate": 1}}}, {"name": "A"}
    flat, absent = {"name": "c", "settings": {"lr": 2e-3}}, {"name": "d", "settings": {"small": {"recipe": "no.yaml"}}}
    study = _study(tmp_path, _own({"name": "a"}, bad, twice, flat, absent))
    problems = [study.problem(row, "small") for row in study.rows]
    assert problems[0] == ""
    assert "unknown key 'learning_rate'" in problems[1]
    assert problems[2] == "there is another row 'a', whose folder would have the same name; rename one of them"
    assert problems[3] == "settings are given by scale, and 'lr' is not one of this study's: small"
    assert "no.yaml" in problems[4]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "is not a study; it needs rows"),
        (_own(), "rows of .* is 0"),
        (_own({"label": "a"}), "row 1: unknown key 'label'"),
        (_own({"name": "a"}, baseline="b"), "unknown baseline of study own 'b'"),
        (_own({"name": "a"}, task="segmentation"), "unknown task 'segmentation'"),
        (_own({"name": "a"}, scales={"huge": {}}), "unknown scale 'huge'"),
        (_own({"name": "a"}, scales={"small": {}}), "scale small names no recipe"),
        (_own({"name": "a"}, seeds=3), "unknown key 'seeds'"),
        (_own({"name": 4}), r"row 1: name is 4, not a text; write it in quotes"),
        (_own({"name": "a", "settings": 3}), "settings of 'a' is 3; write {small: {…}}, by scale"),
        (_own({"name": "a"}, sizes=2), r"sizes is 2; write a list of factors, as in \[1.5, 2\]"),
        (_own({"name": "a"}, task="detection", sizes=[2]), "sizes are for classification only"),
        (_own({"name": "a"}, sizes=[1.5, 2, 1.5]), r"own\.yaml: sizes is \[1.5, 2, 1.5\]; write each factor once"),
        (_own({"name": "a"}, sizes=[True]), r"sizes is \(True,\); write a list of factors"),
        (_own({"name": "a"}, sizes=[float("inf")]), r"sizes is \(inf,\); write a list of factors"),
        (_own({"name": "a", "paper": "81.8%"}), "row 1: paper of 'a' is '81.8%'; write a number, as in 81.8"),
        (_own({"name": "a", "settings": {"small": ["lr"]}}), r"settings of 'a' for small is \['lr'\]; write keys with"),
        (_own({"name": "a"}, scales=[]), r"own\.yaml: scales is \[\]; name a recipe for each"),
        ({"rows": [{"name": "a"}]}, r"scales is {}; name a recipe for each, as in {small: {recipe: quickstart}}"),
        (_own({"name": "a"}, scales={"small": ["recipe"]}), "scale small names no recipe"),
        (_own({"name": "a"}, name="../x"), r"name is '\.\./x'; it names a folder, so write it without a path"),
        (_own({"name": "a"}, name=5), "name is 5, not a text; write it in quotes"),
        (_own({"name": "a"}, init="cifar10"), "a classifier to start from, init, is for detection only"),
    ],
)
def test_files_that_are_no_study(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _study(tmp_path, data)


def test_folders_of_rows_in_any_script(tmp_path: Path) -> None:
    """Letters of all scripts count; a name without any is a number, which another row may not be called."""
    study = _study(tmp_path, _own(*({"name": name} for name in ("模型一", "模型二", "+", "-", "LR: 1e-3", "row 4"))))
    assert [study.folder(row) for row in study.rows] == ["模型一", "模型二", "row-3", "row-4", "lr-1e-3", "row-4"]
    problems = [study.problem(row, "small") for row in study.rows]
    assert problems[:5] == [""] * 5
    assert problems[5].startswith("there is another row '-', whose folder would have the same name")


def test_a_study_with_the_name_of_a_shipped_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pooling.yaml"
    path.write_text(yaml.safe_dump(_own({"name": "a"})))
    with pytest.raises(ValueError, match=r"has the name of a study that comes with the package; .*, as my_pooling"):
        find_study(str(path))


def test_an_unknown_study_and_scale() -> None:
    with pytest.raises(ValueError, match="unknown study 'poling'; did you mean 'pooling'"):
        find_study("poling")
    with pytest.raises(ValueError, match="study rules has no scale imagenet, only small and coco"):
        find_study("rules").check_scale("imagenet")


def test_data_takes_the_place_of_what_is_not_built_in(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "elsewhere.npz"
    path.touch()
    for name, data in (("pooling", None), ("rules", "garments:160")):
        study = find_study(name)
        settings: Any = study.with_data(str(path)).settings(study.rows[0], "small", 0)
        assert settings.data == (data or str(path))
    with pytest.raises(FileNotFoundError, match=r"there is no data nowhere\.npz; --data names a file"):
        find_study("rules").with_data("nowhere.npz")


def test_runs_are_compared_by_what_their_result_depends_on(tmp_path: Path) -> None:
    """Not by their seed or workers, but by data: of arrays the contents, wherever they are, else the name or path."""
    study = _study(tmp_path, _own({"name": "a"}, {"name": "b", "settings": {"small": {"workers": 3}}}))
    a, b = study.rows
    assert compared_settings(study.settings(a, "small", 0)) == compared_settings(study.settings(b, "small", 1))
    one, same, other = (tmp_path / folder / "arrays.npz" for folder in ("one", "same", "other"))
    for path, value in ((one, 1), (same, 1), (other, 2)):
        path.parent.mkdir()
        np.savez(path, x=np.array([value]))
    pooling = find_study("pooling")

    def identity(data: str) -> Any:
        return compared_settings(pooling.with_data(data).settings(pooling.rows[0], "small", 0))["data"]

    assert identity(str(one)) == identity(str(same)) != identity(str(other))
    assert identity(str(one)).startswith("contents ")
    assert (identity(str(tmp_path)), identity("torch/cifar10")) == (str(tmp_path.resolve()), "torch/cifar10")
    np.savez(one, x=np.array([2]))
    os.utime(one, (1, 1))
    assert identity(str(one)) == identity(str(other))


def test_a_classifier_to_start_from(tmp_path: Path) -> None:
    """It is that of all rows that name none, and runs from another one are other runs; a path is that from the root."""
    rows = [{"name": "a"}, {"name": "b", "settings": {"small": {"init": "cifar10_nano"}}}]
    study = _study(tmp_path, _own(*rows, task="detection"))
    settings: list[Any] = [study.with_init("cifar10").settings(row, "small", 0) for row in study.rows]
    assert [own.init for own in settings] == ["cifar10", "cifar10_nano"]
    assert compared_settings(settings[0])["init"] == "cifar10"
    assert "init" not in compared_settings(study.settings(study.rows[0], "small", 0))
    (tmp_path / "own.safetensors").touch()
    assert study.with_init(os.path.relpath(tmp_path / "own.safetensors")).init == str(tmp_path / "own.safetensors")


def test_a_default_that_is_spelled_out_makes_no_other_run(tmp_path: Path) -> None:
    """The baselines of pooling, which states how tokens are pooled, and of mechanisms, which does not, are one run."""
    pooling, mechanisms, store = find_study("pooling"), find_study("mechanisms"), ResultStore.read([STORED], "small")
    assert pooling.rows[1].settings["small"] != mechanisms.rows[0].settings["small"]
    found = store.of_row(pooling, pooling.rows[1], "small")
    assert found == store.of_row(mechanisms, mechanisms.rows[0], "small")
    assert len(found) == 3
    assert found != store.of_row(pooling, pooling.rows[0], "small")


def test_rows_on_other_sizes_of_built_in_data_are_other_runs(tmp_path: Path) -> None:
    sizes = [{"name": str(side), "settings": {"small": {"data": f"garments:{side}"}}} for side in (160, 320)]
    study = _study(tmp_path, _own(*sizes, task="detection"))
    compared = [compared_settings(study.settings(row, "small", 0))["data"] for row in study.rows]
    assert compared == ["garments:160", "garments:320"]


def test_cifar_10_is_known_by_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped results are of it: they count for a file with its contents under any name, and for no other file."""
    study, store = find_study("pooling"), ResultStore.read([STORED], "small")
    np.savez(tmp_path / "cifar.npz", x=np.arange(3))
    own = study.with_data(str(tmp_path / "cifar.npz"))
    assert (len(store.of_row(study, study.rows[0], "small")), store.of_row(own, own.rows[0], "small")) == (3, {})
    monkeypatch.setattr(cifar10, "CONTENTS", compared_settings(own.settings(own.rows[0], "small", 0))["data"])
    assert len(store.of_row(own, own.rows[0], "small")) == 3


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_shipped_results_are_complete(name: str) -> None:
    study, store = find_study(name), ResultStore.read([STORED], "small")
    assert [sorted(store.of_row(study, row, "small")) for row in study.rows] == [[0, 1, 2]] * ROWS[name]
