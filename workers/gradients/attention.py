"""nn.MultiheadAttention as self-attention, rewritten as two linear layers around scaled dot products."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.workers.gradients.rules import Recorder


def self_attention(
    module: nn.MultiheadAttention,
    record: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the output of ``module.forward`` for query [b, t, width], or None if the call is not covered.

    Covered: self-attention without an extra key (bias_k, add_zero_attn). As in `module.forward`, ``is_causal`` needs an
    ``attn_mask``.
    """
    if not (query is key is value and query.dim() == 3 and module.bias_k is None and not module.add_zero_attn):
        return None
    rows, length, width = query.shape
    heads = (rows, length, 3, module.num_heads, module.head_dim)
    q, k, v = record.linear(query, "in_proj_weight", "in_proj_bias").view(heads).permute(2, 0, 3, 1, 4)
    bias = _bias(rows, module.num_heads, key_padding_mask, attn_mask, query.dtype)
    dropout = module.dropout if module.training else 0.0
    if need_weights:
        scores = q @ k.mT * module.head_dim**-0.5
        weights = (scores if bias is None else scores + bias).softmax(-1)
        attended = functional.dropout(weights, dropout) @ v
    else:
        attended = functional.scaled_dot_product_attention(q, k, v, bias, dropout)
    output = record.linear(attended.transpose(1, 2).reshape(rows, length, width), "out_proj.weight", "out_proj.bias")
    if not need_weights:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _bias(
    rows: int, heads: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one bias to add to the scores, broadcastable to [b, heads, t, t]; True means "do not attend"."""
    bias: Tensor | None = None
    for mask, shape in ((key_padding_mask, (rows, 1, 1, -1)), (attn_mask, None)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        if shape is not None:
            mask = mask.view(shape)
        elif mask.dim() == 3:
            mask = mask.view(rows, heads, *mask.shape[1:])
        bias = mask if bias is None else bias + mask
    return bias
