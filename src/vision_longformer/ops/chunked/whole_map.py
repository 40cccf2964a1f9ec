"""When every chunk neighbours every other, rule ``chunk`` is full attention: one call of torch's own kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import Implementation, Inputs, LocalSpec
from ..tables import covers_map, map_bias


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if spec.rule != "chunk" or spec.neighbour_mode != "all":
        return "only rule 'chunk' with all neighbours can cover a whole map without a mask"
    if not covers_map(spec.grid, spec.window):
        return "the map is larger than 2×2 chunks"  # no numbers: printing one would tie a compiled graph to it
    return None


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, bias, global_bias, _ = inputs
    mask = None
    if bias is not None or global_bias is not None:
        heads, tokens = q.shape[2], spec.grid.tokens
        to_global = q.new_zeros(heads, inputs.global_tokens) if global_bias is None else global_bias
        local = q.new_zeros(heads, tokens, tokens) if bias is None else map_bias(bias, spec.grid)
        mask = torch.cat([to_global[:, None].expand(-1, tokens, -1), local], -1)[None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=spec.scale).transpose(1, 2)


WHOLE_MAP = Implementation(_refusal, _attend)
