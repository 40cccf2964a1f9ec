"""Position: absolute embeddings, the relative bias, and the resizing of their tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from ..errors import check_choice
from ..geometry import Grid
from ..ops.chunks import contiguous_copy
from .config import ADAPT_TABLE_RESIZE, TABLE_RESIZES


def small_normal(*shape: int) -> nn.Parameter:
    """A parameter drawn with standard deviation 0.02, as all tokens and tables are."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=0.02))


def resize_axis(table: Tensor, length: int) -> Tensor:
    """Linear resize of a table (n, d) along its positions to (length, d)."""
    if statically_known_true(table.shape[0] == length):
        return table
    return F.interpolate(table.t()[None], size=length, mode="linear", align_corners=False)[0].t()


def resize_map(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Bilinear resize of a table (N, d) over the map ``old`` to the map ``new``."""
    if all(statically_known_true(a == b) for a, b in zip(old, new, strict=True)):
        return table
    image = table.t().unflatten(1, tuple(old))[None]
    return F.interpolate(image, size=tuple(new), mode="bilinear", align_corners=False)[0].flatten(1).t()


def resize_bias_table(table: Tensor, shape: tuple[int, int], method: str = ADAPT_TABLE_RESIZE) -> Tensor:
    """A table of relative position (heads, R, C), R and C odd, for another range; see :data:`TABLE_RESIZES`."""
    check_choice("table resize", method, TABLE_RESIZES)
    if tuple(table.shape[1:]) == tuple(shape):
        return table
    if method == "bilinear":
        return F.interpolate(table[None], size=tuple(shape), mode="bilinear", align_corners=False)[0]
    grow = [(new - old) // 2 for new, old in zip(shape, table.shape[1:], strict=True)]
    outside = [max(0, n) for n in grow]
    inside = [max(0, -n) for n in grow]
    height, width = table.shape[1:]
    cropped = table[:, inside[0] : height - inside[0], inside[1] : width - inside[1]]
    return F.pad(cropped[None], (outside[1], outside[1], outside[0], outside[0]), mode="replicate")[0]


class AbsolutePosition(nn.Module):
    """Row and column embeddings side by side: the first half of the channels for the row, the second for the column.

    Global tokens have embeddings of their own; tokens given by the caller have none.
    """

    def __init__(self, dim: int, grid: Grid, global_tokens: int) -> None:
        super().__init__()
        self.rows = small_normal(grid.height, dim // 2)
        self.columns = small_normal(grid.width, dim // 2)
        self.global_tokens = small_normal(global_tokens, dim) if global_tokens else None

    def forward(self, grid: Grid) -> Tensor:
        """The embedding of every local token, (N, dim), resized if the map is another one."""
        return self.of_rows(grid, 0, grid.height)

    def of_rows(self, grid: Grid, start: int, stop: int) -> Tensor:
        """The embedding of the tokens of some rows of a map, ((stop - start) × width, dim)."""
        rows, columns = resize_axis(self.rows, grid.height), resize_axis(self.columns, grid.width)
        rows = rows[start:stop, None].expand(-1, grid.width, -1)
        columns = columns[None].expand(stop - start, -1, -1)
        return torch.cat([rows, columns], -1).flatten(0, 1)

    def set_grid(self, grid: Grid) -> None:
        """Make the tables for another map."""
        self.rows = nn.Parameter(contiguous_copy(resize_axis(self.rows.detach(), grid.height)))
        self.columns = nn.Parameter(contiguous_copy(resize_axis(self.columns.detach(), grid.width)))


class AbsolutePosition1d(nn.Module):
    """One embedding per token, as in the plain ViT: the paper's ablation."""

    def __init__(self, dim: int, grid: Grid, global_tokens: int) -> None:
        super().__init__()
        self.grid = grid
        self.table = small_normal(grid.tokens, dim)
        self.global_tokens = small_normal(global_tokens, dim) if global_tokens else None

    def forward(self, grid: Grid) -> Tensor:
        """The embedding of every local token, (N, dim), resized if the map is another one."""
        return resize_map(self.table, self.grid, grid)

    def of_rows(self, grid: Grid, start: int, stop: int) -> Tensor:
        """The embedding of the tokens of some rows of a map, ((stop - start) × width, dim), cut out of the whole."""
        return self(grid)[start * grid.width : stop * grid.width]

    def set_grid(self, grid: Grid) -> None:
        """Make the table for another map."""
        self.table = nn.Parameter(contiguous_copy(resize_map(self.table.detach(), self.grid, grid)))
        self.grid = grid


class RelativeBias(nn.Module):
    """Trainable biases of the scores: one per offset between local tokens, one per pair with a global token.

    ``shape`` is the offset table's (R, C), or None where local tokens don't see one another. ``given`` adds one entry
    that all tokens given by the caller share.
    """

    def __init__(self, heads: int, shape: tuple[int, int] | None, global_tokens: int, *, given: bool) -> None:
        super().__init__()
        self.global_tokens, self.given = global_tokens, given
        if shape is not None:
            self.table = small_normal(heads, *shape)
        entries = global_tokens + given
        if entries:
            self.local_to_global = small_normal(heads, entries)
            self.global_to_local = small_normal(heads, entries)
            self.global_to_global = small_normal(heads, entries, entries)

    def to_global(self, count: int) -> Tensor | None:
        """Bias of local queries for ``count`` global keys, (heads, count)."""
        return self._per_token(self.local_to_global, count, 1) if count else None

    def from_global(self, count: int, grid: Grid) -> Tensor:
        """Bias of ``count`` global queries for all tokens, global first, (heads, count, count + N)."""
        to_local, among = self.to_local(count).expand(-1, -1, grid.tokens), self.among_global(count)
        return torch.cat([among * 1, to_local], -1)  # so that its gradient is no part of the whole one's: DDP warns

    def of_global(self, count: int) -> Tensor | None:
        """Bias of ``count`` global queries for as many global keys, and last for every local key,
        (heads, count, count + 1).
        """
        if count == 0:
            return None
        return torch.cat([self.among_global(count) * 1, self.to_local(count) * 1], -1)  # as in :meth:`from_global`

    def to_local(self, count: int) -> Tensor:
        """Bias of ``count`` global queries for every local key, (heads, count, 1)."""
        return self._per_token(self.global_to_local, count, 1)[..., None]

    def among_global(self, count: int) -> Tensor:
        """Bias of ``count`` global queries for as many global keys, (heads, count, count)."""
        return self._per_token(self._per_token(self.global_to_global, count, 1), count, 2)

    def _per_token(self, entries: Tensor, count: int, axis: int) -> Tensor:
        """The entries of ``count`` tokens along ``axis``: each own token has its own, given tokens share the last."""
        if not self.given:
            return entries
        sizes = list(entries.shape)
        sizes[axis] = count - self.global_tokens
        shared = entries.narrow(axis, self.global_tokens, 1).expand(sizes)
        return torch.cat([entries.narrow(axis, 0, self.global_tokens), shared], axis)

    def set_shape(self, shape: tuple[int, int]) -> None:
        """Make the offset table for another range, each offset keeping its meaning."""
        self.table = nn.Parameter(resize_bias_table(self.table.detach(), shape).clone())
