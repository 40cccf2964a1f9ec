"""What several test files share: local attention compared with the oracle, small models, data sets and detectors."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor

from vision_longformer import ModelConfig, StageConfig, VisionLongformer, local_attention
from vision_longformer.detection.checkpoint import save_detector
from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.dataset import open_detection
from vision_longformer.detection.detectors import build_detector
from vision_longformer.geometry import Grid
from vision_longformer.models import config as cfg
from vision_longformer.ops import IMPLEMENTATIONS, longformer_attention
from vision_longformer.ops.spec import LocalSpec
from vision_longformer.training.callbacks import Callback

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference to the float64 oracle, relative to the largest value, by dtype."""


@dataclass(frozen=True)
class Case:
    """A call of local attention but for its numbers; ``neighbours`` is "all", "self", an int or a tensor."""

    grid: tuple[int, int] = (5, 9)
    window: int = 2
    rule: str = "chunk"
    neighbours: Any = "all"
    global_tokens: int = 1
    bias: bool = True
    global_bias: bool = True
    dilation: int | tuple[int, ...] = 1
    batch: int = 2
    heads: int = 2
    dim: int = 4
    scale: float | None = None
    seed: int = 0

    def tensors(
        self, dtype: torch.dtype = torch.float64, *, grad: bool = True, precision: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Random q, k, v and biases, and ``weight``, which the output is weighted by to have gradients.

        ``precision`` rounds the numbers to another dtype on the way.
        """
        generator = torch.Generator().manual_seed(self.seed)
        tokens, side = Grid(*self.grid).tokens, 4 * self.window - 1
        shapes = {"q": (self.batch, tokens, self.heads, self.dim)}
        shapes["k"] = shapes["v"] = (self.batch, self.global_tokens + tokens, self.heads, self.dim)
        if self.bias:
            shapes["bias"] = (self.heads, side, side)
        if self.global_bias:
            shapes["global_bias"] = (self.heads, self.global_tokens)
        shapes["weight"] = shapes["q"]
        drawn = {}
        for name, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(precision or dtype)
            drawn[name] = numbers.to(dtype).requires_grad_(grad and name != "weight")
        return drawn

    def options(self) -> dict[str, Any]:
        """The arguments of :func:`local_attention` beside the tensors and the grid."""
        return {name: getattr(self, name) for name in ("window", "rule", "neighbours", "dilation", "scale")}

    def refusal(self, implementation: str, dtype: torch.dtype = torch.float64, *, grad: bool = True) -> str | None:
        """Why the implementation cannot run this case."""
        mode = self.neighbours if isinstance(self.neighbours, str) else "one"
        steps = (self.dilation,) if isinstance(self.dilation, int) else self.dilation
        q = self.tensors(dtype, grad=grad)["q"]
        scale = self.dim**-0.5 if self.scale is None else self.scale
        specs = [LocalSpec(Grid(*self.grid), self.window, self.rule, mode, step, scale) for step in steps]
        return next((reason for spec in specs if (reason := IMPLEMENTATIONS[implementation].refusal(spec, q))), None)


def run(implementation: str, case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of a case and the gradient of every input that requires one."""
    inputs = {name: x for name, x in tensors.items() if name != "weight"}
    out = local_attention(**inputs, grid=case.grid, **case.options(), implementation=implementation)
    return _with_gradients(out, tensors)


def _with_gradients(out: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    results = {"output": out.detach()}
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    if wanted:
        grads = torch.autograd.grad((out * tensors["weight"]).sum(), list(wanted.values()))
        results |= {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return results


def _band_of(case: Case, tensors: dict[str, Tensor], first: int, count: int) -> dict[str, Any]:
    """The arguments for ``count`` chunk rows of a case from the ``first``, or as many as there are."""
    (height, width), w, extra = case.grid, case.window, case.global_tokens
    chunks = math.ceil(height / w)
    last = min(first + count, chunks)
    rows = range(first * w, min(last * w, height))

    def beside(chunk: int) -> list[int | None]:
        """The rows of the chunk row above or below, None for padding that counts."""
        wraps = not 0 <= chunk < chunks
        if wraps and not case.rule.startswith("cyclic"):
            return []
        start = chunk % chunks * w
        inside = [row if row < height else None for row in range(start, start + w)]
        return inside if wraps and case.rule == "cyclic_release" else [row for row in inside if row is not None]

    def keys(x: Tensor) -> Tensor:
        with_zero = torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1)
        tokens = [
            -1 if row is None else extra + row * width + column
            for row in (*above, *rows, *below)
            for column in range(width)
        ]
        return with_zero[:, [*range(extra), *tokens]]

    above, below = beside(first - 1), beside(last)
    biases = {name: tensors[name] for name in ("bias", "global_bias") if name in tensors}
    q = tensors["q"][:, rows.start * width : rows.stop * width]
    grid, halo = (len(rows), width), (len(above), len(below))
    return {"q": q, "k": keys(tensors["k"]), "v": keys(tensors["v"]), "grid": grid, "halo": halo, **biases}


def run_bands(implementation: str, case: Case, tensors: dict[str, Tensor], rows: int) -> dict[str, Tensor] | None:
    """As :func:`run`, ``rows`` chunk rows at a time; None if the implementation refuses one of them."""
    options = case.options() | {"implementation": implementation}
    try:
        parts = [
            local_attention(**_band_of(case, tensors, first, rows), **options)
            for first in range(0, math.ceil(case.grid[0] / case.window), rows)
        ]
    except ValueError as error:
        assert "cannot run this" in str(error)  # noqa: PT017
        return None
    return _with_gradients(torch.cat(parts, 1), tensors)


@lru_cache(maxsize=1024)
def oracle(case: Case, precision: torch.dtype = torch.float64, *, grad: bool = True) -> dict[str, Tensor]:
    """What the float64 oracle makes of a case's numbers, rounded to ``precision``: computed once, compared often."""
    return run("masked_dense", case, case.tensors(grad=grad, precision=precision))


@dataclass(frozen=True)
class RowsCase:
    """A call of attention for the rows of global and of local tokens but for its numbers."""

    grid: tuple[int, int] = (4, 5)
    window: int = 2
    rule: str = "chunk"
    neighbours: str | int = "all"
    global_tokens: int = 1
    biases: bool = True
    batch: int = 2
    heads: int = 1
    dim: int = 16
    scale: float | None = None
    seed: int = 0

    def tensors(self, dtype: torch.dtype = torch.float64, *, precision: torch.dtype | None = None) -> dict[str, Tensor]:
        """Random qkv and biases, and ``weight``, as :meth:`Case.tensors`."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens, side, extra = Grid(*self.grid).tokens + self.global_tokens, 4 * self.window - 1, self.global_tokens
        shapes: dict[str, tuple[int, ...]] = {"qkv": (self.batch, tokens, 3, self.heads, self.dim)}
        if self.biases:
            shapes |= {"bias": (self.heads, side, side), "global_bias": (self.heads, extra)}
            shapes["from_global_bias"] = (self.heads, extra, extra + 1)
        shapes["weight"] = (self.batch, tokens, self.heads, self.dim)
        drawn = {}
        for name, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(precision or dtype)
            drawn[name] = numbers.to(dtype).requires_grad_(name != "weight")
        return drawn

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("window", "rule", "neighbours", "scale")}

    def run(self, implementation: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The output and the gradient of every input."""
        inputs = {name: x for name, x in tensors.items() if name != "weight"}
        out = longformer_attention(**inputs, grid=self.grid, **self.options(), implementation=implementation)
        return _with_gradients(out, tensors)


def rows_oracle(case: RowsCase, precision: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The float64 oracle of a case's numbers, rounded to ``precision``: softmax over all keys, and masked attention."""
    tensors, count = case.tensors(precision=precision), case.global_tokens
    q, k, v = tensors["qkv"].unbind(2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q[:, :count], k) * (case.scale or case.dim**-0.5)
    if case.biases:
        scores = scores + torch.stack(
            [tensors["from_global_bias"][:, :, min(key, count)] for key in range(k.shape[1])], -1
        )
    global_rows = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)
    biases = {name: tensors[name] for name in ("bias", "global_bias") if name in tensors}
    options = case.options() | {"implementation": "masked_dense"}
    local_rows = local_attention(q[:, count:], k, v, case.grid, **biases, **options)
    return _with_gradients(torch.cat([global_rows, local_rows], 1), tensors)


def compare(implementation: str, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Outputs and gradients of an implementation agree with the float64 oracle on the same, rounded, numbers.

    An implementation that refuses inputs which require gradients is compared by its outputs alone.
    """
    grad = case.refusal(implementation, dtype, grad=True) is None
    got = run(implementation, case, case.tensors(dtype, grad=grad))
    for name, expected in oracle(case, dtype, grad=grad).items():
        assert got[name].dtype == dtype
        assert_close(got[name], expected, TOLERANCES[dtype], f"{name} of {implementation} in {case}")


def operator_arguments(case: Case, dtype: torch.dtype, *, grad: bool) -> tuple[Any, ...]:
    """What a forward operator is called with: q, k and v of a dtype, biases of float32 at least."""
    tensors = case.tensors(dtype, grad=grad)
    wide = case.tensors(torch.promote_types(dtype, torch.float32), grad=grad)
    tensors |= {name: x for name, x in wide.items() if name.endswith("bias")}
    neighbour = None if isinstance(case.neighbours, str) else torch.as_tensor(case.neighbours)
    settings = (
        *case.grid,
        case.window,
        case.rule,
        case.neighbours if neighbour is None else "one",
        [1],
        case.dim**-0.5,
        [],
    )
    return (*(tensors.get(name) for name in ("q", "k", "v", "bias", "global_bias")), neighbour, *settings)


def assert_as_promised(name: str, given: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    """Shapes, strides and dtypes are those of the fake results, on which compiled graphs rely."""
    with torch._subclasses.FakeTensorMode() as mode:
        operator = getattr(torch.ops.vision_longformer, name)
        fakes = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given))
    for real, fake in zip(results, fakes, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@dataclass(frozen=True)
class BiasedPair:
    """A query and its two keys, whose products with it are 0: scores are biases. Values are 1 and 0.

    Without a global key there are two tokens in a row; else one token, and the global key first.
    """

    global_key: bool
    rule: str = "chunk"

    def tensors(self, dtype: torch.dtype, first: float, second: float, batch: int = 1) -> dict[str, Tensor]:
        """q, k and v of a dtype, and float32 biases: the scores of the first query are ``first`` and ``second``."""
        k = torch.zeros(batch, 2, 1, 4, dtype=dtype)
        v = torch.tensor([1.0, 0.0], dtype=dtype)[:, None, None].expand_as(k)
        if self.global_key:
            bias, global_bias = torch.full((1, 7, 7), float(second)), torch.full((1, 1), float(first))
            return {"q": k[:, :1], "k": k, "v": v, "bias": bias, "global_bias": global_bias}
        bias = torch.full((1, 7, 7), float(first))
        bias[0, 3, 2] = second  # of the key to the right
        return {"q": k, "k": k, "v": v, "bias": bias}

    def attend(self, implementation: str, tensors: dict[str, Tensor]) -> Tensor:
        grid = (1, tensors["q"].shape[1])
        return local_attention(**tensors, grid=grid, window=2, rule=self.rule, implementation=implementation)

    def bias_gradients(self, implementation: str, dtype: torch.dtype, batch: int, upstream: float) -> list[float]:
        """Of the table's middle row, and of the global key if there is one; scores are 0, so that weights are ½."""
        tensors = {name: x.requires_grad_() for name, x in self.tensors(dtype, 0.0, 0.0, batch).items()}
        self.attend(implementation, tensors)[..., 0].sum().mul(upstream).backward()
        grads = [tensors[name].grad for name in tensors if name.endswith("bias")]
        assert {grad.dtype for grad in grads} == {torch.float32}
        return [*grads[0][0, 3].tolist(), *(grad.item() for grad in grads[1:])]

    def expected_gradients(self, total: float) -> list[float]:
        """``total`` is upstream · batch / 4: that of a key of value 1 and, negative, of a key of value 0."""
        if self.global_key:
            return [0, 0, 0, -total, 0, 0, 0, total]
        return [0, 0, -total, 0, total, 0, 0]  # at offset 0 the two tokens' cancel


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "result") -> None:
    """Equal shapes, and no entry further off than ``tolerance`` times the largest expected entry (1, if smaller)."""
    assert got.shape == expected.shape, f"{what} is {tuple(got.shape)}, not {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    assert torch.isfinite(got).all(), f"{what} is not finite"
    error = (got.double() - expected.double()).abs().max().item()
    largest = max(1.0, expected.abs().max().item())
    assert error <= tolerance * largest, f"{what} is off by {error:.2e}, the largest value being {largest:.2e}"


# Small models: every family and mechanism, shallow and narrow, for images of 64×64


def small_config(
    *mechanisms: cfg.AttentionConfig,
    position: str = "absolute",
    tokens: tuple[int, ...] | None = None,
    patches: tuple[int, ...] | None = None,
    depth: tuple[int, ...] | None = None,
    **options: Any,
) -> ModelConfig:
    """One stage per mechanism: widths 8, 8, 16, 16, …, patches of 4, 2, 2, …, one block each, for five classes."""
    count = len(mechanisms)
    patches = patches or (4, *[2] * (count - 1))
    tokens = tokens or (1,) * count
    depth = depth or (1,) * count
    stages = [
        StageConfig(8 if index < 2 else 16, depth[index], 2, patches[index], mechanism, tokens[index], position)
        for index, mechanism in enumerate(mechanisms)
    ]
    return ModelConfig(tuple(stages), **{"img_size": (64, 64), "num_classes": 5, **options})


def _small_models() -> dict[str, ModelConfig]:
    local, full, linear = cfg.Longformer(window=2), cfg.Full(), cfg.Linformer(6)
    last_without = (1, 1, 1, 0)
    sra = [cfg.SpatialReduction(ratio) for ratio in (16, 8, 4, 2)]
    separate = cfg.Longformer(window=2, share_weights=False)
    models = {
        "vil": small_config(*[local] * 4, position="relative", tokens=last_without, depth=(1, 1, 2, 1)),
        "vil_ape": small_config(*[local] * 4, tokens=last_without),
        "vil_exact": small_config(*[cfg.Longformer(window=2, rule="exact")] * 3, position="relative"),
        "vil_cyclic": small_config(*[cfg.Longformer(window=3, rule="cyclic")] * 3, position="relative"),
        "vil_separate": small_config(*[separate] * 3, position="relative", tokens=(2, 2, 2), global_pool="token"),
        "vil_no_tokens": small_config(*[local] * 3, position="relative", tokens=(0, 0, 0)),
        "partial_vil": small_config(local, local, full, full, position="relative", tokens=last_without),
        "full": small_config(*[full] * 4, tokens=last_without),
        "full_relative": small_config(*[full] * 3, position="relative", global_pool="token", patches=(8, 2, 2)),
        "linformer": small_config(*[linear] * 4, tokens=last_without),
        "partial_linformer": small_config(cfg.Linformer(6, share_kv=False), linear, full, full, tokens=last_without),
        "sra64": small_config(*sra, tokens=last_without),
        "partial_sra32": small_config(*sra[1:3], full, full, tokens=last_without),
        "global": small_config(*[cfg.GlobalMemory()] * 4, tokens=(4, 4, 2, 2)),
        "partial_global": small_config(
            cfg.GlobalMemory(), cfg.GlobalMemory(), full, full, position="relative", tokens=(3, 2, 1, 1)
        ),
        "performer": small_config(*[cfg.Performer(8)] * 4, tokens=last_without),
        "partial_performer": small_config(cfg.Performer(8), cfg.Performer(8), full, full, tokens=last_without),
        "three_stages": small_config(local, local, full, patches=(8, 2, 2), position="relative", tokens=(1, 1, 0)),
        "two_stages": small_config(local, full, position="none", tokens=(0, 0)),
        "five_stages": small_config(*[local] * 5, patches=(2,) * 5, position="relative"),
        "flat": small_config(full, patches=(16,), depth=(3,), global_pool="token"),
        "flat_1d": small_config(full, patches=(16,), position="absolute_1d", tokens=(2,)),
        "carried": small_config(local, local, full, position="relative", tokens=(2, 2, 2), carry_global_tokens=True),
        "dropped_rest": small_config(local, local, full, position="relative", patch_remainder="drop"),
    }
    plain = {"norm_embed": False, "qkv_bias": False, "qk_scale": 0.3, "mlp_ratio": 2.0}
    return models | {"plain": small_config(local, full, position="relative", **plain)}


SMALL_MODELS = _small_models()


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> VisionLongformer:
    """A small model by name, seeded, with biases and tables large enough to matter."""
    torch.manual_seed(1)
    model = VisionLongformer(SMALL_MODELS[name], **options)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def image(height: int = 64, width: int = 64, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(2)).to(dtype)


def without_compiler_caches() -> AbstractContextManager[Any]:
    """Inductor keeps graphs on disk, by the names of our operators and not by what their autograd is."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


def assert_trains_like_the_oracle(implementation: str, steps: int = 20) -> None:
    """A model compiled by inductor, its local attention by an implementation, against the eager one by the oracle.

    One stage of one block on a 6×6 map in chunks of 3×3, with relative bias and a global token, in float32.
    """
    expected_losses, expected = _train("masked_dense", steps, compiled=False)
    with without_compiler_caches():
        losses, parameters = _train(implementation, steps, compiled=True)
    assert expected_losses[-1] < expected_losses[0] / 2
    assert_close(torch.tensor(losses), torch.tensor(expected_losses), 1e-5, "loss")
    for name, value in expected.items():
        assert_close(parameters[name], value, 1e-5, name)


def _train(implementation: str, steps: int, *, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step on one image, and the parameters at the end."""
    torch.manual_seed(0)
    stage = StageConfig(16, 1, 1, 2, cfg.Longformer(window=3), 1, "relative")
    model = VisionLongformer(ModelConfig((stage,), img_size=(12, 12), num_classes=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # so that the bias matters
    model.set_attention_implementation(implementation)
    run = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(run(image(12, 12, batch=1)), torch.tensor([1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


# Labelled images: of one grey value each, by which samples are told apart

IMAGE_CLASSES = ("cat", "dog", "owl")
IMAGE_SIDE = 16


def grey_png(value: int) -> bytes:
    """A PNG file of one grey value."""
    file = io.BytesIO()
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def grey_files(count: int = 12) -> dict[str, bytes]:
    """PNG files by path, of grey values 0, 1, 2, … and of the classes in turn: ``cat/00.png``, ``dog/01.png``, …"""
    return {f"{IMAGE_CLASSES[value % 3]}/{value:02}.png": grey_png(value) for value in range(count)}


def grey_samples(count: int = 12) -> list[tuple[int, int]]:
    """Grey value and label of each of :func:`grey_files`."""
    return [(value, value % 3) for value in range(count)]


def grey_arrays(count: int, *channels: int) -> np.ndarray:
    """The same images as an array (count, side, side[, channels])."""
    values = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, *[1 for _ in channels])
    return values + np.zeros((1, IMAGE_SIDE, IMAGE_SIDE, *channels), np.uint8)


def write_folder(folder: Path) -> Path:
    """:func:`grey_files` in splits ``train`` (12 images) and ``val`` (6)."""
    for split, count in (("train", 12), ("val", 6)):
        for name, content in grey_files(count).items():
            path = folder / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


def write_photos(folder: Path) -> Path:
    """A folder of 12 noisy JPEG files of different sizes, without splits."""
    generator = np.random.default_rng(0)
    for index in range(12):
        path = folder / IMAGE_CLASSES[index % 3] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20 + index, 30, 3), np.uint8)).save(path)
    return folder


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_shards(folder: Path) -> Path:
    """Six shards of 8 images for training, two of 5 and 2 for evaluation, the last with its labels in JSON."""
    folder.mkdir()
    for number in range(6):
        _write_shard(folder / f"train-{number:03}.tar", range(number * 8, number * 8 + 8))
    _write_shard(folder / "val-0.tar", range(5))
    _write_shard(folder / "val-1.tar", range(5, 7), json_labels=True)
    return folder


def _write_shard(path: Path, values: Iterable[int], *, json_labels: bool = False) -> None:
    files: dict[str, bytes] = {}
    for value in values:
        files[f"./{value:03}.png"] = grey_png(value)
        if json_labels:
            files[f"./{value:03}.json"] = json.dumps({"label": value % 3}).encode()
        else:
            files[f"./{value:03}.cls"] = str(value % 3).encode()
    write_tar(path, files)


# Training


class StopAt(Callback):
    """Ends the process's work after a step, as ``kill -9`` would: nothing is saved."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int) -> None:
        if step == self._step:
            raise KeyboardInterrupt


# Detectors, and data sets in COCO's format

SMALL_DETECTOR: dict[str, Any] = {
    "channels": 8,
    "min_size": (64,),
    "max_size": 96,
    "box_width": 16,
    "mask_channels": 8,
    "mask_layers": 1,
    "score_threshold": 0.0,
    "detections": 5,
}


def small_detector(detector: str, **options: Any) -> Any:
    """A few thousand parameters beside its backbone, "vil" among the zoo's models, with weights large enough to matter.

    Tests of detection have that name in the zoo; others patch it there.
    """
    torch.manual_seed(3)
    options = {**SMALL_DETECTOR, "detections": 100, **options}
    model = build_detector(DetectorConfig(detector, "vil", 3).override(**options))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def write_detector(
    path: Path, categories: list[str] | None, detector: str = "mask_rcnn", num_classes: int = 10, **options: Any
) -> Path:
    """An untrained one with five detections in every image; it knows its categories' names if they are given."""
    torch.manual_seed(0)
    model = build_detector(DetectorConfig(detector, "test_resnet", num_classes, **{**SMALL_DETECTOR, **options}))
    named = [{"id": number, "name": name} for number, name in enumerate(categories or (), 1)]
    return save_detector(model, path, info={"categories": named} if categories else None)


COCO_WIDTH, COCO_HEIGHT = 40, 30
COCO_CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 7, "name": "train"}, {"id": 90, "name": "toothbrush"}]
COCO_SQUARE = [[5, 5, 15, 5, 15, 15, 5, 15]]


def coco_annotation(number: int, image: int = 1, **changes: Any) -> dict[str, Any]:
    """A square of 10×10 at (5, 5), a train."""
    plain = {"category_id": 7, "bbox": [5, 5, 10, 10], "area": 100, "iscrowd": 0, "segmentation": COCO_SQUARE}
    return {"id": number, "image_id": image, **plain, **changes}


def coco_content(annotations: list[dict[str, Any]] | None = None, images: int = 3) -> dict[str, Any]:
    """An annotation file; without ``annotations``, it has two objects of the first image and one of the third."""
    stated = {"width": COCO_WIDTH, "height": COCO_HEIGHT}
    named = [{"id": 1 + index, "file_name": f"{index}.png", **stated} for index in range(images)]
    if annotations is None:
        other = {"category_id": 90, "bbox": [0, 10, 40, 20]}
        annotations = [coco_annotation(1), coco_annotation(2, **other), coco_annotation(3, image=3)]
    return {"images": named, "annotations": annotations, "categories": COCO_CATEGORIES}


def write_coco(
    folder: Path,
    content: dict[str, Any] | None = None,
    file: str = "annotations/instances_train.json",
    images: str = "train",
) -> Path:
    """A data set whose image files have colours of their own: (250 - 10 · index, 0, index)."""
    content = coco_content() if content is None else content
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content))
    (folder / images).mkdir(parents=True, exist_ok=True)
    for index, record in enumerate(content["images"]):
        colour = (250 - 10 * index, 0, index)
        Image.new("RGB", (COCO_WIDTH, COCO_HEIGHT), colour).save(folder / images / record["file_name"])
    return folder


def write_garments(folder: Path, *splits: tuple[str, int]) -> Path:
    """Images of the built-in data with their annotations: so many of each split, into files of its name."""
    (folder / "annotations").mkdir()
    for split, count in splits:
        data = open_detection("garments:96", "train" if "train" in split else "validation")
        content: dict[str, Any] = {"images": [], "annotations": []}
        content["categories"] = [category._asdict() for category in data.categories]
        (folder / split).mkdir()
        for index in range(count):
            image, target = data.read(index)
            name = f"{index}.png"
            image.save(folder / split / name)
            content["images"].append({"id": index, "file_name": name, "width": image.width, "height": image.height})
            assert target.masks is not None
            for box, label, mask in zip(target.boxes.tolist(), target.labels.tolist(), target.masks, strict=True):
                coded = rle.encode(mask.numpy().astype("uint8", order="F"))
                left, top, right, bottom = box
                content["annotations"].append(
                    {
                        "id": len(content["annotations"]) + 1,
                        "image_id": index,
                        "category_id": data.categories[label - 1].id,
                        "bbox": [left, top, right - left, bottom - top],
                        "area": float(rle.area(coded)),
                        "iscrowd": 0,
                        "segmentation": {"size": coded["size"], "counts": coded["counts"].decode()},
                    }
                )
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


# Several processes


def fork_processes(function: Callable[..., None], count: int, *arguments: Any) -> None:
    """``function(rank, count, *arguments)`` in ``count`` processes with a gloo group and one thread each.

    To be called in an interpreter that has no threads yet, such as that of :func:`run_program`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_forked, (function, count, port, *arguments), nprocs=count, start_method="fork")


def _forked(rank: int, function: Callable[..., None], count: int, port: int, *arguments: Any) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    function(rank, count, *arguments)
    torch.distributed.destroy_process_group()


def run_program(function: Callable[[Path], None], folder: Path) -> Path:
    """A function of a test module in an interpreter of its own, which is given a folder for what it finds."""
    module = sys.modules[function.__module__]
    path = [str(Path(str(module.__file__)).parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    name = module.__name__
    program = f"import sys, pathlib, {name}; {name}.{function.__name__}(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True)
    return folder
