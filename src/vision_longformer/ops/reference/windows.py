"""What is added to and hidden from the (2w+1)² keys of an exact window: shared by the unfold implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import BLOCKS
from ..chunks import axis_window, neighbour_block, table_lookup, window_steps
from ..spec import LocalSpec

ONLY_EXACT = "unfold slides one window per token, so the rule must be 'exact'"


def window_mask(spec: LocalSpec, neighbour: Tensor | None, device: torch.device) -> Tensor:
    """Which keys of its window each token sees, boolean (N, (2w+1)²)."""
    rows = axis_window(spec.grid.height, spec.window, spec.dilation, device)
    columns = axis_window(spec.grid.width, spec.window, spec.dilation, device)
    seen = rows.inside[:, None, :, None] & columns.inside[None, :, None, :]
    if spec.neighbours != "all":
        row, column = rows.block[:, None, :, None], columns.block[None, :, None, :]
        wanted = (row == 0) & (column == 0)
        if neighbour is not None:
            wanted_row, wanted_column = torch.tensor(BLOCKS, device=device)[neighbour_block(neighbour)]
            wanted = wanted | ((row == wanted_row) & (column == wanted_column))
        seen = seen & wanted
    return seen.flatten(2, 3).flatten(0, 1)


def window_bias(table: Tensor, spec: LocalSpec) -> Tensor:
    """The bias of each key of a window, (heads, (2w+1)²); steps count in units of the dilation."""
    offsets = -window_steps(spec.window, table.device)
    return table_lookup(table, offsets, offsets).flatten(1)


def combine(
    to_global: Tensor, to_window: Tensor, global_bias: Tensor | None, bias: Tensor | None, seen: Tensor, scale: float
) -> Tensor:
    """Softmax weights (B, heads, N, G + (2w+1)²) from the products of queries with global and window keys."""
    to_global, to_window = to_global * scale, to_window * scale
    if global_bias is not None:
        to_global = to_global + global_bias[:, None]
    if bias is not None:
        to_window = to_window + bias[:, None]
    return torch.cat([to_global, to_window.masked_fill(~seen, float("-inf"))], -1).softmax(-1)
