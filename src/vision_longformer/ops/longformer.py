"""Attention of global and of local tokens from one packed projection: what it means, and how it is computed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..geometry import Grid
from .chunked import gathered_chunk, whole_map
from .local_attention import IMPLEMENTATIONS, attend_by, autocast_dtype, automatic, check_alike, read_call
from .operator import arithmetic_dtype
from .spec import Inputs, LocalSpec, PackedInputs
from .triton import attend_rows, refuse_rows

ALL_ROWS = {"whole_map": whole_map.attend_all_rows, "gathered_chunk": gathered_chunk.attend_all_rows}
"""Implementations that compute the rows of global tokens with those of local ones."""


def longformer_attention(
    qkv: Tensor,
    grid: Grid | tuple[int, int],
    *,
    window: int,
    rule: str = "chunk",
    neighbours: str | int | Tensor = "all",
    bias: Tensor | None = None,
    global_bias: Tensor | None = None,
    from_global_bias: Tensor | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attention of the G global tokens to all tokens, and of the tokens of a map as in :func:`local_attention`.

    Where the Triton kernels run, they read the projection and write its gradient in place, and nothing is concatenated.
    Where local tokens see the whole map, the rows of both are one call of PyTorch's attention. Else those of global
    tokens are such a call, and those of local tokens ``local_attention``; exported graphs put both in order at once.

    Args:
        qkv: queries, keys and values of all tokens, (B, G + N, 3, heads, dim), global tokens first; G may be 0.
        grid: height and width of the map, N = height × width, row by row.
        bias, global_bias: of the local queries, see :func:`local_attention`.
        from_global_bias: of the global queries, (heads, G, G + 1): for each global key, and last for every local key.
        window, rule, neighbours, scale, implementation: as in :func:`local_attention`.

    Returns:
        (B, G + N, heads, dim).
    """
    grid = Grid(*grid)
    _check_packed(qkv, grid, from_global_bias)
    qkv = qkv.to(autocast_dtype(qkv))
    global_tokens = qkv.shape[1] - grid.tokens
    q, k, v = qkv.unbind(2)
    global_q, local_q = q.split((global_tokens, grid.tokens), 1) if global_tokens else (None, q)
    inputs, spec = read_call(
        local_q, k, v, grid, window=window, rule=rule, neighbours=neighbours, bias=bias, global_bias=global_bias,
        scale=scale,
    )  # fmt: skip
    name = automatic(spec, local_q) if implementation == "auto" else implementation
    if name == "triton_gpu" and refuse_rows(spec, qkv) is None:
        wide = None if from_global_bias is None else from_global_bias.to(arithmetic_dtype(qkv))
        return attend_rows(PackedInputs(qkv, inputs.bias, inputs.global_bias, wide, inputs.neighbour), spec)
    if name in ALL_ROWS and global_q is not None and IMPLEMENTATIONS[name].refusal(spec, local_q) is None:
        wide = None if from_global_bias is None else _for_all_keys(from_global_bias, grid.tokens)
        return ALL_ROWS[name](q, inputs, spec, wide)
    return _compose(global_q, inputs, spec, from_global_bias, name)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Softmax attention in the layout (B, tokens, heads, head_dim); ``mask`` (heads, queries, keys) is added."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)[None]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2)


def _compose(
    global_q: Tensor | None, inputs: Inputs, spec: LocalSpec, from_global_bias: Tensor | None, implementation: str
) -> Tensor:
    """Global rows come before local ones, so that backward has the gradients of all keys and values from the local
    rows first and adds those of the few global rows in place. Queries are split, not sliced twice: their gradient is
    one concatenation instead of two maps of zeros to be filled and added.
    """
    if global_q is None:
        return attend_by(implementation, inputs, spec)
    mask = None if from_global_bias is None else _for_all_keys(from_global_bias, spec.grid.tokens)
    global_rows = attend(global_q, inputs.k, inputs.v, spec.scale, mask)
    return torch.cat([global_rows, attend_by(implementation, inputs, spec)], 1)


def _for_all_keys(from_global_bias: Tensor, local_tokens: int) -> Tensor:
    """(heads, G, G + N) from (heads, G, G + 1)."""
    among_global, to_local = from_global_bias.split((from_global_bias.shape[1], 1), -1)
    return torch.cat([among_global, to_local.expand(-1, -1, local_tokens)], -1)


def _check_packed(qkv: Tensor, grid: Grid, from_global_bias: Tensor | None) -> None:
    if qkv.dim() != 5 or qkv.shape[2] != 3 or qkv.shape[1] < grid.tokens:
        raise ValueError(
            f"qkv is {tuple(qkv.shape)}; a map of {grid.height}×{grid.width} needs "
            f"(batch, G + {grid.tokens}, 3, heads, dim), G global tokens first"
        )
    check_alike(qkv, {"from_global_bias": from_global_bias})
    global_tokens, heads = qkv.shape[1] - grid.tokens, qkv.shape[3]
    if from_global_bias is not None and from_global_bias.shape != (heads, global_tokens, global_tokens + 1):
        raise ValueError(
            f"from_global_bias is {tuple(from_global_bias.shape)}; "
            f"it must be ({heads}, {global_tokens}, {global_tokens + 1})"
        )
