"""The pool as FlashAttention, FlashInfer and Triton read it: each slot's key, and its value behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow.ops import Variant
from kvwinnow.ops.variant import capped

QUERY_BLOCK = 256
"""Queries attended to at once where attention is computed anew."""


class PagedDense:
    """One layer's part of the pool, (blocks, Hkv, block size, 2 * D) whatever its strides.

    Args:
        cache: the layer's view of the pool.
        variant: how the layer attends.
    """

    def __init__(self, cache: Tensor, variant: Variant) -> None:
        self.cache, self.variant = cache, variant
        self.kv_heads, self.block, self.dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2

    def keys(self, blocks: Tensor) -> Tensor:
        return self.cache[..., : self.dim][blocks]

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        found = self.cache[blocks].transpose(0, 1).flatten(1, 2)
        return found[..., : self.dim], found[..., self.dim :]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.cache[slots // self.block, :, slots % self.block] = torch.cat([keys, values], -1).transpose(0, 1)

    def attend(self, query: Tensor, output: Tensor, blocks: Tensor, length: int) -> None:
        keys, values = (part[:, :length].float() for part in self.read(blocks))
        kv_heads, count, dim = keys.shape
        n, heads, _ = query.shape
        out = output.view(n, heads, dim)
        places = torch.arange(count, device=keys.device)
        for start in range(0, n, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, n))
            q = query[rows].float().view(-1, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
            logits = capped((q @ keys.mT.unsqueeze(1)).mul_(self.variant.scale), self.variant.softcap)
            own = places[count - n + start : count - n + rows.stop]
            weights = logits.masked_fill_(places > own.unsqueeze(1), -torch.inf).softmax(-1)
            found = (weights @ values.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
            out[rows] = found.to(out.dtype)
