"""The torch back end: runs on every device, in float32 wherever it is not the model's own product.

Nothing here is ever n x n: prompts go through a flash pass that also gives the log-sum-exp, and statistics are
summed in a second pass over blocks of queries and keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvwinnow.ops.column_sums import column_sums, log_sum_exp
from kvwinnow.ops.flash import flash, merge
from kvwinnow.ops.slots import Chunk, Observed, Slots, Window
from kvwinnow.statistics import NONE, Kind, Statistics

LOWEST = torch.finfo(torch.float32).min
"""Logit of an empty slot in decode: unlike -inf it leaves a row that holds nothing at all a finite output."""
SLOT_BLOCK = 1024
"""Slots decoded at once: quantised storage is never dequantised as a whole."""


def attention(
    q: Tensor,
    slots: Slots,
    chunk: Chunk | None = None,
    *,
    scale: float,
    statistics: Statistics = NONE,
    window: Window | None = None,
) -> tuple[Tensor, Observed | None]:
    """Attention of new queries over everything a layer holds.

    Args:
        q: (B, Hq, n, D), queries in the model's dtype; n = 1 without a chunk.
        slots: the cached tokens, every occupied one of which all of q may see.
        chunk: the n new tokens of a prompt, causal among themselves; None in decode, where the new token lies in a
            slot already.
        scale: factor on q.k, usually 1/sqrt(D).
        statistics: what to report beside the output.
        window: the observing queries, for WINDOW.

    Returns:
        The output (B, Hq, n, D) in q's dtype (zeros for the padding of a chunk), and the statistic; None for NONE.
    """
    if chunk is None:
        return _decode(q, slots, scale, statistics)
    if not any(chunk.starts):
        return _prompt(q, slots, chunk, scale, statistics, window)
    return _padded(q, slots, chunk, scale, statistics, window)


def _decode(q: Tensor, slots: Slots, scale: float, statistics: Statistics) -> tuple[Tensor, Observed | None]:
    batch, heads, _, dim = q.shape
    kv_heads = slots.positions.shape[1]
    # The query heads of one KV head stand as rows of one matrix, so that no key or value is repeated.
    queries, shift = slots.keys.query(q.reshape(batch, kv_heads, heads // kv_heads, dim))
    queries = queries.float()
    blocks = slots.blocks(SLOT_BLOCK)
    logits = _whole([queries @ slots.keys.read(*block).float().mT for block in blocks])
    if shift is not None:
        logits += shift
    weights = logits.mul_(scale).masked_fill_((slots.positions < 0).unsqueeze(2), LOWEST).softmax(-1)
    out = functools.reduce(torch.add, (weights[..., a:b] @ slots.values.read(a, b).float() for a, b in blocks))
    observed = None
    if statistics.kind is not Kind.NONE:
        observed = Observed(weights.mean(2), weights.new_zeros(batch, kv_heads, 0))
    return slots.values.restore(out).to(q.dtype).view(batch, heads, 1, -1), observed


def _whole(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def _padded(
    q: Tensor, slots: Slots, chunk: Chunk, scale: float, statistics: Statistics, window: Window | None
) -> tuple[Tensor, Observed | None]:
    """Each row by itself and without its padding: that is what makes it equal to the row alone."""
    batch, heads, n, _ = q.shape
    out = q.new_zeros(batch, heads, n, chunk.values.shape[-1])
    observed = None
    if statistics.kind is not Kind.NONE:
        zeros = torch.zeros_like(slots.positions, dtype=torch.float32)
        observed = Observed(zeros, zeros.new_zeros(*zeros.shape[:2], n))
    for row, start in enumerate(chunk.starts):
        if start == n:
            continue
        seen = None if window is None else window.row(row)
        part = q[row : row + 1, :, start:]
        out[row, :, start:], measured = _prompt(part, slots.row(row), chunk.row(row), scale, statistics, seen)
        if observed and measured:
            observed.slots[row], observed.chunk[row, :, start:] = measured.slots, measured.chunk
    return out, observed


def _prompt(
    q: Tensor, slots: Slots, chunk: Chunk, scale: float, statistics: Statistics, window: Window | None
) -> tuple[Tensor, Observed | None]:
    out, lse = flash(q, chunk.keys, chunk.values, scale=scale, causal=True)
    for start, stop in slots.blocks(SLOT_BLOCK):
        out, lse = merge((out, lse), _over_slots(q, slots, start, stop, scale))
    observed = None
    if statistics.kind is Kind.MASS:
        observed = column_sums(q, None, lse, slots, chunk, scale)
    elif statistics.kind is Kind.WINDOW and window is not None:
        # The window's queries from earlier chunks have seen slots that are gone by now: their log-sum-exp over what
        # is left is taken anew.
        lse = log_sum_exp(window.queries, window.positions, slots, chunk, scale)
        observed = column_sums(window.queries, window.positions, lse, slots, chunk, scale)
    return out.to(q.dtype), observed


def _over_slots(q: Tensor, slots: Slots, start: int, stop: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all of q over slots [start, stop) alone: output float32 (B, Hq, n, D), log-sum-exp (B, Hq, n)."""
    batch, heads, n, dim = q.shape
    kv_heads = slots.positions.shape[1]
    queries, shift = slots.keys.query(q.reshape(batch, kv_heads, -1, dim))
    empty = slots.positions[:, :, start:stop] < 0
    mask = torch.zeros_like(empty, dtype=torch.float32).masked_fill_(empty, -torch.inf)
    keys, values = slots.keys.read(start, stop).float(), slots.values.read(start, stop).float()
    out, lse = flash(queries.float(), keys, values, scale=scale, mask=mask.unsqueeze(2))
    if shift is not None:
        lse = lse + shift.squeeze(-1) * scale
    return slots.values.restore(out).view(batch, heads, n, -1), lse.reshape(batch, heads, n)
