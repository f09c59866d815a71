"""Moving the slots of each KV head, whatever lies in them."""

from __future__ import annotations

from torch import Tensor

from kvwinnow.codecs import vectors
from kvwinnow.ops.cpu.gather import gather_rows


def taken(tensor: Tensor, order: Tensor) -> Tensor:
    """Of (B, Hkv, n, ...) the rows that ``order`` (B, Hkv, k) int64 names for each head: (B, Hkv, k, ...)."""
    return moved(tensor, order.shape[2], order)


def moved(tensor: Tensor, slots: int, order: Tensor | None, fill: float = 0) -> Tensor:
    """A copy of (B, Hkv, S, ...) with another number of slots: those of ``order`` (B, Hkv, k) first, then ``fill``.

    Without an order all stay in place; what does not fit is left out.
    """
    if order is None or tensor.device.type != "cpu":
        return vectors.moved(tensor, slots, order, fill)
    found: Tensor = gather_rows(tensor, order, slots, fill)
    return found
