"""Per-head compaction: of each KV head the slots that an index names."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvwinnow.codecs.vectors import moved
from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_KERNEL = Kernel(
    "kvw_gather_rows",
    *(_POINTER, _SIZE, _SIZE, _SIZE, _SIZE),  # source: batch, head and row strides, rows
    _POINTER,  # index
    *(_POINTER, _SIZE, _SIZE, _SIZE),  # destination: the same strides
    *(_SIZE, _SIZE, _SIZE, _SIZE),  # batch, heads, rows to copy, bytes of a row
    ctypes.c_int32,
)


@torch.library.custom_op("kvwinnow::gather_rows", mutates_args=(), device_types="cpu")
def gather_rows(source: Tensor, index: Tensor, slots: int, fill: float) -> Tensor:
    """Rows of each head in the order of an index, and ``fill`` behind them.

    Args:
        source: (B, Hkv, S) or (B, Hkv, S, D), of any strides.
        index: (B, Hkv, k) int64, rows of ``source``.
        slots: rows of the result; what does not fit is left out.
        fill: what further rows hold.

    Returns:
        (B, Hkv, slots) or (B, Hkv, slots, D), contiguous.

    Raises:
        IndexError or RuntimeError: torch's own, for an index beyond the rows.
    """
    level = current()
    if level is None or index.dtype is not torch.int64 or (source.ndim == 4 and source.stride(3) != 1):
        return moved(source, slots, index, fill)
    count = min(index.shape[2], slots)
    out = source.new_empty((*source.shape[:2], slots, *source.shape[3:]))
    out[:, :, count:] = fill
    served = gather_into(out[:, :, :count], source, index[:, :, :count], level)
    return out if served else moved(source, slots, index, fill)


def gather_into(out: Tensor, source: Tensor, index: Tensor, level: int) -> bool:
    """Write rows ``index`` (B, Hkv, k) of ``source`` into ``out`` (B, Hkv, k, ...); False if an index is none of a row.

    The elements of a row lie side by side in both.
    """
    size, index = source.element_size(), index.contiguous()
    return _KERNEL(
        level,
        source.data_ptr(),
        *(stride * size for stride in source.stride()[:3]),
        source.shape[2],
        index.data_ptr(),
        out.data_ptr(),
        *(stride * size for stride in out.stride()[:3]),
        *out.shape[:3],
        size * (source.shape[3] if source.ndim == 4 else 1),
        threads(),
    )


@gather_rows.register_fake
def _(source: Tensor, index: Tensor, slots: int, fill: float) -> Tensor:
    return source.new_empty((*source.shape[:2], slots, *source.shape[3:]))
