"""``vil encode``: maps in files against the model's own, runs that are killed, and what is refused before a run."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_stream import longformer, model_of, plain
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from vision_longformer import save
from vision_longformer.cli.encode import parse_stages
from vision_longformer.cli.main import main
from vision_longformer.cli.output import progress_bar
from vision_longformer.files import atomic_folder
from vision_longformer.large import encode as encode_image
from vision_longformer.large import open_image
from vision_longformer.large.encode import _write_npy, draw_map

zarr = pytest.importorskip("zarr")

PIXELS = np.random.default_rng(0).integers(0, 256, (41, 27, 3), dtype=np.uint8)
MODEL = model_of(longformer(rule="cyclic", num_classes=3), torch.float32)
GIVEN = {"image.png", "model.safetensors"}
USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an image and a checkpoint."""
    monkeypatch.chdir(_folder(tmp_path))
    return tmp_path


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    Image.fromarray(PIXELS).save(path / "image.png")
    save(MODEL, path / "model.safetensors")
    return path


def encode(*argv: str) -> None:
    main(["encode", "model.safetensors", "image.png", *argv])


def expected() -> tuple[Tensor, Tensor, list[Tensor]]:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return plain(MODEL, (torch.from_numpy(PIXELS).permute(2, 0, 1) / 255 - mean) / std)


def close(got: Any, wanted: Tensor) -> bool:
    assert got.dtype == np.float32
    return bool((torch.from_numpy(np.asarray(got)) - wanted).abs().max() <= 1e-5 * wanted.abs().max())


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        encode(*argv)
    return capsys.readouterr().err.removeprefix("vil: ").strip()


@pytest.mark.parametrize("storage", [[], ["--storage", "tokens"]], ids=["memory", "files"])
def test_zarr_holds_the_models_maps(folder: Path, capsys: pytest.CaptureFixture[str], storage: list[str]) -> None:
    encode("--output", "features.zarr", "--stages", "1,2", *storage)
    logits, features, maps = expected()
    group = zarr.open(folder / "features.zarr", mode="r")
    assert close(group["stage1"], maps[0])
    assert close(group["stage2"], maps[1])
    assert dict(group["stage1"].attrs) == {"stride": 2, "origin": [0, 0]}
    assert dict(group["stage2"].attrs) == {"stride": 4, "origin": [0, 0]}
    assert group.attrs["normalisation"] == {"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)}
    assert (group.attrs["model"], group.attrs["image"], group.attrs["level"]) == ("model.safetensors", "image.png", 0)
    assert close(np.float32(group.attrs["logits"]), logits)
    assert close(np.float32(group.attrs["features"]), features)
    assert {path.name for path in folder.iterdir()} == GIVEN | {"features.zarr", "features.png"}
    output = capsys.readouterr().out
    assert "stage 2: 11×7 tokens of 8" in output
    assert f"{100 * logits.softmax(0).max():.2f}" in output
    assert Image.open("features.png").size == (7 * 46, 11 * 46)


def test_numpy_arrays(folder: Path) -> None:
    _, _, maps = expected()
    encode("--output", "last.npy")
    assert close(np.load("last.npy"), maps[1])
    np.save("again.npy", np.load("last.npy"))
    assert Path("last.npy").read_bytes() == Path("again.npy").read_bytes()
    assert json.loads(Path("last.json").read_text())["stride"] == 4
    encode("--output", "deep/both", "--stages", "2,1", "--dtype", "bfloat16")
    assert {path.name for path in Path("deep/both").iterdir()} == {"stage1.npy", "stage2.npy", "attributes.json"}
    assert Path("deep/both.png").exists()
    assert np.abs(np.load("deep/both/stage2.npy") - maps[1].numpy()).max() < 0.03 * maps[1].abs().max()
    assert json.loads(Path("deep/both/attributes.json").read_text())["maps"]["stage1"]["stride"] == 2


def test_a_named_model_has_random_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["encode", "vision_longformer_nano", "image.png", "--output", "x.npy"])
    assert "vision_longformer_nano is not trained: its weights are random" in capsys.readouterr().out
    assert np.load("x.npy").shape == (3, 2, 128)
    assert json.loads(Path("x.json").read_text())["logits"] == []


def test_nothing_is_overwritten_silently(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for output, existing in [("a.zarr", "a.png"), ("b.npy", "b.json"), ("c", "c.png")]:
        Path(existing).write_text("mine")
        sentence = mistake(capsys, "--output", output)
        assert sentence == f"{existing} exists; choose another output, or replace it with --overwrite"
        assert Path(existing).read_text() == "mine"
        encode("--output", output, "--overwrite")
        encode("--output", output, "--overwrite")
        assert Path(existing).read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("image", "output", "path"),
    [
        ("photo.png", "photo.zarr", "photo.png"),
        ("photo.png", "photo.npy", "photo.png"),
        ("link.png", "photo", "photo.png"),
        ("photo.npy", "photo.npy", "photo.npy"),
        ("photos/photo.png", "photos", "photos"),
    ],
)
def test_the_image_is_never_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str], image: str, output: str, path: str
) -> None:
    """Not by the picture beside the output, nor by the output; not under another name, nor with its folder."""
    Image.fromarray(PIXELS).save("photo.png")
    np.save("photo.npy", PIXELS)
    Path("photos").mkdir()
    shutil.copy("photo.png", "photos")
    Path("link.png").symlink_to("photo.png")
    before = contents(folder)
    with pytest.raises(SystemExit):
        main(["encode", "model.safetensors", image, "--output", output, "--overwrite"])
    sentence = f"vil: {path} would overwrite the image {image}; choose another output"
    assert capsys.readouterr().err.strip() == sentence
    assert contents(folder) == before


def test_the_checkpoint_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    shutil.move("model.safetensors", "run")
    before = contents(folder)
    with pytest.raises(SystemExit):
        main(["encode", "run/model.safetensors", "image.png", "--output", "run", "--overwrite"])
    sentence = "vil: run would overwrite the checkpoint run/model.safetensors; choose another output"
    assert capsys.readouterr().err.strip() == sentence
    assert contents(folder) == before


def make_folder(path: str, *names: str) -> None:
    Path(path).mkdir()
    for name in names:
        (Path(path) / name).write_text("mine")


HOLDS = "holds files that 'vil encode' did not write"

FOREIGN: list[tuple[str, Callable[[], Any], str]] = [
    ("x", lambda: make_folder("x", "stage1.npy", "notes.txt"), f"x {HOLDS} (notes.txt), so it is not replaced"),
    ("x", lambda: make_folder("x", *"edcba"), f"x {HOLDS} (a, b, c and 2 more), so it is not replaced"),
    ("x", lambda: make_folder("x", ".git"), f"x {HOLDS} (.git), so it is not replaced"),
    ("x.zarr", lambda: make_folder("x.zarr", "stage1.npy"), f"x.zarr {HOLDS} (stage1.npy), so it is not replaced"),
    ("x.zarr", lambda: make_folder("x.zarr", "zarr.json", "0"), f"x.zarr {HOLDS} (0), so it is not replaced"),
    ("x", lambda: Path("x").write_text("mine"), "x is not a folder, and a folder cannot replace it"),
    ("x", lambda: Path("x").symlink_to("nothing"), "x is not a folder, and a folder cannot replace it"),
    ("x.npy", lambda: make_folder("x.npy"), "x.npy is a folder, and a file cannot replace it"),
    ("x", lambda: make_folder("x.png"), "x.png is a folder, and a file cannot replace it"),
]


@pytest.mark.parametrize(("output", "make", "sentence"), FOREIGN)
def test_only_outputs_are_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], output: str, make: Callable[[], Any], sentence: str
) -> None:
    make()
    before = tree(folder)
    assert mistake(capsys, "--output", output, "--overwrite") == f"{sentence}; choose another output"
    assert tree(folder) == before


def test_a_link_is_replaced_but_not_what_it_leads_to(folder: Path) -> None:
    encode("--output", "first", "--stages", "1")
    Path("link").symlink_to("first")
    before = contents(folder / "first")
    for _ in range(2):
        encode("--output", "link", "--overwrite")
        assert not Path("link").is_symlink()
        assert set(contents(folder / "link")) == {"stage2.npy", "attributes.json"}
    assert contents(folder / "first") == before
    assert {path.name for path in folder.iterdir()} == GIVEN | {"first", "first.png", "link", "link.png"}


@pytest.mark.parametrize("storage", ["x", "x/tokens", "y/../x/a/b"])
def test_tokens_are_not_kept_in_the_output(folder: Path, capsys: pytest.CaptureFixture[str], storage: str) -> None:
    Path("y").mkdir()
    sentence = f"{storage}, the folder for tokens, would be inside the output x; choose another one"
    assert mistake(capsys, "--output", "x", "--storage", storage) == sentence
    assert {path.name for path in folder.iterdir()} == GIVEN | {"y"}


def test_stages_in_any_order_and_twice(folder: Path) -> None:
    options = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "attributes": {}}
    encode_image(MODEL, open_image("image.png"), "x.npy", stages=[1, 1], **options)
    assert np.load("x.npy").shape == (11, 7, 8)
    streamed = encode_image(MODEL, open_image("image.png"), "y", stages=[1, 0, 1], **options)
    assert list(streamed.maps) == [0, 1]


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        _write_npy(Path("/dev/full"), torch.zeros(100, 100, 3))


@pytest.mark.parametrize("output", ["x.npy", "x"])
def test_what_a_failed_run_was_to_replace_stays(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """Nor is it replaced by a later run without ``--overwrite``, while what did not exist before is."""
    again = ("--output", output, "--stages", "1")
    encode("--output", output)
    os.unlink("x.png")
    before = tree(folder)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["vision_longformer.large.encode"], "_write_npy", fail)
        sentence = f"{output} cannot be written: No space left on device; free some space and run the command again"
        assert mistake(capsys, *again, "--overwrite") == f"{sentence}; with --storage it resumes"
    Path("x.png").write_text("half written")
    sentence = f"{output} exists; choose another output, or replace it with --overwrite"
    assert mistake(capsys, *again) == sentence
    assert tree(folder) == before | {"x.png": b"half written", f".{output}.unfinished": b"'x.png'\n"}
    shutil.move(output, "elsewhere")
    Path("x.json").unlink(missing_ok=True)
    encode(*again)
    assert {path.name for path in folder.iterdir()} >= {output, "x.png"}
    assert not Path(f".{output}.unfinished").exists()


def test_a_folder_that_was_moved_away_is_put_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with ``--overwrite`` killed after it moved the old folder away and before the new one had its name."""
    encode("--output", "x")
    before = contents(folder / "x")
    os.unlink("x.png")
    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda old, new: killed() if Path(new).name == "x" else replace(old, new))
        with pytest.raises(Killed):
            encode("--output", "x", "--stages", "1", "--overwrite")
    assert not Path("x").exists()
    assert mistake(capsys, "--output", "x").startswith("x exists; choose another output")
    assert contents(folder / "x") == before


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that was made in a folder: files with their bytes, folders with None."""
    made = {**dict.fromkeys(str(path.relative_to(folder)) for path in folder.rglob("*")), **contents(folder)}
    return {name: data for name, data in made.items() if name not in GIVEN}


class Killed(BaseException):
    pass


def killed() -> None:
    raise Killed


def kill(patch: pytest.MonkeyPatch, left: int) -> None:
    """From the given change of files on, none is made any more, whoever tries."""

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*arguments, **options)

        return changed

    for owner, name in [(os, "replace"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree"), (Path, "write_text")]:
        patch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("output", ["x.npy", "x.zarr", "x"])
@pytest.mark.parametrize("storage", [[], ["--storage", "tokens"]], ids=["memory", "files"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["new", "overwrite"])
def test_a_run_killed_while_it_writes_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, storage: list[str], overwrite: list[str]
) -> None:
    """At every change that it makes to files; what it has left then vanishes."""
    monkeypatch.chdir(_folder(tmp_path / "undisturbed"))
    encode("--output", output)
    expected, kills, finished = tree(Path()), 0, False
    while not finished:
        monkeypatch.chdir(_folder(tmp_path / str(kills)))
        if overwrite:
            encode("--output", output, "--stages", "1")
        try:
            with monkeypatch.context() as patch:
                kill(patch, kills)
                encode("--output", output, *storage, *overwrite)
            finished = True
        except Killed:
            encode("--output", output, *storage, *overwrite)
        assert tree(Path()) == expected, kills
        kills += 1
    assert kills >= 4


def test_refused_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ("--output", "x.zarr", "--stages", "1,2")
    assert "x.npy holds one map, not 2" in mistake(capsys, "--output", "x.npy", "--stages", "1,2")
    assert "stages is '5'; write numbers from 1 to 2" in mistake(capsys, "--output", "x.npy", "--stages", "5")
    assert "unknown dtype 'float8'" in mistake(capsys, "--output", "x.npy", "--dtype", "float8")
    too_small = mistake(capsys, *both, "--memory", "1KB")
    assert "1MB of memory is too little for an image of 41×27; at least 25MB is needed, 1MB of it" in too_small
    assert "x/y.npy cannot be written: " in mistake(capsys, "--output", "image.png/x/y.npy")
    assert ". is not a name for an output; give NAME.zarr, NAME.npy or a folder" in mistake(capsys, "--output", ".")
    assert "nothing; weights that are built in are" in _of_model(capsys, "nothing")
    monkeypatch.setitem(sys.modules, "zarr", None)
    assert "x.zarr needs the package zarr; install it with: pip install" in mistake(capsys, *both)
    assert {path.name for path in folder.iterdir()} == GIVEN


def _of_model(capsys: pytest.CaptureFixture[str], name: str) -> str:
    with pytest.raises(SystemExit):
        main(["encode", name, "image.png", "--output", "x.npy"])
    return capsys.readouterr().err


def test_no_room(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of 21×14 and 11×7 tokens of 8 numbers of 4 bytes; in files the first and its copy, all on one disk."""
    first, second = 21 * 14 * 8 * 4, 11 * 7 * 8 * 4
    both = ("--output", "x.zarr", "--stages", "1,2", "--overwrite")
    for extra, needed in [((), first + second), (("--storage", "tokens"), first + second + 2 * first)]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path, needed=needed: USAGE(0, 0, needed - 1))
        assert "x.zarr needs 1MB on its disk while it is made, but only 1MB is free" in mistake(capsys, *both, *extra)
        assert not Path("tokens").exists()
        monkeypatch.setattr(shutil, "disk_usage", lambda path, needed=needed: USAGE(0, 0, needed))
        encode(*both, *extra)


def test_stages() -> None:
    assert parse_stages(None, 4) == [3]
    assert parse_stages("4,1,4", 4) == [0, 3]
    for wrong in ("0", "5", "a", "1,", ""):
        with pytest.raises(ValueError, match="write numbers from 1 to 4 with commas, such as 1,4"):
            parse_stages(wrong, 4)


def test_a_picture_shows_principal_components(tmp_path: Path) -> None:
    """Tokens that differ along one direction only, from left to right: red alone goes from dark to bright."""
    ramp = torch.linspace(0, 1, 101).view(1, 101, 1).expand(4, 101, 1) * torch.tensor([0.0, 3.0, 4.0, 0.0])
    draw_map(ramp, tmp_path / "x.png")
    picture = np.asarray(Image.open(tmp_path / "x.png"))
    assert picture.shape == (4 * 5, 101 * 5, 3)
    red = picture[0, ::5, 0].astype(int)
    assert np.abs(red - np.clip((np.arange(101) - 1) / 98 * 255, 0, 255)).max() <= 3
    assert picture[..., 1:].max() <= 1
    exact = torch.arange(8, dtype=torch.float64).view(2, 2, 2)
    draw_map(exact, tmp_path / "exact.png")
    assert exact.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # the map stays as it is
    draw_map(torch.zeros(1, 1, 2), tmp_path / "one.png")
    draw_map(torch.randn(1, 1200, 3), tmp_path / "long.png")
    assert Image.open(tmp_path / "long.png").size == (400, 1)


def test_a_picture_is_drawn_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """600×4 tokens, of which every second one is drawn: never more than the 2 of a row are in float64."""
    sizes = []
    double = Tensor.double
    monkeypatch.setattr(Tensor, "double", lambda tensor: sizes.append(tuple(tensor.shape)) or double(tensor))
    rows = torch.arange(600.0).view(600, 1, 1).expand(600, 4, 1) * torch.tensor([2.0, 1.0, 0.0])
    draw_map(rows, tmp_path / "x.png")
    assert set(sizes) == {(2, 3)}
    red = np.asarray(Image.open(tmp_path / "x.png"))[:, 0, 0].astype(int)
    assert red.shape == (300,)
    assert np.abs(red - np.clip((np.arange(300) - 2.99) / (299 - 2 * 2.99) * 255, 0, 255)).max() <= 1


def test_the_time_left_is_that_of_this_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did an eighth, after the half of an earlier run, in 40 s; so three eighths take 120 s."""
    clock = iter([100.0, 140.0, 170.0])
    monkeypatch.setattr("vision_longformer.cli.output.time.monotonic", lambda: next(clock))
    with progress_bar("encoding") as progress:
        progress(5, 8, 4)
        progress(4, 8, 4)
    assert capsys.readouterr().err == "encoding: 62%, 2 min 0 s left\n"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made"

    def fail(overwrite: bool = False) -> None:
        with atomic_folder(path, overwrite=overwrite) as folder:
            (folder / "part").write_text("1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())
    (tmp_path / ".made.new").mkdir()
    (tmp_path / ".made.new" / "of a killed process").write_text("1")
    for text in ("1", "2"):
        with atomic_folder(path, overwrite=text == "2") as folder:
            (folder / "whole").write_text(text)
        assert [(file.name, file.read_text()) for file in path.iterdir()] == [("whole", text)]
    with pytest.raises(RuntimeError):
        fail(overwrite=True)
    assert (path / "whole").read_text() == "2"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError, match="made exists"), atomic_folder(path):
        pass


VIL = [sys.executable, "-X", "faulthandler", "-m", "vision_longformer"]

KILLED = """
import os, signal, sys
from vision_longformer.cli.main import main
from vision_longformer.large.storage import FileMap
write, left = FileMap.write, int(sys.argv.pop(1))
def count(*args):
    global left
    left -= 1
    write(*args)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
FileMap.write = count
main(sys.argv[1:])
"""
"""``vil``, killed by the system after so many strips are written."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bytes(folder: Path) -> None:
    """A first stage of 128×48 tokens: 8 strips of 8 chunk rows of 2 for its patches and for each of two blocks.

    Each run is a program of its own, as it is for a user.
    """
    pixels = np.random.default_rng(1).integers(0, 256, (256, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("image.png")
    strips = random.randint(9, 23)
    command = ["encode", "model.safetensors", "image.png", "--stages", "1,2"]
    files = [*command, "--output", "resumed.zarr", "--storage", "tokens"]
    done = subprocess.run([sys.executable, "-c", KILLED, str(strips), *files])
    assert done.returncode == -signal.SIGKILL
    assert not Path("resumed.zarr").exists()
    finished, begun = (strips - 1) // 8 - 1, (strips - 1) // 8
    kept = [".lock", f"stage1-block{finished}.tokens", f"stage1-block{begun}.tokens", "state.safetensors"]
    assert sorted(path.name for path in Path("tokens").iterdir()) == kept
    subprocess.run([*VIL, *files], check=True)
    subprocess.run([*VIL, *command, "--output", "plain.zarr"], check=True)
    assert contents(Path("resumed.zarr")) == contents(Path("plain.zarr"))
    assert Path("resumed.png").read_bytes() == Path("plain.png").read_bytes()
    assert not Path("tokens").exists()
