"""A layer's decode step: a new token is stored, and its query attends to everything held."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvwinnow.ops.cpu.step import step
from kvwinnow.ops.reference import attention
from kvwinnow.ops.slots import Slots
from kvwinnow.ops.variant import Variant
from kvwinnow.ops.writing import write_token
from kvwinnow.statistics import MASS, NONE


class Decoded(NamedTuple):
    """What a decode step gives.

    Attributes:
        out: (B, Hq, 1, D), in the queries' dtype.
        slot: (B, Hkv, 1) int64, where the token went.
        weights: (B, Hkv, S) float32, the softmax weights, mean over the query heads of a KV head; None: not asked for.
    """

    out: Tensor
    slot: Tensor
    weights: Tensor | None


def decode(
    q: Tensor,
    slots: Slots,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    variant: Variant,
    mass: Tensor | None = None,
    weigh: bool = False,
) -> Decoded:
    """Store one new token of each row in the first free slot of each KV head, and attend to all slots.

    Args:
        q: (B, Hq, 1, D).
        slots: written to; each KV head must have a free one.
        k: (B, Hkv, 1, D).
        v: (B, Hkv, 1, D).
        positions: (B, 1) int32, the token's own; -1: the row has none, and what is stored for it stays empty.
        variant: how the layer attends.
        mass: (B, Hkv, S) float32, to which the weights of the rows that have a token are added; that of the new
            token's slot begins at nothing.
        weigh: whether the weights are wanted.
    """
    native = step(q, slots, k, v, positions, variant, mass, weigh)
    if native is not None and native.out is not None:
        return Decoded(native.out, native.slot, native.weights)
    slot = write_token(slots, k, v, positions) if native is None else native.slot
    out, observed = attention(q, slots, variant=variant, statistics=MASS if weigh or mass is not None else NONE)
    weights = None if observed is None else observed.slots
    if mass is not None and weights is not None:
        mass.scatter_(2, slot, 0.0)
        mass += weights.masked_fill(positions.unsqueeze(1) < 0, 0.0)  # a product would keep what is no number
    return Decoded(out, slot, weights if weigh else None)
