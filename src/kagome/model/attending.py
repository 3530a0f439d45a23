"""Attending: attention call by call, so that what it drops can be drawn by what a row is.

Where it sits: ``masks`` runs it in place of ``scaled_dot_product_attention`` with dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    drop: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """What ``torch.nn.functional.scaled_dot_product_attention`` gives, with dropout by ``drop(weights, p)``.

    Shapes:
        ``query [..., L, E]``, ``key [..., S, E]``, ``value [..., S, V]`` -> ``[..., L, V]``.

    Cost:
        Keeps the weights ``[..., L, S]`` for backward.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return drop(scores.softmax(-1), dropout_p) @ value
