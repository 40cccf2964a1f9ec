"""Tokens as maps and as chunks of w×w tokens, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..geometry import Grid
from .spec import LocalSpec


def pad_map(image: Tensor, axis: int, bottom: int, right: int) -> Tensor:
    """Zeros below and to the right of a map whose height is ``axis`` and whose width the next axis.

    Without any to add the map is returned as it is; compiled graphs always pad, so as not to depend on the size.
    """
    if not (torch.compiler.is_compiling() or bottom or right):
        return image
    return F.pad(image, (0, 0) * (image.dim() - axis - 2) + (0, right, 0, bottom))


def contiguous_copy(x: Tensor) -> Tensor:
    """``contiguous`` would first ask whether a copy is needed, and tie a compiled graph to the answer."""
    return x.clone(memory_format=torch.contiguous_format)


def tokens_to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """Tokens (B, N, dim) as a map (B, dim, height, width): a view of them, in exported graphs a copy.

    A convolution asks of a view whether its channels come last, and the answer would depend on the number of images.
    """
    image = tokens.transpose(1, 2).unflatten(2, tuple(grid))
    return contiguous_copy(image) if torch.compiler.is_exporting() else image


def to_chunks(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, M, w², dim), zero-padded at the bottom and right to whole chunks."""
    window, chunks = spec.window, spec.chunks
    image = pad_map(tokens.unflatten(1, tuple(spec.grid)), 1, *spec.padding)
    split = image.unflatten(2, (chunks.width, window)).unflatten(1, (chunks.height, window))
    return contiguous_copy(split.permute(0, 5, 1, 3, 2, 4, 6)).flatten(4, 5).flatten(2, 3)


def from_chunks(chunked: Tensor, spec: LocalSpec) -> Tensor:
    """The inverse of :func:`to_chunks`: (B, heads, M, w², dim) to (B, N, heads, dim), padding cropped."""
    bottom, right = spec.padding
    split = chunked.unflatten(3, (spec.window, spec.window)).unflatten(2, tuple(spec.chunks))
    image = contiguous_copy(split.permute(0, 2, 4, 3, 5, 1, 6)).flatten(3, 4).flatten(1, 2)
    return pad_map(image, 1, -bottom, -right).flatten(1, 2)
