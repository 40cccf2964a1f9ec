"""Files that appear whole or not at all, and never in place of another unless asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: str | Path, *, overwrite: bool = False, beside: Sequence[str] = ()) -> Iterator[Path]:
    """A temporary path beside ``path``, which it replaces at the end; if anything fails, it vanishes.

    The data are on the disk before the name is, so that a crash leaves the old file or the new one. ``beside`` are the
    suffixes of files of the same name that belong to it. They are written beside the temporary path, and come before
    it; a crash between them leaves no file of its name.
    """
    path = Path(path)
    for one in (path, *map(path.with_suffix, beside)):
        if one.exists() and not overwrite:
            raise FileExistsError(f"{one} exists; choose another name or allow overwriting")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        files = [temporary, *map(temporary.with_suffix, beside)]
        for file in files:
            os.chmod(file, 0o666 & ~_umask())
            _flush(file)
        if beside:
            path.unlink(missing_ok=True)
        for file in reversed(files):
            os.replace(file, path.with_suffix(file.suffix))
    except BaseException:
        for suffix in (temporary.suffix, *beside):
            temporary.with_suffix(suffix).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Data as a JSON file, in place of an earlier one; NaN and infinity, which JSON does not have, are refused."""
    with atomic_write(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed have left of files they were writing in ``folder`` by atomic_write."""
    for path in folder.glob(".*.????????*"):
        if re.fullmatch(r"\..+\.[a-z0-9_]{8}(\.\w+)?", path.name) and path.is_file():
            path.unlink()


def remove_temporaries(path: Path) -> None:
    """Delete what processes left of ``path`` that were killed while they wrote it by atomic_write or atomic_folder; a
    folder that they had moved away, to replace it, is put back.

    Only safe while no other process writes it.
    """
    name = re.compile(rf"\.{re.escape(path.stem)}\.[a-z0-9_]{{8}}{re.escape(path.suffix)}")
    for beside in path.parent.iterdir() if path.parent.is_dir() else ():
        if name.fullmatch(beside.name) and beside.is_file():
            beside.unlink()
    new, old = _temporary_folders(path)
    if os.path.lexists(old) and not os.path.lexists(path):
        os.replace(old, path)
    _remove(new)
    _remove(old)


def lock_file(path: Path, busy: str) -> IO[str]:
    """A file that is locked until it is closed or the process ends, however it ends; made if it does not exist.

    If another process holds it, the error is ``busy``. Whoever holds the lock may delete the file.
    """
    import fcntl  # which Windows does not have

    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        except BlockingIOError:
            file.close()
            raise ValueError(busy) from None
        file.close()  # its last holder has deleted it meanwhile


@contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``path``, which it replaces at the end; if anything fails, it vanishes.

    A link is replaced itself; where it leads to, nothing changes. What a process that was killed has left there is
    deleted first.
    """
    path = Path(path)
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or allow overwriting")
    temporary, old = _temporary_folders(path)
    _remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        if os.path.lexists(path):
            _remove(old)
            os.replace(path, old)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _remove(old)


def _temporary_folders(path: Path) -> tuple[Path, Path]:
    """Where atomic_folder makes a new folder, and where it moves the old one."""
    return path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")


def _remove(path: Path) -> None:
    """Delete a folder with all that is in it, or a file or link itself, if there is any."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def named_errors(path: Path, remedy: str) -> Iterator[None]:
    """Errors of the system that name no file, such as that of a full disk, name ``path`` and what to do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        raise OSError(f"{path} cannot be written: {error.strerror}; {remedy}") from error


def suggest_path(path: Path) -> str:
    """``did you mean runs/own_images-1?``, if something of a similar name lies where ``path`` should; else nothing."""
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1, cutoff=0.7)
    return f"did you mean {path.parent / near[0]}?" if near else ""


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
