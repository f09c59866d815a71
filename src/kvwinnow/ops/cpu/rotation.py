"""Vectors into stored space and back: queries that are rotated like keys, outputs rotated like values."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS, MOST_DIM, address

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
    level = current() if x.device.type == "cpu" and not torch.compiler.is_compiling() else None
    batch, heads, rows, dim = x.shape
    along_batch, along_heads, along_rows, step = x.stride()
    source, made = FLOATS.get(x.dtype), FLOATS.get(dtype)
    if level is None or source is None or made is None or step != 1 or dim > MOST_DIM:
        return None
    if x.requires_grad and torch.is_grad_enabled():  # the kernels have no derivative
        return None
    # By the tensor's own method: a default dtype or device is the user's and must not be seen here.
    out = x.new_empty(x.shape, dtype=dtype)
    products = None if mean is None else x.new_empty(batch, heads, rows, 1, dtype=torch.float32)
    size = x.element_size()
    turn = _TURN.pack(
        *(batch, heads, rows, dim, source, made, dim & -dim, threads()),
        *(x.data_ptr(), along_batch * size, along_heads * size, along_rows * size),
        address(mean),
        out.data_ptr(),
        address(products),
    )
    return (out, products) if _KERNEL(level, turn) else None
