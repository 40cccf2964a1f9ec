"""From an image to files: a streamed pass whose maps are written as zarr or NumPy arrays, with a picture."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..files import atomic_folder, atomic_write, lock_file, named_errors, remove_temporaries
from ..models.vision_longformer import VisionLongformer
from .memory import Work, format_bytes
from .reading import LargeImage
from .storage import token_file_bytes, token_folder
from .stream import Progress, Streamed, stream

CHUNK = 64
"""Height and width of a zarr array's chunks, which hold all numbers of their tokens."""

PICTURE = 512
"""Tokens along the longer side of a picture at most; every n-th one of larger maps is drawn."""

FOLDER_NAME, ZARR_NAME = r"stage\d+\.npy|attributes\.json", r"stage\d+|zarr\.json"
"""Patterns of the names in a folder of arrays and in a zarr group that are written here."""

NAMED = 3
"""Names of other files that an error lists."""

REPEATED = "free some space and run the command again; with --storage it resumes"
"""What to do when the disk is full."""

WRITTEN = np.dtype(np.float32)
"""What maps are written as, also if tokens were stored as bfloat16, which NumPy has no name for."""


def encode(
    model: VisionLongformer,
    image: LargeImage,
    output: str | Path,
    *,
    stages: Sequence[int],
    memory: str | int = "4GB",
    storage: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    mean: Sequence[float],
    std: Sequence[float],
    attributes: Mapping[str, Any],
    overwrite: bool = False,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Streamed:
    """Stream an image through a model, and write the maps of some stages, (height, width, dim) in float32.

    Args:
        output: ``NAME.zarr``, a group with an array ``stage3`` for each stage; ``NAME.npy`` for one stage; or a folder
            of ``stage3.npy``. What a zarr group has as attributes, ``NAME.json`` beside the array, or
            ``attributes.json`` in the folder, has, too. ``NAME.png`` beside the output shows the last of the stages.
        stages: counted from 0, in any order.
        storage: a folder for tokens, from which a run that ended early is resumed; emptied when the output is written.
        attributes: what to store, beside stride and origin of the maps, and the image's logits and features.
        overwrite: replace an earlier output. Folders that hold anything else are refused.

    The output appears when it is whole. What a process that was killed while it wrote has left of it is replaced.
    See :func:`stream` for the other arguments.
    """
    output, stages = Path(output), sorted(set(stages))
    _remove_unfinished(output)
    check_output(output, stages, overwrite, {"image": image.file})
    if storage is not None:
        _check_storage(output, Path(storage))
    work = Work(
        model.config, len(model.stages), image.shape[:2], dtype, torch.float32, tuple(stages), in_memory=storage is None
    )
    _check_room(output, work, None if storage is None else Path(storage))
    with token_folder(storage) as folder:
        streamed = stream(
            model, image, memory=memory, storage=folder, dtype=dtype, maps=stages, mean=mean, std=std, progress=progress
        )
        check_output(output, stages, overwrite, {"image": image.file})
        with _being_written(output):
            with named_errors(output, REPEATED):
                _write_all(model, streamed, output, stages, attributes)
            if folder is not None:
                folder.close()
    return streamed


def _write_all(
    model: VisionLongformer,
    streamed: Streamed,
    output: Path,
    stages: Sequence[int],
    attributes: Mapping[str, Any],
) -> None:
    """The maps with their attributes, and the picture, in place of what :func:`check_output` lets be replaced."""
    maps = {f"stage{stage + 1}": streamed.maps[stage] for stage in stages}
    strides = [prod(stage.patch for stage in model.config.stages[: number + 1]) for number in stages]
    places = {name: {"stride": stride, "origin": [0, 0]} for name, stride in zip(maps, strides, strict=True)}
    logits = streamed.logits.tolist() if model.num_classes else []
    common = {**attributes, "logits": logits, "features": streamed.features.tolist()}
    _write(output, maps, places, common)
    draw_map(maps[f"stage{max(stages) + 1}"], picture_path(output), overwrite=True)


# Before


def check_output(output: Path, stages: Sequence[int], overwrite: bool, inputs: Mapping[str, Path | None]) -> None:
    """Refuse, before anything is computed, an output that cannot be written, or that would replace an input or anything
    that is not an output."""
    if not stages:
        raise ValueError("no stages were requested; name at least one")
    if output.suffix == ".npy" and len(stages) > 1:
        raise ValueError(f"{output} holds one map, not {len(stages)}; give a folder, or a name that ends in .zarr")
    if output.suffix == ".zarr" and find_spec("zarr") is None:
        raise ValueError(f"{output} needs the package zarr; install it with: pip install 'vision-longformer[large]'")
    if not output.name:
        raise ValueError(f"{output} is not a name for an output; give NAME.zarr, NAME.npy or a folder")
    parent = next(path for path in output.absolute().parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise OSError(f"{output} cannot be written: {parent} is {'read-only' if parent.is_dir() else 'not a folder'}")
    for kind, file in inputs.items():
        if file is not None and file.exists():
            _check_spares(output, kind, file)
    replaceable = _noted_as_new(output)
    for path in _paths(output):
        if os.path.lexists(path) and not (overwrite or ascii(path.name) in replaceable):
            raise FileExistsError(f"{path} exists; choose another output, or replace it with --overwrite")
        _check_kind(path, output)


def _check_spares(output: Path, kind: str, file: Path) -> None:
    """Refuse an output that would take the place of an input, or of a folder that it is in."""
    around = [file, *file.absolute().parents, *file.resolve().parents]
    for path in _paths(output):
        if path.exists() and any(path.samefile(each) for each in around):
            raise ValueError(f"{path} would overwrite the {kind} {file}; choose another output")


def _check_kind(path: Path, output: Path) -> None:
    """Refuse, also when overwriting, to replace a file by a folder, a folder by a file, or a folder that holds anything
    that was not written here."""
    is_folder = path == output and output.suffix != ".npy"
    if os.path.lexists(path) and path.is_dir() != is_folder:
        is_what, instead = ("not a folder", "a folder") if is_folder else ("a folder", "a file")
        raise ValueError(f"{path} is {is_what}, and {instead} cannot replace it; choose another output")
    if is_folder and path.exists():
        name = ZARR_NAME if output.suffix == ".zarr" else FOLDER_NAME
        others = sorted(each.name for each in path.iterdir() if not re.fullmatch(name, each.name))
        if others:
            names = ", ".join(others[:NAMED]) + (f" and {len(others) - NAMED} more" if len(others) > NAMED else "")
            raise ValueError(
                f"{path} holds files that 'vil encode' did not write ({names}), so it is not replaced; choose another "
                "output"
            )


def _check_storage(output: Path, storage: Path) -> None:
    """Refuse to keep tokens where the output is to be."""
    inside = [storage.resolve(), *storage.resolve().parents]
    for path in _paths(output):
        if path.resolve() in inside:
            raise ValueError(f"{storage}, the folder for tokens, would be inside the output {path}; choose another one")


def _paths(output: Path) -> list[Path]:
    """All that an output consists of."""
    return [output, picture_path(output), *([output.with_suffix(".json")] if output.suffix == ".npy" else [])]


def picture_path(output: Path) -> Path:
    """The PNG beside an output, with its name."""
    name = output.stem if output.suffix in (".zarr", ".npy") else output.name
    return output.with_name(f"{name}.png")


def _check_room(output: Path, work: Work, storage: Path | None) -> None:
    """Refuse to start what the disks cannot hold: the output, and the tokens where they are on the same disk."""
    parent = _existing(output.parent)
    needed = sum(work.grids[stage].tokens * work.config.stages[stage].dim for stage in work.kept) * WRITTEN.itemsize
    free = shutil.disk_usage(parent).free
    if storage is not None and _existing(storage).stat().st_dev == parent.stat().st_dev:
        needed += work.disk_bytes()
        free += token_file_bytes(storage)
    if needed > free:
        raise OSError(
            f"{output} needs {format_bytes(needed)} on its disk while it is made, but only {format_bytes(free)} is "
            "free; use another disk, or ask for fewer stages"
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


# After


def _marker(output: Path) -> Path:
    """The file that is beside an output until it is whole."""
    return output.with_name(f".{output.name}.unfinished")


def _lock(output: Path) -> IO[str]:
    busy = f"another process is writing {output}; wait for it, or choose another output"
    return lock_file(_marker(output), busy)


@contextmanager
def _being_written(output: Path) -> Iterator[None]:
    """Mark an output as unfinished meanwhile, and if that fails, from then on; noting what of it did not exist."""
    with _lock(output) as marker:
        marker.writelines(f"{path.name!a}\n" for path in _paths(output) if not os.path.lexists(path))
        marker.flush()
        yield
        _marker(output).unlink()


def _noted_as_new(output: Path) -> list[str]:
    """The names of what did not exist when a process began to write an output that it did not finish."""
    marker = _marker(output)
    return marker.read_text().splitlines() if marker.exists() else []


def _remove_unfinished(output: Path) -> None:
    """Delete the temporary files of a process that was killed while it wrote an output."""
    if output.name and _marker(output).exists():
        with _lock(output):
            for path in _paths(output):
                remove_temporaries(path)


def _write(
    output: Path,
    maps: Mapping[str, Tensor],
    places: Mapping[str, Mapping[str, Any]],
    attributes: Mapping[str, Any],
) -> None:
    """Maps with their places, and the attributes of all, by the kind of output."""
    if output.suffix == ".npy":
        ((name, tensor),) = maps.items()
        with atomic_write(output, overwrite=True, beside=(".json",)) as path:
            _write_json(path.with_suffix(".json"), {**attributes, **places[name]})
            _write_npy(path, tensor)
        return
    with atomic_folder(output, overwrite=True) as folder:
        if output.suffix == ".zarr":
            _write_zarr(folder, maps, places, attributes)
            return
        for name, tensor in maps.items():
            _write_npy(folder / f"{name}.npy", tensor)
        _write_json(folder / "attributes.json", {**attributes, "maps": places})


def _write_zarr(
    folder: Path,
    maps: Mapping[str, Tensor],
    places: Mapping[str, Mapping[str, Any]],
    attributes: Mapping[str, Any],
) -> None:
    import zarr

    group = zarr.create_group(folder, attributes=dict(attributes))
    for name, tensor in maps.items():
        chunks = (CHUNK, CHUNK, tensor.shape[2])
        array = group.create_array(
            name, shape=tuple(tensor.shape), chunks=chunks, dtype=WRITTEN, attributes=dict(places[name])
        )
        for start, rows in _parts(tensor):
            array[start : start + len(rows)] = rows


def _write_npy(path: Path, tensor: Tensor) -> None:
    """Written, not mapped: a full disk is an error, but would end a process that writes to a map."""
    header = {"descr": WRITTEN.str, "fortran_order": False, "shape": tuple(tensor.shape)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, rows in _parts(tensor):
            file.write(rows.data)


def _parts(tensor: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """Some rows at a time with the number of the first, so that memory does not hold the map twice."""
    for start in range(0, len(tensor), CHUNK):
        yield start, tensor[start : start + CHUNK].float().contiguous().numpy()


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def draw_map(tensor: Tensor, path: Path, *, overwrite: bool = False) -> None:
    """A map (height, width, dim) as a PNG: the first three principal components of its tokens are red, green and blue.

    The darkest and brightest hundredth of each colour are cut off.
    """
    step = -(-max(tensor.shape[:2]) // PICTURE)
    tokens = tensor[::step, ::step]
    components = _principal_components(tokens)
    low, high = components.quantile(torch.tensor([0.01, 0.99], dtype=torch.float64), 0)
    least = 1e-4 * float((high - low).max()) or 1.0  # what varies less is rounding
    levels = ((components - low) / (high - low).clamp(min=least)).clamp(0, 1)
    colours = torch.zeros(len(levels), 3, dtype=torch.uint8)
    colours[:, : levels.shape[1]] = (levels * 255).round().to(torch.uint8)
    picture = Image.fromarray(colours.view(*tokens.shape[:2], 3).numpy())
    scale = max(1, PICTURE // max(picture.size))
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    with atomic_write(path, overwrite=overwrite) as temporary:
        picture.save(temporary, format="png")


def _principal_components(tokens: Tensor) -> Tensor:
    """The first three of a map (height, width, dim), (tokens, 3); row by row, as all rows in float64 may take a
    gigabyte."""
    mean = sum(row.double().sum(0) for row in tokens) / (tokens.shape[0] * tokens.shape[1])
    spread = torch.zeros(tokens.shape[2], tokens.shape[2], dtype=torch.float64)
    for row in tokens:
        centred = row.double() - mean
        spread.addmm_(centred.T, centred)
    directions = torch.linalg.eigh(spread).eigenvectors.flip(1)[:, :3]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign()  # the sign of an eigenvector is arbitrary
    return torch.cat([(row.double() - mean) @ directions for row in tokens])
