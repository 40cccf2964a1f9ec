"""Tokens in files: the same results, runs that are resumed, and the room they need."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_bytes
from test_stream import longformer, model_of
from torch import Tensor

from vision_longformer import VisionLongformer
from vision_longformer.files import lock_file
from vision_longformer.geometry import Grid
from vision_longformer.large import Progress, pixels, stream
from vision_longformer.large.memory import STORAGE, Work, format_bytes, parse_bytes
from vision_longformer.large.storage import FileMap

IMAGE = torch.randn(3, 41, 27, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("rule", ["chunk", "cyclic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_files_and_memory_agree_to_the_bit(tmp_path: Path, rule: str, dtype: torch.dtype) -> None:
    model = model_of(longformer(rule, position="relative", tokens=(2, 2)))
    expected = stream(model, IMAGE, rows=2, maps=[0, 1], dtype=dtype)
    got = stream(model, IMAGE, rows=2, maps=[0, 1], dtype=dtype, storage=tmp_path)
    assert torch.equal(got.logits, expected.logits)
    for stage in (0, 1):
        assert torch.equal(got.maps[stage], expected.maps[stage])
    assert files(tmp_path) == {"state.safetensors", "stage1-block2.tokens", "stage2-block1.tokens"}
    again = stream(model, IMAGE, rows=2, maps=[0, 1], dtype=dtype, storage=tmp_path)
    assert torch.equal(again.logits, expected.logits)
    assert torch.equal(again.maps[0], expected.maps[0])


class Killed(Exception):
    pass


def interrupted(model: VisionLongformer, folder: Path, strips: int) -> None:
    """A run that ends after some strips."""
    left = [strips]

    def count(progress: Progress) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    with pytest.raises(Killed):
        stream(model, IMAGE, rows=2, maps=[0], storage=folder, progress=count)


def resumed(model: VisionLongformer, folder: Path) -> tuple[Tensor, list[Progress]]:
    seen: list[Progress] = []
    got = stream(model, IMAGE, rows=2, maps=[0], storage=folder, progress=seen.append)
    assert torch.equal(got.maps[0], stream(model, IMAGE, rows=2, maps=[0]).maps[0])
    return got.logits, seen


PATCHES, BLOCK, SECOND = 21 * 14 * 8 * 12, 21 * 14 * 8 * (4 * 8 + 2 * 32 + 2 * 36), 11 * 7 * 8 * 32
"""Multiplications: patches of 2×2×3 to 8 numbers; a block with a hidden layer of 32 and 9·2² keys; patches of 2×2×8."""

RESUMED = {
    (0, 0): 0,
    (0, 1): PATCHES,
    (0, 2): PATCHES + BLOCK,
    (1, 0): PATCHES + 2 * BLOCK,
    (1, 1): PATCHES + 2 * BLOCK + SECOND,
}


def test_a_run_is_resumed_after_its_last_finished_block(tmp_path: Path) -> None:
    """A map of 21×14 tokens: six strips of two chunk rows of 2 for the embedding and for each of two blocks."""
    model = model_of(longformer("cyclic", tokens=(1, 1), carry_global_tokens=True))
    expected = stream(model, IMAGE, rows=2).logits
    for strips, first in [(3, (0, 0)), (9, (0, 1)), (15, (0, 2)), (18, (0, 2)), (20, (1, 0)), (22, (1, 1))]:
        folder = tmp_path / str(strips)
        interrupted(model, folder, strips)
        logits, seen = resumed(model, folder)
        assert torch.equal(logits, expected)
        assert tuple(seen[0].step) == first
        assert seen[-1].done == seen[-1].total
        assert {progress.resumed for progress in seen} == {RESUMED[first]}


def test_a_folder_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the changed image only the last of 41 rows is another, which is hashed in the third piece of 16."""
    monkeypatch.setattr(pixels, "HASHED_ROWS", 16)
    model, changed = model_of(longformer()), IMAGE.clone()
    changed[1, -1, -1] += 1
    stream(model, IMAGE, rows=2, storage=tmp_path)
    others = [
        (model_of(longformer(), seed=1), IMAGE, {}),
        (model, IMAGE[:, :-1], {}),
        (model, IMAGE, {"identity": "another file"}),
        (model, changed, {}),
        (model, changed.permute(1, 2, 0).numpy(), {}),
        (model, IMAGE, {"maps": [0]}),
        (model, IMAGE, {"dtype": torch.float32}),
    ]
    for other, image, options in others:
        with pytest.raises(
            ValueError, match="holds the tokens of another model, image or setting; delete it or choose"
        ):
            stream(other, image, rows=2, storage=tmp_path, **options)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    """Also while the first is in the middle; it goes on to its own result, and the folder is free again."""
    model, folder = model_of(longformer()), tmp_path / "tokens"
    expected = stream(model, IMAGE, rows=2).logits

    def second_run(progress: Progress) -> None:
        with pytest.raises(
            ValueError, match=r"^another process keeps its tokens in .*tokens; wait for it, or choose another folder$"
        ):
            stream(model, IMAGE[:, :20], rows=2, storage=folder)

    assert torch.equal(stream(model, IMAGE, rows=2, storage=folder, progress=second_run).logits, expected)
    assert files(folder) == {"state.safetensors", "stage2-block1.tokens"}
    assert torch.equal(stream(model, IMAGE, rows=2, storage=folder).logits, expected)


def test_a_lock_that_its_holder_deletes_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever locks a deleted file would not be seen by those who come later."""
    path, flock = tmp_path / "lock", fcntl.flock

    def lock_late(*arguments: Any) -> None:
        monkeypatch.undo()
        flock(*arguments)
        path.unlink()
        path.touch()

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with lock_file(path, "busy"), pytest.raises(ValueError, match=r"^busy$"):
        lock_file(path, "busy")


def test_files_that_were_half_written_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".state.abcd1234.safetensors").write_text("of a killed process")
    (tmp_path / ".stately.abcd1234.safetensors").write_text("mine")
    stream(model_of(longformer()), IMAGE, rows=2, storage=tmp_path)
    assert files(tmp_path) == {".stately.abcd1234.safetensors", "state.safetensors", "stage2-block1.tokens"}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"", r"Error while deserializing header: .*"),
        (b"\x02\0\0\0\0\0\0\0{}", r"'NoneType' object is not subscriptable"),
        (save_bytes({"x": torch.zeros(1)}, {"state": "{}"}), r"File does not contain tensor global_tokens"),
        (save_bytes({"global_tokens": torch.zeros(1)}, {"state": "{}"}), r"'identity'"),
        (save_bytes({"global_tokens": torch.zeros(1)}, {"state": "{"}), r"Expecting property name .*"),
    ],
)
def test_a_damaged_or_foreign_state_is_told(tmp_path: Path, state: bytes, reason: str) -> None:
    (tmp_path / "state.safetensors").write_bytes(state)
    with pytest.raises(
        ValueError,
        match=rf"^.*/state.safetensors is damaged or not the state of a run \({reason}\); delete {tmp_path}, or choose "
        "another folder$",
    ):
        stream(model_of(longformer()), IMAGE, rows=2, storage=tmp_path)
    assert (tmp_path / "state.safetensors").read_bytes() == state


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    model = model_of(longformer())
    interrupted(model, tmp_path, 9)
    (path,) = tmp_path.glob("stage1-block0.tokens")
    path.write_bytes(path.read_bytes()[:-1])
    told = rf"stage1-block0.tokens has 18815 bytes instead of {21 * 14 * 8 * 8}; delete {tmp_path} and start again$"
    with pytest.raises(OSError, match=told):
        stream(model, IMAGE, rows=2, maps=[0], storage=tmp_path)
    path.unlink()
    told = rf"stage1-block0.tokens, which state.safetensors names, is gone; delete {tmp_path} and start again$"
    with pytest.raises(FileNotFoundError, match=told):
        stream(model, IMAGE, rows=2, maps=[0], storage=tmp_path)


def test_a_kept_map_that_was_cut_off_is_told(tmp_path: Path) -> None:
    model = model_of(longformer())
    stream(model, IMAGE, rows=2, maps=[0], storage=tmp_path)
    os.truncate(tmp_path / "stage1-block2.tokens", 100)
    told = rf"stage1-block2.tokens has 100 bytes instead of {21 * 14 * 8 * 8}; delete {tmp_path} and start again$"
    with pytest.raises(OSError, match=told):
        stream(model, IMAGE, rows=2, maps=[0], storage=tmp_path)


@pytest.mark.parametrize("below", ["", "/tokens"])
def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path, below: str) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    folder = f"{tmp_path}/photo.jpg{below}"
    told = rf"^tokens cannot be kept in {folder}: {tmp_path}/photo.jpg is a file; give a folder$"
    with pytest.raises(NotADirectoryError, match=told):
        stream(model_of(longformer()), IMAGE, rows=2, storage=folder)


FULL = r"^/dev/full cannot be written: No space left on device; free some space and run the command again; it resumes$"


def test_a_full_disk_is_told() -> None:
    """When strips are written, or what is buffered of them at the end."""
    file = FileMap(Path("/dev/full"), Grid(2, 100_000), 2, torch.float32, new=True)
    with pytest.raises(OSError, match=FULL):
        file.write(range(0, 1), torch.zeros(100_000, 2))
    file = FileMap(Path("/dev/full"), Grid(2, 1), 2, torch.float32, new=True)
    file.write(range(0, 1), torch.zeros(1, 2))
    with pytest.raises(OSError, match=FULL):
        file.flush()


def test_rows_of_a_file(tmp_path: Path) -> None:
    tokens = torch.arange(24, dtype=torch.bfloat16).view(12, 2)
    file = FileMap(tmp_path / "map", Grid(4, 3), 2, torch.bfloat16, new=True)
    file.write(range(2, 4), tokens[6:])
    file.write(range(0, 2), tokens[:6].float())
    assert torch.equal(file.read(range(1, 3)), tokens[3:9])
    assert file.read(range(0)).shape == (0, 2)
    file.flush()
    assert torch.equal(file.tensor(), tokens.view(4, 3, 2))
    os.truncate(tmp_path / "map", 4 * 3 * 2 * 2 - 1)
    with pytest.raises(OSError, match=rf"map ends before row 4 of 4; delete {tmp_path} and start again$"):
        file.read(range(2, 4))


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of 21×14 tokens of 8 numbers in float64 and its copy are 2·21·14·8·8 bytes."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2 * 21 * 14 * 64 - 1))
    with pytest.raises(OSError, match=r"needs 1MB for tokens, but only 1MB is free; use another disk$"):
        stream(model_of(longformer()), IMAGE, rows=2, storage=tmp_path)
    assert not tmp_path.exists()  # as nothing is in it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2 * 21 * 14 * 64))
    stream(model_of(longformer()), IMAGE, rows=2, storage=tmp_path)


# Memory


def work(kept: tuple[int, ...] = (), in_memory: bool = True) -> Work:
    return Work(longformer(), 2, (40, 24), torch.bfloat16, torch.float32, kept, in_memory)


def test_bytes_of_tokens_by_hand() -> None:
    """Maps of 20×12 and 10×6 tokens of 8 numbers of two bytes; the second fits into the first."""
    first, second = 20 * 12 * 8 * 2, 10 * 6 * 8 * 2
    assert work().token_bytes() == first
    assert work(kept=(0,)).token_bytes() == first + second
    assert work(kept=(1,)).token_bytes() == first
    assert work(in_memory=False).token_bytes() == 0
    assert work().disk_bytes() == 2 * first
    assert work(kept=(0,)).disk_bytes() == max(2 * first, first + 2 * second)


def test_a_map_that_is_wider_than_what_it_is_made_of_needs_its_own_memory() -> None:
    """Patches of 1: a row of the second stage would overwrite rows of the first that were not read."""
    config = longformer(patches=(2, 1), tokens=(1, 1))
    wider = config.override(stages=(config.stages[0], {**config.to_dict()["stages"][1], "dim": 16}))
    sizes = Work(wider, 2, (40, 24), torch.float32, torch.float32)
    assert sizes.token_bytes() == 20 * 12 * (8 + 16) * 4
    model, image = model_of(wider), torch.randn(3, 40, 24, dtype=torch.float64)
    assert torch.allclose(stream(model, image, rows=1).logits, model(image[None])[0], atol=1e-10)


def test_a_map_that_padding_makes_larger_than_what_it_is_made_of_needs_its_own_memory() -> None:
    """Maps of 1×2 tokens of 8 numbers and 1×1 token of 24; with 2×2 tokens in the first, the second fits into it."""
    stages = longformer().to_dict()["stages"]
    config = longformer().override(stages=(stages[0], {**stages[1], "dim": 24}))
    assert Work(config, 2, (2, 4), torch.float32, torch.float32).token_bytes() == (1 * 2 * 8 + 24) * 4
    assert Work(config, 2, (4, 4), torch.float32, torch.float32).token_bytes() == 2 * 2 * 8 * 4


def test_a_limit_chooses_the_rows_and_says_what_would_do() -> None:
    sizes = work()
    least = sizes.token_bytes() + max(sizes.strip_bytes(stage, 1) for stage in (0, 1))
    assert sizes.choose_rows(least)[0] == 1
    assert sizes.choose_rows("1GB") == [8, 8]
    assert sizes.choose_rows(sizes.token_bytes() + sizes.strip_bytes(0, 3))[0] == 3
    with pytest.raises(
        ValueError, match=r"^25MB of memory is too little for an image of 40×24; at least 25MB is needed, 1MB of"
    ):
        sizes.choose_rows(least - 1)
    with pytest.raises(ValueError, match=r", 1MB of it for tokens$"):  # files would save nothing
        sizes.choose_rows(100)
    large = Work(longformer(), 2, (40_000, 24), torch.float32, torch.float32)
    in_files = format_bytes(work(in_memory=False).least_bytes())
    with pytest.raises(
        ValueError, match=rf"for tokens, or {in_files} with the tokens in files \({re.escape(STORAGE)}\)$"
    ):
        large.choose_rows(100)
    assert work(in_memory=False).choose_rows(least - sizes.token_bytes())[0] == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GB", 2 * 10**9), ("1.5 gb", 15 * 10**8), ("500MB", 5 * 10**8), ("12K", 12000), ("7", 7), (9, 9)],
)
def test_amounts_of_memory(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1MB"), (999_000_001, "1000MB"), (1_234_567_890, "1.24GB"), (5e9, "5GB")]
)
def test_printed_amounts_are_enough(count: float, text: str) -> None:
    assert format_bytes(count) == text
    assert parse_bytes(text) >= count
