"""The torch back end: runs on every device, in float32 wherever it is not the model's own product.

On CPUs native kernels take over what they serve (``ops/cpu``).

Nothing here is ever n x n: prompts go through a flash pass that also gives the log-sum-exp, and statistics are
summed in a second pass over blocks of queries and keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvwinnow.ops.column_sums import column_sums, log_sum_exp
from kvwinnow.ops.cpu import attention as cpu
from kvwinnow.ops.flash import QUERY_BLOCK, flash, merge, sliding_flash
from kvwinnow.ops.slots import Chunk, Observed, Slots, Window
from kvwinnow.ops.stored_space import query, restore
from kvwinnow.ops.variant import Variant, capped
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
    variant: Variant,
    statistics: Statistics = NONE,
    window: Window | None = None,
) -> tuple[Tensor, Observed | None]:
    """Attention of new queries over everything a layer holds.

    Args:
        q: (B, Hq, n, D), queries in the model's dtype; n = 1 without a chunk.
        slots: the cached tokens, every occupied one of which all of q may see.
        chunk: the n new tokens of a prompt, causal among themselves; None in decode, where the new token lies in a
            slot already.
        variant: how the layer attends.
        statistics: what to report beside the output.
        window: the observing queries, for WINDOW.

    Returns:
        The output (B, Hq, n, D) in q's dtype (zeros for the padding of a chunk), and the statistic; None for NONE.
    """
    if chunk is None:
        return _decode(q, slots, variant, statistics)
    if not any(chunk.starts):
        return _prompt(q, slots, chunk, variant, statistics, window)
    return _padded(q, slots, chunk, variant, statistics, window)


def _decode(q: Tensor, slots: Slots, variant: Variant, statistics: Statistics) -> tuple[Tensor, Observed | None]:
    batch, heads, _, dim = q.shape
    kv_heads = slots.positions.shape[1]
    # The query heads of one KV head stand as rows of one matrix, so that no key or value is repeated.
    queries, shift = query(slots.keys, q.reshape(batch, kv_heads, heads // kv_heads, dim))
    wanted = statistics.kind is not Kind.NONE
    native = cpu.attend(queries, shift, slots, variant, sinks=True, weigh=wanted)
    if native is not None:
        observed = Observed(native.weights, native.weights.new_zeros(batch, kv_heads, 0)) if wanted else None
        return restore(slots.values, native.out, q.dtype).view(batch, heads, 1, -1), observed
    queries = queries.float()
    blocks = slots.blocks(SLOT_BLOCK)
    logits = _whole([queries @ slots.keys.read(*block).float().mT for block in blocks])
    if shift is not None:
        logits += shift
    hidden = slots.positions < 0
    if variant.sliding is not None:  # the query's own token has the highest position
        hidden |= slots.positions <= slots.positions.amax(-1, keepdim=True) - variant.sliding
    logits = capped(logits.mul_(variant.scale), variant.softcap).masked_fill_(hidden.unsqueeze(2), LOWEST)
    if variant.sinks is None:
        weights = logits.softmax(-1)
    else:
        sinks = variant.sinks.to(logits).view(1, kv_heads, -1, 1).expand(batch, -1, -1, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    out = functools.reduce(torch.add, (weights[..., a:b] @ slots.values.read(a, b).float() for a, b in blocks))
    observed = Observed(weights.mean(2), weights.new_zeros(batch, kv_heads, 0)) if wanted else None
    return restore(slots.values, out, q.dtype).view(batch, heads, 1, -1), observed


def _whole(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def _padded(
    q: Tensor, slots: Slots, chunk: Chunk, variant: Variant, statistics: Statistics, window: Window | None
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
        out[row, :, start:], measured = _prompt(part, slots.row(row), chunk.row(row), variant, statistics, seen)
        if observed and measured:
            observed.slots[row], observed.chunk[row, :, start:] = measured.slots, measured.chunk
    return out, observed


def _prompt(
    q: Tensor, slots: Slots, chunk: Chunk, variant: Variant, statistics: Statistics, window: Window | None
) -> tuple[Tensor, Observed | None]:
    if variant.sliding is None:
        out, lse = flash(q, chunk.keys, chunk.values, scale=variant.scale, causal=True, softcap=variant.softcap)
    else:
        out, lse = sliding_flash(
            q, chunk.keys, chunk.values, scale=variant.scale, sliding=variant.sliding, softcap=variant.softcap
        )
    native = None if variant.sliding is not None else _few_over_slots(q, slots, variant)
    if native is not None:
        out, lse = merge((out, lse), native)
    else:
        for start, stop in slots.blocks(SLOT_BLOCK):
            block = slice(start, stop)
            if variant.sliding is None:
                out, lse = merge((out, lse), _over_slots(q, None, slots, block, variant))
            else:
                out, lse = _merge_in_reach((out, lse), q, slots, chunk, block, variant)
    if variant.sinks is not None:
        total = variant.with_sinks(lse)
        out, lse = out * (lse - total).exp_().unsqueeze(-1), total
    observed = None
    if statistics.kind is Kind.MASS:
        # Of what a window hides only positions tell; without one the order of columns says all.
        observed = column_sums(q, None if variant.sliding is None else chunk.positions, lse, slots, chunk, variant)
    elif statistics.kind is Kind.WINDOW and window is not None:
        width = window.queries.shape[2]
        if width <= q.shape[2]:
            seen = lse[:, :, -width:]
        else:
            # The window's queries from earlier chunks have seen slots that are gone by now: their log-sum-exp over
            # what is left is taken anew.
            seen = variant.with_sinks(log_sum_exp(window.queries, window.positions, slots, chunk, variant))
        observed = column_sums(window.queries, window.positions, seen, slots, chunk, variant)
    return out.to(q.dtype), observed


def _merge_in_reach(
    own: tuple[Tensor, Tensor], q: Tensor, slots: Slots, chunk: Chunk, block: slice, variant: Variant
) -> tuple[Tensor, Tensor]:
    """Merge a sliding layer's attention over a block of slots into that over the chunk, (output, log-sum-exp) each.

    The last token cached is out of sight for all but the first ``sliding`` - 1 of the chunk's queries.
    """
    assert variant.sliding is not None
    out, lse = own[0].float(), own[1]
    reach = min(q.shape[2], variant.sliding - 1)
    for start in range(0, reach, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, reach))
        past = _over_slots(q[:, :, rows], chunk.positions[:, rows], slots, block, variant)
        out[:, :, rows], lse[:, :, rows] = merge((out[:, :, rows], lse[:, :, rows]), past)
    return out, lse


def _few_over_slots(q: Tensor, slots: Slots, variant: Variant) -> tuple[Tensor, Tensor] | None:
    """``_over_slots`` of all slots at once by native kernels; None where they do not serve."""
    batch, heads, n, dim = q.shape
    kv_heads = slots.positions.shape[1]
    if n * heads // kv_heads > cpu.ROWS:
        return None
    queries, shift = query(slots.keys, q.reshape(batch, kv_heads, -1, dim))
    native = cpu.attend(queries, shift, slots, variant)
    if native is None:
        return None
    return restore(slots.values, native.out, torch.float32).view(batch, heads, n, -1), native.lse.view(batch, heads, n)


def _over_slots(
    q: Tensor, positions: Tensor | None, slots: Slots, block: slice, variant: Variant
) -> tuple[Tensor, Tensor]:
    """Attention of q over a block of slots alone: output float32 (B, Hq, n, D), log-sum-exp (B, Hq, n).

    ``positions`` are those of q (B, n), for a sliding layer, or None.
    """
    batch, heads, n, dim = q.shape
    kv_heads = slots.positions.shape[1]
    queries, shift = query(slots.keys, q.reshape(batch, kv_heads, -1, dim))
    where = slots.positions[:, :, None, block]
    hidden = where < 0
    if positions is not None and variant.sliding is not None:
        hidden = hidden | (where <= positions[:, None, :, None] - variant.sliding)
        hidden = hidden.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    mask = torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf)
    keys = slots.keys.read(block.start, block.stop).float()
    values = slots.values.read(block.start, block.stop).float()
    if variant.softcap is None:
        out, lse = flash(queries.float(), keys, values, scale=variant.scale, mask=mask)
        lse = lse if shift is None else lse + shift.squeeze(-1) * variant.scale
    else:
        out, lse = flash(
            queries.float(), keys, values, scale=variant.scale, mask=mask, softcap=variant.softcap, shift=shift
        )
    return restore(slots.values, out, torch.float32).view(batch, heads, n, -1), lse.reshape(batch, heads, n)
