"""Vectors into stored space and back: queries that are rotated like keys, outputs rotated like values."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS

MOST_DIM = 512

_KERNEL = Kernel("kvw_rotate", ctypes.c_char_p)
_TURN = struct.Struct("@4qiiiiPqqqPPP")


def rotated(x: Tensor, *, mean: Tensor | None = None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
    """``codecs.rotate`` of vectors, and their products with a mean; None where torch has to serve.

    Args:
        x: (B, H, M, D).
        mean: (B, H, D) float32, contiguous, or None.
        dtype: of the result.

    Returns:
        (B, H, M, D), contiguous, and (B, H, M, 1) float32 or None.
    """
    batch, heads, rows, dim = x.shape
    level = current() if x.device.type == "cpu" and not torch.compiler.is_compiling() else None
    if level is None or x.dtype not in FLOATS or dtype not in FLOATS or x.stride(3) != 1 or dim > MOST_DIM:
        return None
    if x.requires_grad and torch.is_grad_enabled():  # the kernels have no derivative
        return None
    out = torch.empty(batch, heads, rows, dim, dtype=dtype)
    products = None if mean is None else torch.empty(batch, heads, rows, 1)
    size = x.element_size()
    turn = _TURN.pack(
        *(batch, heads, rows, dim, FLOATS[x.dtype], FLOATS[dtype], dim & -dim, threads(), x.data_ptr()),
        *(stride * size for stride in x.stride()[:3]),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (mean, out, products)),
    )
    return (out, products) if _KERNEL(level, turn) else None
