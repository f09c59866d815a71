"""How much attention each key receives from the latest queries, where their log-sum-exp is not known.

One pass over few queries and all that they see: cheaper than two passes over smaller blocks where the weights of one
query fit into the processor's cache, and where no flash pass has given the log-sum-exp. On CPUs the native kernels,
where they are there, take two passes (``cpu/scoring.py``), which keep no more than a few columns of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow.ops.column_sums import HIDDEN
from kvwinnow.ops.cpu import scoring
from kvwinnow.ops.variant import Variant, capped

QUERIES = 8, 64
"""The fewest and the most queries of one block."""
LOGITS = 2**21
"""Logits of one block, over all heads, as long as that leaves it the fewest queries."""
LAUNCHES = 32
"""How many times larger blocks are where the time to start an operation counts."""


def causal_sums(queries: Tensor, keys: Tensor, variant: Variant) -> Tensor:
    """(Hkv, S) float32: softmax weights that the queries of the last n of S tokens give, summed, mean over GQA groups.

    Args:
        queries: (n, Hq, D), n <= S.
        keys: (Hkv, S, D).
        variant: how the layer attends; no sliding one.
    """
    n, heads, _ = queries.shape
    group = heads // keys.shape[0]
    if scoring.serves(queries, keys, variant):
        sums = scoring.causal_sums(queries, keys, variant)
    else:
        sums = _summed(queries, keys, variant)
    # What rounds to nothing in ``column_sums`` is nothing here too, so that equal tokens tie in both.
    return sums.masked_fill_(sums <= n * group * HIDDEN, 0.0).div_(group)


def _summed(queries: Tensor, keys: Tensor, variant: Variant) -> Tensor:
    """(Hkv, S): the same, before what is hidden is cleared, and summed over the GQA group."""
    kv_heads, count, dim = keys.shape
    n, heads, _ = queries.shape
    group = heads // kv_heads
    grouped = queries.float().mul(variant.scale).view(n, kv_heads, group, dim).permute(1, 2, 0, 3)
    turned = keys.float().mT
    sinks = None if variant.sinks is None else variant.sinks.float().to(keys.device).view(kv_heads, group, 1, 1)
    sums = torch.zeros(kv_heads, count, dtype=torch.float32, device=keys.device)
    larger = 1 if keys.device.type == "cpu" else LAUNCHES
    width = min(max(LOGITS * larger // (heads * count), QUERIES[0]), QUERIES[1] * larger, n)
    later = torch.ones(width, width, dtype=torch.bool, device=keys.device).triu(1)
    for start in range(0, n, width):
        own = min(width, n - start)
        seen = count - n + start + own
        block = grouped[:, :, start : start + own].reshape(kv_heads, group * own, dim)
        logits = capped(block @ turned[:, :, :seen], variant.softcap).view(kv_heads, group, own, seen)
        logits[..., seen - own :].masked_fill_(later[:own, :own], -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.expand(-1, -1, own, -1)], -1)
        sums[:, :seen] += logits.softmax(-1)[..., :seen].sum((1, 2))
    return sums
