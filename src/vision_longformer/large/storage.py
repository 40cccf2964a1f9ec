"""Where the tokens of a map live while an image is streamed: in memory, or in files from which a run can be resumed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import first_line
from ..files import atomic_write, lock_file, named_errors, remove_temporaries
from ..geometry import Grid
from .memory import Step, Work, format_bytes

RESUMED = "free some space and run the command again; it resumes"
"""What to do when a disk is full."""


class TokenMap:
    """The tokens of a map, row by row, in memory."""

    def __init__(self, tokens: Tensor, grid: Grid) -> None:
        self.tokens, self.grid = tokens, grid

    def read(self, rows: range) -> Tensor:
        """The tokens of some rows, (n, dim); perhaps not a copy."""
        return self.tokens[rows.start * self.grid.width : rows.stop * self.grid.width]

    def write(self, rows: range, tokens: Tensor) -> None:
        self.read(rows).copy_(tokens)

    def tensor(self) -> Tensor:
        """The map, (height, width, dim)."""
        return self.tokens.unflatten(0, tuple(self.grid))


class FileMap(TokenMap):
    """The tokens of a map in a file, nothing but its numbers. Only what is asked for is in memory."""

    def __init__(self, path: Path, grid: Grid, dim: int, dtype: torch.dtype, *, new: bool) -> None:
        self.path, self.grid, self.dim, self.dtype = path, grid, dim, dtype
        self._file = path.open("wb+" if new else "rb+")

    def read(self, rows: range) -> Tensor:
        tokens = torch.empty(len(rows) * self.grid.width, self.dim, dtype=self.dtype)
        self._seek(rows)
        if self._file.readinto(_bytes(tokens)) != tokens.nbytes:
            raise OSError(
                f"{self.path} ends before row {rows.stop} of {self.grid.height}; delete {self.path.parent} and start "
                "again"
            )
        return tokens

    def write(self, rows: range, tokens: Tensor) -> None:
        with named_errors(self.path, RESUMED):
            self._seek(rows)
            self._file.write(_bytes(tokens.to("cpu", self.dtype).contiguous()))

    def _seek(self, rows: range) -> None:
        self._file.seek(rows.start * self.grid.width * self.dim * self.dtype.itemsize)

    def flush(self) -> None:
        """Bring everything to the disk."""
        with named_errors(self.path, RESUMED):
            self._file.flush()
            os.fsync(self._file.fileno())

    def tensor(self) -> Tensor:
        """The map, (height, width, dim), memory-mapped."""
        size = self.grid.tokens * self.dim
        return torch.from_file(str(self.path), shared=False, size=size, dtype=self.dtype).view(*self.grid, self.dim)


def _bytes(tokens: Tensor) -> memoryview:
    return tokens.view(torch.uint8).numpy().data


STATE = "state.safetensors"
"""The file that says how far a run is."""

LOCK = ".lock"
"""The file that a run holds locked, so that no other one works in its folder."""


class TokenFolder:
    """A folder for tokens that this run alone uses, as :func:`token_folder` opens it."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_closed = path, False

    def close(self, keep_tokens: bool = False) -> None:
        """Delete the tokens unless they are kept, the lock, and the folder if nothing else is in it."""
        tokens = [] if keep_tokens else [self.path / STATE, *_token_files(self.path)]
        for path in (*tokens, self.path / LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # something is in it
            self.path.rmdir()
        self.is_closed = True


@contextmanager
def token_folder(storage: str | Path | TokenFolder | None) -> Iterator[TokenFolder | None]:
    """The folder, locked meanwhile; one that is opened already stays so, and None, for memory, is None.

    What a process that was killed has left half written is removed.
    """
    if storage is None or isinstance(storage, TokenFolder):
        yield storage
        return
    folder = TokenFolder(Path(storage))
    existing = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"tokens cannot be kept in {folder.path}: {existing} is a file; give a folder")
    busy = f"another process keeps its tokens in {folder.path}; wait for it, or choose another folder"
    with lock_file(folder.path / LOCK, busy):
        remove_temporaries(folder.path / STATE)
        try:
            yield folder
        finally:
            if not folder.is_closed:
                folder.close(keep_tokens=True)


def _token_files(folder: Path) -> list[Path]:
    return list(folder.glob("stage*-block*.tokens"))


def token_file_bytes(folder: Path) -> int:
    """What the tokens of an earlier run take of a folder."""
    return sum(path.stat().st_size for path in _token_files(folder))


class Finished(NamedTuple):
    """What an earlier run has left: its last finished step, the maps that exist by the steps that wrote them, and the
    global tokens (1, G, dim) after it."""

    step: Step | None
    maps: dict[Step, TokenMap]
    global_tokens: Tensor


class Storage:
    """Tokens in memory. A block works in place, and a new map takes the memory of the last one where it can."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._buffer = torch.empty(0, dtype=work.stored)

    def resume(self) -> Finished:
        """Memory holds nothing of an earlier run."""
        return Finished(None, {}, torch.empty(1, 0, 0))

    def target(self, step: Step) -> TokenMap:
        """The map that a step writes."""
        grid, dim = self.work.grids[step.stage], self.work.config.stages[step.stage].dim
        if not self.work.in_place(step):
            self._buffer = torch.empty(grid.tokens * dim, dtype=self.work.stored)
        return TokenMap(self._buffer[: grid.tokens * dim].view(-1, dim), grid)

    def commit(self, step: Step, target: TokenMap, global_tokens: Tensor) -> None:
        """Called when a step is finished. Memory keeps nothing for a later run."""


class FileStorage(Storage):
    """Tokens in files of a folder. A step reads one file and writes another, so that a run that ends anywhere can be
    resumed after its last finished step, to the same bytes.

    ``state.safetensors`` names that step and holds its global tokens; replacing it is the last act of each. Runs of
    another ``identity`` are refused.
    """

    def __init__(self, work: Work, folder: TokenFolder, identity: str) -> None:
        super().__init__(work)
        self.folder, self.identity = folder.path, identity
        self._state = self.folder / STATE
        self._check_room()

    def resume(self) -> Finished:
        if not self._state.exists():
            return super().resume()
        try:
            with safe_open(self._state, "pt") as file:
                state, global_tokens = json.loads(file.metadata()["state"]), file.get_tensor("global_tokens")
            identity, last = state["identity"], Step(state["stage"], state["block"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._state} is damaged or not the state of a run ({first_line(error)}); delete {self.folder}, or "
                "choose another folder"
            ) from error
        if identity != self.identity:
            raise ValueError(
                f"{self.folder} holds the tokens of another model, image or setting; delete it or choose another folder"
            )
        present = {last, *(step for step in self.work.kept_steps if step < last)}
        for step in present:
            path, expected = self._path(step), self.work.map_bytes(step.stage)
            if not path.exists():
                raise FileNotFoundError(f"{path}, which {STATE} names, is gone; delete {self.folder} and start again")
            if (size := path.stat().st_size) != expected:
                raise OSError(f"{path} has {size} bytes instead of {expected}; delete {self.folder} and start again")
        return Finished(last, {step: self._open(step, new=False) for step in present}, global_tokens)

    def target(self, step: Step) -> TokenMap:
        return self._open(step, new=True)

    def commit(self, step: Step, target: TokenMap, global_tokens: Tensor) -> None:
        """Make a step the last finished one, then delete what is needed no more."""
        assert isinstance(target, FileMap)
        target.flush()
        state = json.dumps({"stage": step.stage, "block": step.block, "identity": self.identity})
        with atomic_write(self._state, overwrite=True) as path:
            save_file({"global_tokens": global_tokens.cpu().contiguous()}, path, {"state": state})
        needed = {self._path(each) for each in (step, *self.work.kept_steps)}
        for path in _token_files(self.folder):
            if path not in needed:
                path.unlink()

    def _open(self, step: Step, *, new: bool) -> FileMap:
        dim = self.work.config.stages[step.stage].dim
        return FileMap(self._path(step), self.work.grids[step.stage], dim, self.work.stored, new=new)

    def _path(self, step: Step) -> Path:
        return self.folder / f"stage{step.stage + 1}-block{step.block}.tokens"

    def _check_room(self) -> None:
        """Refuse to start what the disk cannot hold."""
        needed, free = self.work.disk_bytes(), shutil.disk_usage(self.folder).free
        free += token_file_bytes(self.folder)
        if needed > free:
            raise OSError(
                f"{self.folder} needs {format_bytes(needed)} for tokens, but only {format_bytes(free)} is free; "
                "use another disk"
            )
