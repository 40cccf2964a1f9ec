"""When every chunk neighbours every other, rule ``chunk`` is full attention: one call of torch's own kernel.

Biases that are wider than q, k and v are added by plain products, whose scores fit: a map is 2×2 chunks at most.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import Implementation, Inputs, LocalSpec
from ..tables import covers_map, map_bias


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if spec.rule != "chunk" or spec.neighbour_mode != "all":
        return "only rule 'chunk' with all neighbours can cover a whole map without a mask"
    if not covers_map(spec.grid, spec.window, spec.halo or (0, 0)):
        return "the map is larger than 2×2 chunks"  # no numbers: printing one would tie a compiled graph to it
    return None


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    return _attend_rows(inputs.q, inputs, spec, _local_bias(inputs, spec))


def attend_all_rows(q: Tensor, inputs: Inputs, spec: LocalSpec, from_global_bias: Tensor | None) -> Tensor:
    """The rows of global and of local tokens in one call, (B, G + N, heads, dim).

    ``q`` are the queries of all of them, ``from_global_bias`` (heads, G, G + N) is that of the global ones.
    """
    local = _local_bias(inputs, spec)
    if local is None and from_global_bias is None:
        return _attend_rows(q, inputs, spec, None)
    count, keys = inputs.global_tokens(spec), inputs.k.shape[1]
    heads, tokens = q.shape[2], spec.grid.tokens
    local = q.new_zeros(heads, tokens, keys) if local is None else local
    above = q.new_zeros(heads, count, keys) if from_global_bias is None else from_global_bias
    return _attend_rows(q, inputs, spec, torch.cat([above, local], 1))


def _local_bias(inputs: Inputs, spec: LocalSpec) -> Tensor | None:
    """The biases of all local queries, (heads, N, G + K)."""
    q, _, _, bias, global_bias, _ = inputs
    if bias is None and global_bias is None:
        return None
    heads, tokens = q.shape[2], spec.grid.tokens
    halo, keys = spec.halo or (0, 0), spec.key_grid.tokens
    to_global = q.new_zeros(heads, inputs.global_tokens(spec)) if global_bias is None else global_bias
    local = q.new_zeros(heads, tokens, keys) if bias is None else map_bias(bias, spec.grid, halo)
    return torch.cat([to_global[:, None].expand(-1, tokens, -1), local], -1)


def _attend_rows(q: Tensor, inputs: Inputs, spec: LocalSpec, mask: Tensor | None) -> Tensor:
    """Queries (B, n, heads, dim) to all keys, ``mask`` (heads, n, G + K) added to the scores."""
    q, k, v = (x.transpose(1, 2) for x in (q, inputs.k, inputs.v))
    return softmax_attention(q, k, v, mask, spec.scale).transpose(1, 2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of queries (B, heads, n, dim) to keys and values (B, heads, m, dim), ``mask`` (heads, n, m) added."""
    if mask is None or mask.dtype == q.dtype:
        return F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[None], scale=scale)
    scores = (q * scale) @ k.transpose(-1, -2) + mask  # torch's kernel would round the mask to 16 bits
    return scores.softmax(-1).to(v.dtype) @ v


WHOLE_MAP = Implementation(_refusal, _attend)
