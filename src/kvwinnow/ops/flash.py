"""One pass of attention that also gives the log-sum-exp, and the merging of two such passes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow.ops.variant import capped

QUERY_BLOCK = 128
SLIDING_BLOCK = 512
"""Queries that share a pass over the keys in reach of any of them."""


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale (q.k + shift) + mask) v in memory linear in the number of keys.

    Args:
        q: (B, Hq, n, D).
        k: (B, Hkv, m, D), Hq a multiple of Hkv; not repeated.
        v: (B, Hkv, m, Dv).
        scale: factor on q.k.
        causal: query i sees keys 0 to i (n = m then).
        mask: (B or 1, Hq or 1, n or 1, m) in q's dtype, added to the logits: 0 or -inf; not together with ``causal``.
        softcap: see ``Variant``.
        shift: (B, Hq, n, 1) float32, added to q.k; only together with ``softcap``: elsewhere it changes nothing but
            the log-sum-exp.

    Returns:
        (B, Hq, n, Dv) in q's dtype and the log-sum-exp (B, Hq, n) float32; 0 and -inf where a query sees no key.
    """
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1] and q.dtype == k.dtype == v.dtype and softcap is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    else:
        out, lse = _blockwise(q, k, v, scale, causal, mask, softcap, shift)
    if mask is not None:
        # Where every key is masked, kernels differ in what they leave (NaN, or the log-sum-exp 0), so the mask decides.
        nothing = (mask == -torch.inf).all(-1)
        out, lse = out.masked_fill(nothing.unsqueeze(-1), 0.0), lse.masked_fill(nothing, -torch.inf)
    return out, lse


def _blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    softcap: float | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch operations, float32, a block of queries at a time."""
    batch, heads, n, dim = q.shape
    kv_heads, m = k.shape[1:3]
    group = heads // kv_heads
    keys, values = k.float().mT, v.float()
    out = q.new_empty(batch, heads, n, v.shape[-1])
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        rows = q[:, :, start:stop].float().reshape(batch, kv_heads, group * (stop - start), dim)
        seen = stop if causal else m
        logits = (rows @ keys[..., :seen]).view(batch, heads, stop - start, seen)
        if shift is not None:
            logits += shift[:, :, start:stop]
        logits = capped(logits.mul_(scale), softcap)
        if mask is not None:
            logits = logits + (mask if mask.shape[2] == 1 else mask[:, :, start:stop])
        if causal:
            future = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).triu_(start + 1)
            logits.masked_fill_(future, -torch.inf)
        lse[:, :, start:stop] = logits.logsumexp(-1)
        weights = logits.softmax(-1).view(batch, kv_heads, -1, seen)
        out[:, :, start:stop] = (weights @ values[:, :, :seen]).view(batch, heads, stop - start, -1)
    return out, lse


def sliding_flash(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Causal ``flash`` in which a query sees the ``sliding`` latest keys only, its own included.

    Each block of queries meets only the keys in its reach, so that time and memory follow n x sliding, not n x n.
    """
    n = q.shape[2]
    if sliding >= n:
        return flash(q, k, v, scale=scale, causal=True, softcap=softcap)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for start in range(0, n, SLIDING_BLOCK):
        stop, first = min(start + SLIDING_BLOCK, n), max(0, start - sliding + 1)
        queries = torch.arange(start, stop, device=q.device).unsqueeze(1)
        keys = torch.arange(first, stop, device=q.device)
        hidden = (keys > queries) | (keys <= queries - sliding)
        mask = torch.zeros(1, 1, *hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        out[:, :, start:stop], lse[:, :, start:stop] = flash(
            q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], scale=scale, mask=mask, softcap=softcap
        )
    return out, lse


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from (output, log-sum-exp) over each.

    The first must not be empty for any query. Outputs are (B, Hq, n, D), log-sum-exps (B, Hq, n); float32 returned.
    """
    (out, lse), (out2, lse2) = one, other
    weight = torch.sigmoid(lse - lse2).unsqueeze(-1)
    return out.float() * weight + out2.float() * (1 - weight), torch.logaddexp(lse, lse2)
