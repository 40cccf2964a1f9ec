"""Rows of chunks as streams of tokens, taken column by column, in which the keys of every chunk are a slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .tiles import AxisClass

APART = 3
"""Rows of chunks so far apart share no keys, so that gradients of theirs can be kept side by side."""


class Scratch:
    """Buffers by name, used again and again: fresh pages cost as much as arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous buffer with the content of its last use."""
        size = torch.Size(shape).numel()
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)


class Strips(NamedTuple):
    """``rows`` rows of chunks of a class from the ``first``, each :data:`APART`, in some images, for all heads.

    A stream of theirs is (n, tokens, dim), n = images × rows × heads.
    """

    images: slice
    first: int
    rows: int
    window: int

    def load(self, image: Tensor, start: int, tall: int, buffers: Scratch, name: str, spare: int = 0) -> Tensor:
        """The stream of ``tall`` rows of a map (B, height, width, heads, dim), the first row's from ``start``.

        It ends with ``spare`` tokens of zeros.
        """
        strips = self._view(image, start, tall)
        n, tokens = strips.shape[:3].numel(), strips.shape[3:5].numel()
        stream = buffers.take(name, n, tokens + spare, image.shape[-1])
        stream[:, :tokens].view(strips.shape).copy_(strips)
        stream[:, tokens:] = 0
        return stream

    def store(self, stream: Tensor, image: Tensor, start: int, tall: int) -> None:
        """The inverse of :meth:`load`."""
        strips = self._view(image, start, tall)
        strips.copy_(stream[:, : strips.shape[3:5].numel()].view(strips.shape))

    def _view(self, image: Tensor, start: int, tall: int) -> Tensor:
        """Shape (images, rows of chunks, heads, width, tall, dim)."""
        top, step = start + self.first * self.window, APART * self.window
        part = image[self.images, top : top + (self.rows - 1) * step + tall]
        return part.unfold(1, tall, step).permute(0, 1, 3, 2, 5, 4)

    def spread(self, tokens: Tensor) -> Tensor:
        """Global tokens (B, G, heads, dim) for each strip, (n, G, dim)."""
        return tokens[self.images].transpose(1, 2)[:, None].expand(-1, self.rows, -1, -1, -1).flatten(0, 2)

    def collect(self, grads: Tensor, tokens: Tensor) -> None:
        """The adjoint of :meth:`spread`: add gradients (n, G, dim) to those of the tokens."""
        tokens[self.images] += grads.unflatten(0, (-1, self.rows, tokens.shape[2])).sum(1).transpose(1, 2)


def row_strips(rows: AxisClass, window: int, batch: int, per_row: int, budget: int) -> Iterator[Strips]:
    """All rows of chunks of a class in all images, as many at a time as a ``budget`` of elements holds."""
    for start in range(min(APART, rows.chunks)):
        firsts = range(start, rows.chunks, APART)
        count = _share(len(firsts), budget // per_row)
        images = _share(batch, budget // (per_row * count)) if count == len(firsts) else 1
        for image in range(0, batch, images):
            for first in range(0, len(firsts), count):
                rest = min(count, len(firsts) - first)
                yield Strips(slice(image, image + images), firsts[first], rest, window)


def _share(items: int, most: int) -> int:
    """How many items at a time, at ``most`` so many if that is any, so that all times are about equal."""
    times = max(1, -(-items // max(1, most)))
    return max(1, -(-items // times))
