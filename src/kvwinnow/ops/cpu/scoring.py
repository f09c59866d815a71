"""Prefill scoring by the native kernels: column sums and log-sum-exps without any queries x keys of logits.

Keys are read where they lie; quantised ones are decoded a block at a time. Equal keys that see the same queries get
bit-equal sums, and no result depends on the number of threads (native/scoring_driver.h says why).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from kvwinnow.ops.cpu import level
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS
from kvwinnow.ops.slots import Chunk, Slots
from kvwinnow.ops.stored_space import query
from kvwinnow.ops.variant import Variant

"""What queries and keys may be, and the number of each in native/scoring.h."""
MOST_DIM = 1024
DECODED = 2048
"""Quantised keys decoded at once."""


class _Arguments(ctypes.Structure):
    """``kvw_scoring`` of native/scoring.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "lse", "shift", "query_positions", "key_positions", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "group", "queries", "keys", "dim")),
        ("q_strides", ctypes.c_int64 * 3),
        ("k_strides", ctypes.c_int64 * 3),
        ("position_strides", ctypes.c_int64 * 2),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("sliding", "q_dtype", "k_dtype", "threads")),
    )


_SUMS = Kernel("kvw_column_sums", ctypes.c_void_p)
_LOG_SUM_EXP = Kernel("kvw_log_sum_exp", ctypes.c_void_p)


def serves(q: Tensor, keys: Tensor, variant: Variant) -> bool:
    """Whether the native kernels take queries (..., D) and keys (..., D) such as these."""
    return (
        q.device.type == keys.device.type == "cpu"
        and q.dtype in FLOATS
        and keys.dtype in FLOATS
        and q.shape[-1] % 16 == 0
        and 0 < q.shape[-1] <= MOST_DIM
        and q.numel() > 0
        and variant.scale > 0
        and (variant.softcap is None or variant.softcap > 0)
        and level.current() is not None
    )


def column_sums(
    q: Tensor, positions: Tensor | None, lse: Tensor, slots: Slots, chunk: Chunk, variant: Variant
) -> Tensor:
    """(B, Hkv, S + n) float32: softmax weights summed over q and the heads of a GQA group.

    Args and what is seen: ``kvwinnow.ops.column_sums.column_sums``.
    """
    options = _options(variant, positions)
    if positions is None:
        positions = _counted(q.shape[2]).expand(q.shape[0], -1)
        slots = Slots(slots.keys, slots.values, slots.positions.clamp(max=0))  # all that is no hole is seen
        places = _counted(chunk.positions.shape[1]).expand(q.shape[0], -1)
    else:
        places = chunk.positions
    sums = [
        torch.ops.kvwinnow.column_sums(queries, keys, lse, shift, positions, where, *options)
        for queries, shift, keys, where in _runs(q, slots, chunk, places)
    ]
    return torch.cat(sums, 2) if sums else lse.new_zeros(*slots.positions.shape[:2], 0)


def log_sum_exp(q: Tensor, positions: Tensor, slots: Slots, chunk: Chunk, variant: Variant) -> Tensor:
    """(B, Hq, m) float32, -inf where a query sees nothing. Args: ``kvwinnow.ops.column_sums.log_sum_exp``."""
    options = _options(variant, positions)
    lse = torch.full(q.shape[:3], -torch.inf)
    for queries, shift, keys, where in _runs(q, slots, chunk, chunk.positions):
        lse = torch.logaddexp(lse, torch.ops.kvwinnow.log_sum_exp(queries, keys, shift, positions, where, *options))
    return lse


def causal_sums(queries: Tensor, keys: Tensor, variant: Variant) -> Tensor:
    """(Hkv, S) float32, summed over queries and the heads of a GQA group. Args: ``kvwinnow.ops.latest.causal_sums``."""
    n, count = queries.shape[0], keys.shape[1]
    where = _counted(count).view(1, 1, -1)
    positions = where[0, :, count - n :]
    q, k, options = queries.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), _options(variant, None)
    lse = variant.with_sinks(torch.ops.kvwinnow.log_sum_exp(q, k, None, positions, where, *options))
    sums: Tensor = torch.ops.kvwinnow.column_sums(q, k, lse, None, positions, where, *options)
    return sums[0]


def _options(variant: Variant, positions: Tensor | None) -> tuple[float, float, int]:
    """Scale, cap and width of the window; without positions nobody can say what a window hides."""
    sliding = None if positions is None else variant.sliding
    return variant.scale, variant.softcap or 0.0, sliding or 0


def _counted(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def _runs(
    q: Tensor, slots: Slots, chunk: Chunk, places: Tensor
) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """Queries, what is added to each product, keys and their positions: of the slots, then of the chunk."""
    batch, kv_heads, count = slots.positions.shape
    if count:
        queries, shift = query(slots.keys, q.reshape(batch, kv_heads, -1, q.shape[-1]))
        queries = queries.view(q.shape)
        shift = None if shift is None else shift.view(q.shape[:3])
        for start, stop in _places(slots):
            yield queries, shift, slots.keys.read(start, stop), slots.positions[:, :, start:stop]
    if chunk.keys.shape[2]:
        yield q, None, chunk.keys, places.unsqueeze(1)


def _places(slots: Slots) -> Iterator[tuple[int, int]]:
    """Ranges of slots that can be read without putting parts together, and at most DECODED where reading decodes."""
    keys, count = slots.keys, slots.positions.shape[2]
    exact = keys.exact.shape[2]
    ends = sorted({min(end, count) for end in (exact, *keys.seams, count)} - {0})
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        size = DECODED if keys.codec.quantises and begin >= exact else end - begin
        for start in range(begin, end, size):
            yield start, min(start + size, end)


# -- the operators ---------------------------------------------------------------------------------


@torch.library.custom_op("kvwinnow::column_sums", mutates_args=(), device_types="cpu")
def _column_sums(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    shift: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    softcap: float,
    sliding: int,
) -> Tensor:
    """(B, Hkv, n) float32: softmax weights summed over queries and the heads of a GQA group.

    Args:
        q: (B, Hq, m, D).
        k: (B, Hkv, n, D).
        lse: (B, Hq, m) float32.
        shift: (B, Hq, m) float32, added to q.k; None: nothing is.
        query_positions: (B, m) int32, negative where there is no query.
        key_positions: (B, Hkv or 1, n) int32, negative where there is no key.
        scale: factor on q.k.
        softcap: bound of the logits; 0: none.
        sliding: how many of the latest positions a query sees, its own included; 0: all.
    """
    out = q.new_empty(k.shape[:3], dtype=torch.float32)
    _call(_SUMS, q, k, (lse, shift, query_positions, key_positions), out, (scale, softcap, sliding))
    return out


@_column_sums.register_fake
def _(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    shift: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    softcap: float,
    sliding: int,
) -> Tensor:
    return q.new_empty(k.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kvwinnow::log_sum_exp", mutates_args=(), device_types="cpu")
def _log_sum_exp(
    q: Tensor,
    k: Tensor,
    shift: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    softcap: float,
    sliding: int,
) -> Tensor:
    """(B, Hq, m) float32, -inf where a query sees nothing. Args: ``_column_sums``."""
    out = q.new_empty(q.shape[:3], dtype=torch.float32)
    _call(_LOG_SUM_EXP, q, k, (None, shift, query_positions, key_positions), out, (scale, softcap, sliding))
    return out


@_log_sum_exp.register_fake
def _(
    q: Tensor,
    k: Tensor,
    shift: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    softcap: float,
    sliding: int,
) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _call(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    beside: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    out: Tensor,
    options: tuple[float, float, int],
) -> None:
    """Fill ``out``; beside queries and keys go ``_column_sums``'s lse to key_positions, and as options what follows."""
    lse, shift, query_positions, key_positions = beside
    q, k, key_positions = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, key_positions))
    lse, shift = (None if x is None else x.float().contiguous() for x in (lse, shift))
    query_positions = query_positions.contiguous()
    held = q, k, lse, shift, query_positions, key_positions, out
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    arguments = _Arguments(
        *(None if x is None else x.data_ptr() for x in held),
        batch,
        kv_heads,
        heads // kv_heads,
        queries,
        keys,
        dim,
        q.stride()[:3],
        k.stride()[:3],
        (key_positions.stride(0), key_positions.stride(1) if key_positions.shape[1] > 1 else 0),
        *options,
        FLOATS[q.dtype],
        FLOATS[k.dtype],
        threads(),
    )
    number = level.current()
    if number is None or not kernel(number, ctypes.addressof(arguments)):
        raise RuntimeError(f"{kernel.name} does not serve these arguments, or there is no memory for its buffers")
