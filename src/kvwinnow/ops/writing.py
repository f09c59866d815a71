"""Storing new tokens in slots, as the codecs store them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow.ops.cpu import quantize
from kvwinnow.ops.rows import taken
from kvwinnow.ops.slots import Slots


def write_token(slots: Slots, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Store one new token of each row, and its position, in the first free slot of each KV head; there must be one.

    Args:
        slots: written to.
        k: (B, Hkv, 1, D).
        v: (B, Hkv, 1, D).
        positions: (B, 1) int32, the token's own.

    Returns:
        (B, Hkv, 1) int64, where it went.
    """
    slot = quantize.write_token(slots, k, v, positions)
    if slot is None:
        slot = slots.free().to(torch.uint8).argmax(-1, keepdim=True)
        slots.keys.write_one(slot, k)
        slots.values.write_one(slot, v)
        slots.positions.scatter_(2, slot, positions.unsqueeze(1).expand(-1, k.shape[1], -1))
    return slot


def write_some(slots: Slots, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, places: Tensor) -> None:
    """Store any of a chunk's vectors in any slots; positions are left to the caller.

    Args:
        slots: written to.
        k: (B, Hkv, n, D).
        v: (B, Hkv, n, D).
        rows: (N,) int64 (batch, head) pair of each vector, counted over B * Hkv.
        columns: (N,) int64, which of the chunk's tokens it is of.
        places: (N,) int64 slots, none of the shared ones.
    """
    if not quantize.write_vectors(slots, k, v, 0, rows=rows, columns=columns, at=places):
        slots.keys.write_many(rows, places, k.flatten(0, 1)[rows, columns])
        slots.values.write_many(rows, places, v.flatten(0, 1)[rows, columns])


def write_first(slots: Slots, k: Tensor, v: Tensor, order: Tensor | None) -> None:
    """Store of each KV head the chunk's vectors that an order names in the first slots, none of which is shared.

    Args:
        slots: written to.
        k: (B, Hkv, n, D).
        v: (B, Hkv, n, D).
        order: (B, Hkv, count) int64; None: all of the chunk.
    """
    count = k.shape[2] if order is None else order.shape[2]
    if quantize.write_vectors(slots, k, v, count, rows=None, columns=order, at=None):
        return
    slots.keys.write_first(k if order is None else taken(k, order))
    slots.values.write_first(v if order is None else taken(v, order))
