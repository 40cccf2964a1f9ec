"""The commands about models, costs and checkpoints: what they print, and what mistakes look like."""

from __future__ import annotations

import csv
import io
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vision_longformer
from vision_longformer import MODELS, VisionLongformer, load
from vision_longformer.checkpoint.release import release_config
from vision_longformer.cli.main import main
from vision_longformer.ops import IMPLEMENTATIONS

DATA = Path(__file__).parents[1] / "assets"
ARCH = "l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n2,s1,g1,p2,f3,a0_l3,h2,d24,n2,s0,g1,p2,f3,a0_l4,h4,d32,n1,s0,g0,p2,f3,a0"


@pytest.fixture
def vil(capsys: pytest.CaptureFixture[str]) -> Any:
    """A command line to its standard output; nothing may go to stderr."""

    def run(*argv: str) -> str:
        main(list(argv))
        output, errors = capsys.readouterr()
        assert errors == ""
        return output

    return run


def _mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence that a wrong command line is answered with."""
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    output, errors = capsys.readouterr()
    assert (stop.value.code, output) == (2, "")
    assert errors.startswith("vil: ")
    assert errors.endswith("\n")
    assert "Traceback" not in errors
    return errors.removeprefix("vil: ").strip()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ["doctor", "models", "cost", "table", "convert"]),
        (["--help"], ["Show what a model costs"]),
        (["--version"], ["vil 0.1.0"]),
        (["table"], ["usage: vil table", "cost"]),
        (["models", "--help"], ["usage: vil models", "[pattern]", "List the named models"]),
        (["convert", "--help"], ["--arch", "--attn-type", "--only-glo", "--overwrite"]),
    ],
)
def test_help(argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert all(text in output for text in expected)


def test_doctor(vil: Any) -> None:
    output = vil("doctor")
    assert torch.__version__.split("+")[0] in output
    assert "threads" in output
    lines = {line.split()[0]: line for line in output.splitlines() if line.split()}
    assert all("run here" in lines[name] for name in IMPLEMENTATIONS)
    assert "can run here" in lines["masked_dense"]
    assert "the rule must be 'exact'" in lines["unfold_nn"]


def test_doctor_as_json(vil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is null; unfold can run an exact window only."""
    monkeypatch.setattr("vision_longformer.cli.doctor.PACKAGES", ("torch", "no-such-package"))
    data = json.loads(vil("doctor", "--json"))
    assert data["versions"] == {"python": platform.python_version(), "torch": version("torch"), "no-such-package": None}
    assert data["machine"].keys() == {"system", "device", "threads", "processors"}
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert data["local_attention"].keys() == IMPLEMENTATIONS.keys()
    assert data["local_attention"]["masked_dense"] == {"chunk 28×28": None, "chunk 14×14": None, "exact 28×28": None}
    unfold = data["local_attention"]["unfold_nn"]
    assert unfold["exact 28×28"] is None
    assert "the rule must be 'exact'" in unfold["chunk 28×28"]


def test_models(vil: Any) -> None:
    output = vil("models", "vision_longformer_small*")
    lines = {line.split()[0]: line.split()[1:] for line in output.splitlines() if "vision_longformer" in line}
    assert lines["vision_longformer_small"] == ["224×224", "24.66", "4.862"]
    assert len(lines) == 4


def test_models_as_json(vil: Any) -> None:
    """The paper's numbers: 39.7 M parameters and 8.7 GFLOPs of ViL-Medium, 4.84 of Full Small 1-10-1, and so on."""
    rows = {row["model"]: row for row in json.loads(vil("models", "--json"))}
    assert list(rows) == list(MODELS)
    assert len(rows) == 198
    printed = {
        "vision_longformer_medium_ape": ([224, 224], "39.7", "8.7"),
        "vision_longformer_base_384": ([384, 384], "56.0", "43.7"),
        "msvit_small_1_10_1_full": ([224, 224], "27.6", "4.8"),
        "msvit_tiny_1_2_8_1_performer": ([224, 224], "6.6", "2.0"),
    }
    for name, expected in printed.items():
        row = rows[name]
        assert (row["img_size"], f"{row['params'] / 1e6:.1f}", f"{row['macs'] / 1e9:.1f}") == expected


def test_recipes(vil: Any) -> None:
    """Classifiers are listed with epochs, detectors, which are trained by steps, with steps."""
    rows = {row["recipe"]: row for row in json.loads(vil("recipes", "--json"))}
    row = rows["imagenet1k_small_full"]
    assert row.pop("about") == "Full attention; 81.9% in the paper"
    expected = {"recipe": "imagenet1k_small_full", "model": "msvit_small_1_2_8_1_full", "data": "imagenet"}
    assert row == {**expected, "epochs": 300, "batch_size": 256}
    rows = {row["recipe"]: row for row in json.loads(vil("detect", "recipes", "--json"))}
    row = rows["retinanet_tiny_3x"]
    assert "270,000 steps at several scales" in row.pop("about")
    expected = {"recipe": "retinanet_tiny_3x", "model": "vision_longformer_tiny", "data": "coco"}
    assert row == {**expected, "steps": 270_000, "batch_size": 16}


def test_cost(vil: Any) -> None:
    output = vil("cost", "vision_longformer_tiny", "--size", "97x143")
    assert "97×143" in output
    assert "as the paper counts" in output
    assert "executed (auto)" in output
    assert [line.split()[2] for line in output.splitlines() if "stage 1" in line] == ["25×36", "25×36"]


def test_cost_by_hand(vil: Any) -> None:
    """Twelve blocks on 196 tokens of 192 channels, in 10⁹ MACs; the head is 192 by 1,000."""
    lines = [line.split() for line in vil("cost", "evit_tiny_patch16").splitlines()]
    embedding, projections = (16 * 16 * 3 + 1) * 192 * 196, 12 * 4 * 196 * 192**2
    products, mlp = 12 * 2 * 196**2 * 192, 12 * 8 * 196 * 192**2
    total = embedding + projections + products + mlp
    billions = [f"{count / 1e9:.3f}" for count in (embedding, projections, products, mlp, total)]
    assert billions == ["0.029", "0.347", "0.177", "0.694", "1.246"]
    assert ["stage", "1", "14×14", *billions] in lines
    assert ["head", "0.000"] in lines
    assert ["total", "1.247"] in lines
    assert ["parameters:", "5.68", "M"] in lines


def test_cost_as_json(vil: Any) -> None:
    data = json.loads(vil("cost", "msvit_tiny_1_1_9_1_partial_vil", "--implementation", "masked_dense", "--json"))
    assert data["size"] == [224, 224]
    assert f"{data['paper']['total'] / 1e9:.4f}" == "1.3279"
    assert data["executed"]["implementation"] == "masked_dense"
    for count in (data["paper"], data["executed"]):
        assert sum(stage["total"] for stage in count["stages"]) + count["head"] == count["total"]


def test_one_number_is_a_square(vil: Any) -> None:
    assert json.loads(vil("cost", "evit_tiny_patch16", "--size", "96", "--json"))["size"] == [96, 96]


def test_table_cost(vil: Any) -> None:
    output = vil("table", "cost")
    assert output.splitlines()[-5:] == [
        "=  ours rounds to the printed digits",
        "t  ours gives the printed digits only if truncated instead of rounded",
        "!  ours differs, with the reason below the table",
        "GFLOPs equal to the printed digits: 114 of 115 if rounded",
        "parameter counts equal to the printed digits: 99 of 115 if rounded; 9 more only if truncated",
    ]
    assert sum(line.startswith("  ! ") for line in output.splitlines()) == 8
    (line,) = [line for line in output.splitlines() if line.startswith("  SRA/64 small 1-2-8-1")]
    assert line.split()[3:] == ["52.9", "52.9473", "+0.0473", "=", "3.97", "3.9679", "-0.0021", "="]


def test_table_cost_for_programs(vil: Any) -> None:
    data = json.loads(vil("table", "cost", "--json"))
    assert data["summary"]["gflops"] == {"rounded": 114, "truncated": 0, "of": 115}
    marks = [row["params"]["mark"] for row in data["rows"]]
    assert (marks.count("="), marks.count("t"), marks.count("!")) == (99, 9, 7)
    flat = list(csv.DictReader(io.StringIO(vil("table", "cost", "--csv"))))
    assert len(flat) == 115
    assert [row["gflops_mark"] for row in flat] == [row["gflops"]["mark"] for row in data["rows"]]
    assert flat[0]["params_paper"] == data["rows"][0]["params"]["paper"] == "5.7"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["tabel"], "unknown command 'tabel'; did you mean 'table'?"),
        (["table", "cots"], "unknown command 'table cots'; did you mean 'table cost'"),
        (["--verbose"], "unknown option '--verbose'; did you mean '--version'?"),
        (["cost"], "the following arguments are required: model"),
        (["cost", "vision_longformer_smal"], "did you mean 'vision_longformer_small'"),
        (["models", "vision_longformer_smal"], "did you mean 'vision_longformer_small'"),
        (["cost", "vision_longformer_tiny", "--size", "224x"], "--size: '224x' is not a size; write 224 or 480x640"),
        (["cost", "vision_longformer_tiny", "--size", "0x224"], "argument --size: '0x224' is not a size"),
        (["cost", "vision_longformer_tiny", "--implementation", "tilde"], "unknown implementation 'tilde'"),
        (["cost", "vision_longformer_tiny", "--implementation", "unfold_nn"], "cannot run this: unfold slides"),
        (["cost", "vision_longformer_tiny", "--sise", "3"], "unknown option '--sise'; did you mean '--size'?"),
        (["train", "--epoch", "3"], "unknown option '--epoch'; did you mean '--epochs'"),
        (
            ["detect", "train", "--min-size", "300"],
            "unknown option '--min-size'; write it as --detector-options '{\"min_size\": ...}'",
        ),
        (
            ["train", "--mlp_ratio=3"],
            "unknown option '--mlp-ratio'; write it as --model-options '{\"mlp_ratio\": ...}'",
        ),
        (["detect", "train", "--skip-bda"], "unknown option '--skip-bda'; did you mean '--skip-bad'"),
        (["table", "cost", "--json", "--csv"], "give --json or --csv, not both"),
        (["convert", "a.pth", "b.safetensors"], "arguments are required: --arch"),
        (["convert", "no.pth", "b.safetensors", "--arch", "l1,h1,d8"], "there is no file no.pth"),
        (["convert", "no.pth", "b.safetensors", "--arch", "l1", "--to", "vision_longformer_tin"], "did you mean"),
        (
            ["convert", "no.pth", "b.safetensors", "--arch", "l1", "--mode", "two"],
            "argument --mode: 'two' is not an integer",
        ),
    ],
)
def test_mistakes(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = _mistake(capsys, *argv)
    assert sentence in message
    assert "\n" not in message


@pytest.fixture
def released(tmp_path: Path) -> tuple[str, list[str], dict[str, torch.Tensor]]:
    """A small file of the authors' release, the options that describe it, and its image and logits."""
    with np.load(DATA / "golden" / "models" / "vil_rpb_4stage.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    state = {name.removeprefix("state/"): array for name, array in arrays.items() if name.startswith("state/")}
    path = tmp_path / "released.pth"
    torch.save({"net": state, "arch": "msvit"}, path)
    return str(path), ["--arch", ARCH, "--img_size", "64"], arrays


def _logits(path: Path, image: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load(path)(image)


def test_convert(released: Any, tmp_path: Path, vil: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source, options, arrays = released
    ours = tmp_path / "ours.safetensors"
    assert f"wrote {ours}" in vil("convert", source, str(ours), *options)
    torch.testing.assert_close(_logits(ours, arrays["x"]), arrays["logits"], atol=1e-9, rtol=1e-9)
    assert f"{ours} exists" in _mistake(capsys, "convert", source, str(ours), *options)
    vil("convert", source, str(ours), *options, "--overwrite", "--sw_exact", "-1", "--sharew", "true")
    assert load(ours).config.stages[0].attention.rule == "cyclic_release"  # type: ignore[attr-defined]


def test_convert_to_a_named_model(
    released: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention becomes Longformer; the windows cover the map, so that the logits stay."""
    source, options, arrays = released
    config = release_config(ARCH.replace("s0", "s1"), img_size=64, num_classes=1000)
    monkeypatch.setitem(MODELS, "toy", config)
    named = tmp_path / "named.safetensors"
    main(["convert", source, str(named), *options, "--to", "toy"])
    assert "resized 3 tables" in capsys.readouterr().err
    assert load(named).config == config.override(num_classes=5)
    torch.testing.assert_close(_logits(named, arrays["x"]), arrays["logits"], atol=1e-9, rtol=1e-9)


def test_convert_to_a_named_model_keeps_classes_channels_and_pooling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"num_classes": 3, "in_chans": 1, "global_pool": "token"}
    model = VisionLongformer(MODELS["vision_longformer_micro"], **own)
    monkeypatch.setattr(vision_longformer, "load_release", lambda *path, **options: model)
    named = tmp_path / "named.safetensors"
    main(["convert", "released.pth", str(named), "--arch", "any", "--to", "vision_longformer_micro"])
    assert " M parameters, for images of 32×32" in capsys.readouterr().out
    config = load(named).config
    assert {name: getattr(config, name) for name in own} == own


def test_convert_of_something_else(released: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, (_, arch, *size), _ = released
    ours = tmp_path / "ours.safetensors"
    assert "does not match the model described by arch" in _mistake(
        capsys, "convert", source, str(ours), "--arch", arch.replace("n2", "n1"), *size
    )
    assert "should end in .safetensors" in _mistake(
        capsys, "convert", source, str(tmp_path / "ours.pt"), "--arch", arch, *size
    )
    Path(source).write_bytes(b"no checkpoint")
    assert "nothing was loaded" in _mistake(capsys, "convert", source, str(ours), "--arch", arch)
    assert not ours.exists()
