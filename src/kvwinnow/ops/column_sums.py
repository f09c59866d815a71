"""How much attention each key receives: softmax weights summed over queries, given their log-sum-exp.

A second pass over blocks of keys and queries, since a flash pass forgets the weights. Each block of keys is decoded
once; a block of logits stays in the processor's cache while it is masked, exponentiated and summed. On CPUs the native
kernels do the same where they are there (``cpu/scoring.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvwinnow.ops.cpu import scoring
from kvwinnow.ops.slots import Chunk, Observed, Slots
from kvwinnow.ops.stored_space import query
from kvwinnow.ops.variant import Variant, capped

KEY_BLOCK = 512
LOGITS = 2**18
"""Logits of one block, over all heads: 1 MiB, about a core's second-level cache."""
UNDERFLOW = -87.0
"""exp of less is no normal float32 and takes a CPU 20 to 150 times longer; exp(-87) = 1.6e-38 adds nothing to a sum."""
HIDDEN = 2e-38
"""A little more than exp(UNDERFLOW)."""


def column_sums(
    q: Tensor, positions: Tensor | None, lse: Tensor, slots: Slots, chunk: Chunk, variant: Variant
) -> Observed:
    """Softmax weight each cached and each new token receives, summed over q, mean over the GQA group.

    Args:
        q: (B, Hq, m, D).
        positions: (B, m) int32 of q, negative where there is no query; None: q is the chunk's, without padding.
        lse: (B, Hq, m) float32 over all that each query sees and the softmax's sinks; -inf where that is nothing.
        slots: the cached tokens.
        chunk: the new tokens.
        variant: how the layer attends.
    """
    heads, total = q.shape[1:3]
    kv_heads, count = slots.positions.shape[1:]
    if scoring.serves(q, chunk.keys, variant):
        sums = scoring.column_sums(q, positions, lse, slots, chunk, variant)
    else:
        sums = _summed(q, positions, lse, slots, chunk, variant)
    # What is hidden from a query has left exp(UNDERFLOW) for it: a sum of no more than that is none.
    sums.masked_fill_(sums <= total * (heads // kv_heads) * HIDDEN, 0.0)
    sums /= heads // kv_heads
    return Observed(sums[:, :, :count], sums[:, :, count:])


def _summed(q: Tensor, positions: Tensor | None, lse: Tensor, slots: Slots, chunk: Chunk, variant: Variant) -> Tensor:
    """(B, Hkv, S + n): the same, before what is hidden is cleared, and summed over the GQA group."""
    batch, heads, total, _ = q.shape
    kv_heads, count = slots.positions.shape[1:]
    size = (batch, kv_heads, count + chunk.positions.shape[1])
    sums = torch.zeros(size, dtype=torch.float32, device=q.device)
    # A query that sees nothing has weights exp(-inf - 0) = 0.
    lse = lse.masked_fill(lse == -torch.inf, 0.0).view(batch, kv_heads, -1, total, 1)
    step = max(1, LOGITS // (batch * heads * KEY_BLOCK))
    for block in _blocks(q, slots, chunk, variant):
        # Of a chunk's own queries only those from the block's first key on see any of it.
        for start in range(block.first if positions is None else 0, total, step):
            rows = slice(start, min(start + step, total))
            weights = block.logits(rows, positions).sub_(lse[:, :, :, rows]).clamp_(min=UNDERFLOW).exp_()
            sums[:, :, block.start : block.stop] += weights.sum((2, 3))
    return sums


def log_sum_exp(q: Tensor, positions: Tensor, slots: Slots, chunk: Chunk, variant: Variant) -> Tensor:
    """(B, Hq, m) float32 over slots and chunk, for few queries; -inf for one that sees nothing. Args: column_sums."""
    if scoring.serves(q, chunk.keys, variant):
        return scoring.log_sum_exp(q, positions, slots, chunk, variant)
    batch, heads, total, _ = q.shape
    kv_heads = slots.positions.shape[1]
    size = (batch, kv_heads, heads // kv_heads, total)
    lse = torch.full(size, -torch.inf, dtype=torch.float32, device=q.device)
    for block in _blocks(q, slots, chunk, variant):
        lse = torch.logaddexp(lse, block.logits(slice(0, total), positions).logsumexp(-1))
    return lse.view(batch, heads, total)


@dataclass(frozen=True)
class _Block:
    """Some keys, and all queries in the same space.

    Attributes:
        start: index of the first key, the chunk counted on from the slots.
        stop: index after the last key.
        first: which of the chunk's queries is the first to see a key of the block.
        full: which of them is the first to see all of it, empty slots aside.
        empty: whether there are empty slots among the keys.
        keys: (B, Hkv, D, block) float32.
        where: (B, Hkv or 1, block) int32, the keys' positions; -1 = empty.
        queries: (B, Hkv, G, m, D) float32, scaled.
        shift: (B, Hkv, G, m, 1) float32, added to the logits; None: nothing is.
        variant: how the layer attends; a sliding one is masked only where the queries' positions are given.
    """

    start: int
    stop: int
    first: int
    full: int
    empty: bool
    keys: Tensor
    where: Tensor
    queries: Tensor
    shift: Tensor | None
    variant: Variant

    def logits(self, rows: slice, positions: Tensor | None) -> Tensor:
        """(B, Hkv, G, rows, block) float32, -inf where a query does not see a key."""
        queries = self.queries[:, :, :, rows]
        logits = (queries.flatten(2, 3) @ self.keys).view(*queries.shape[:-1], -1)
        if self.shift is not None:
            logits += self.shift[:, :, :, rows]
        logits = capped(logits, self.variant.softcap)
        where = self.where[:, :, None, None, :]
        if positions is not None:
            own = positions[:, None, None, rows, None]
            hidden = (where > own) | (where < 0)
            if self.variant.sliding is not None:
                hidden = hidden | (where <= own - self.variant.sliding)
        elif rows.start < self.full:
            ahead = torch.arange(rows.start, rows.stop, device=where.device).unsqueeze(1) - self.first
            hidden = torch.arange(self.stop - self.start, device=where.device) > ahead
        elif self.empty:
            hidden = where < 0
        else:
            return logits
        return logits.masked_fill_(hidden, -torch.inf)


def _blocks(q: Tensor, slots: Slots, chunk: Chunk, variant: Variant) -> Iterator[_Block]:
    """The slots' keys, then the chunk's."""
    batch, heads, total, dim = q.shape
    kv_heads, count = slots.positions.shape[1:]
    grouped = q.reshape(batch, kv_heads, -1, dim)
    shape = (batch, kv_heads, heads // kv_heads, total)
    if count:
        queries, shift = query(slots.keys, grouped)
        queries = queries.float().mul(variant.scale).view(*shape, dim)
        shift = None if shift is None else shift.mul(variant.scale).view(*shape, 1)
        for a, b in slots.blocks(KEY_BLOCK):
            keys, where = slots.keys.read(a, b).float().mT, slots.positions[:, :, a:b]
            yield _Block(a, b, 0, 0, bool((where < 0).any()), keys, where, queries, shift, variant)
    queries = grouped.float().mul(variant.scale).view(*shape, dim)
    n = chunk.positions.shape[1]
    for a in range(0, n, KEY_BLOCK):
        b = min(a + KEY_BLOCK, n)
        keys = chunk.keys[:, :, a:b].float().mT
        yield _Block(count + a, count + b, a, b - 1, False, keys, chunk.positions[:, None, a:b], queries, None, variant)
