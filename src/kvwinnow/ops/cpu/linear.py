"""Products of a few vectors with matrices: a decode step's linear layers, whose weights are read as they lie."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS, address
from kvwinnow.ops.operators import register

MOST_VECTORS = 4
"""With more of them the products take longer than reading the weights does, and torch's are made for that."""

_STEP = 32
"""Widths are multiples of it."""
_KERNEL = Kernel("kvw_linear", ctypes.c_char_p, ctypes.c_char_p)
_LINEAR = struct.Struct("@Pqqiiii")
_MATRIX = struct.Struct("@PqqPP")


def serves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether kernels know ``functional.linear(x, weight, bias)`` by dtypes, devices and shapes."""
    dtype, width = x.dtype, x.shape[-1]
    if dtype not in FLOATS or width % _STEP or not 0 < x.numel() <= MOST_VECTORS * width:
        return False
    if weight.dtype is not dtype or weight.ndim != 2 or weight.shape[1] != width or weight.stride(1) != 1:
        return False
    if bias is not None and (bias.dtype is not dtype or bias.shape != weight.shape[:1] or bias.stride(0) != 1):
        return False
    return x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """``functional.linear`` of the same few vectors with each of some matrices: ``kvwinnow::linear``.

    Args:
        x: (..., K).
        weights: (N, K) each; N may differ.
        biases: (N,) each, or None.

    Returns:
        (..., N) for each matrix, in the dtype of ``x``; sums are taken in float32.
    """
    level = current()
    if level is None or not all(map(serves, [x] * len(weights), weights, biases)):
        return _by_torch(x, weights, biases)
    x, shape, width, size = x.contiguous(), x.shape[:-1], x.shape[-1], x.element_size()
    made, matrices = [], b""
    for weight, bias in zip(weights, biases, strict=True):
        count, out = weight.shape[0], x.new_empty(*shape, weight.shape[0])
        matrices += _MATRIX.pack(weight.data_ptr(), weight.stride(0) * size, count, address(bias), out.data_ptr())
        made.append(out)
    call = _LINEAR.pack(x.data_ptr(), x.numel() // width, width, FLOATS[x.dtype], threads(), len(made), 0)
    return made if _KERNEL(level, call, matrices) else _by_torch(x, weights, biases)


def _by_torch(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _shapes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


register(linear, _shapes, key="CPU")
