"""Queries into the space that keys are stored in, and outputs back from that of values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops.cpu.rotation import rotated


def query(keys: Vectors, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """``keys.query(q)`` of (B, Hkv, M, D): the queries, and (B, Hkv, M, 1) float32 to add to their products or None."""
    native = rotated(q, mean=keys.mean, dtype=torch.float32) if keys.codec.rotates else None
    return keys.query(q) if native is None else native


def restore(values: Vectors, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``values.restore(x)`` of (B, Hkv, M, D), in a dtype."""
    native = rotated(x, dtype=dtype) if values.codec.rotates else None
    return values.restore(x).to(dtype) if native is None else native[0]
