"""Attention of a few queries over slots, whatever they are stored as: the native kernels of native/decode.h."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS, MOST_DIM, address, in_rows, kind_of
from kvwinnow.ops.slots import Slots
from kvwinnow.ops.variant import Variant

ROWS = 128
"""Most queries of one KV head that are served: eight at a time go through the slots."""

_KERNEL = Kernel("kvw_decode", ctypes.c_char_p, ctypes.c_char_p)
_STORAGE = struct.Struct("@iiPqqPqqPqqP")
_RANGE = struct.Struct("@qq")
_CALL = struct.Struct("@6qPPPqqPPffPPPii")


class Attended(NamedTuple):
    """What attention over slots gives.

    Attributes:
        out: (B, Hkv, M, Dv) float32, in the values' stored space; 0 for a query that sees nothing.
        lse: (B, Hkv, M) float32, the log-sum-exp of the logits, softmax sinks included; -inf where that is nothing.
        weights: (B, Hkv, S) float32, the softmax weight of each slot, mean over the queries; empty if not asked for.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor


def attend(
    q: Tensor, shift: Tensor | None, slots: Slots, variant: Variant, *, sinks: bool = False, weigh: bool = False
) -> Attended | None:
    """Softmax(scale (q.k + shift)) v over all occupied slots; None where torch has to serve.

    Args:
        q: (B, Hkv, M, D), in the keys' stored space.
        shift: (B, Hkv, M, 1) float32, or None.
        slots: the cached tokens.
        variant: how the layer attends; with ``sliding``, M are queries of the token at the highest position.
        sinks: whether the softmax's sinks take part; M is the number of query heads of a KV head then.
        weigh: whether the slots' weights are wanted.
    """
    if q.device.type != "cpu" or q.shape[2] > ROWS or slots.positions.shape[2] == 0:
        return None
    level = current()
    if level is None or q.shape[3] != slots.keys.exact.shape[3]:
        return None
    if q.requires_grad and torch.is_grad_enabled():  # the kernels have no derivative
        return None
    lowest = None
    if variant.sliding is not None:
        lowest = slots.positions.amax(-1).sub_(variant.sliding).clamp_(min=-1)
    own = variant.sinks if sinks else None
    sunk = None if own is None else own.to("cpu", torch.float32)
    numbers = (variant.scale, variant.softcap or 0.0, weigh, slots.values.exact.shape[-1])
    if torch.compiler.is_compiling():
        # A graph cannot turn to torch when it runs, so whether the kernels serve is found out now.
        keys, values = _pieces(slots.keys), _pieces(slots.values)
        if keys is None or values is None or keys.counts != values.counts or slots.positions.stride(2) != 1:
            return None
        if not _fits(q.shape[3], keys) or not _fits(slots.values.exact.shape[3], values):
            return None
        tensors, layout = keys.tensors + values.tensors, keys.layout + values.layout
        made = torch.ops.kvwinnow.attend_slots(q, shift, slots.positions, lowest, sunk, tensors, layout, *numbers)
        return Attended(*made)
    segments: Segments | None = slots.reading.get(slots.tensors(), lambda: segments_of(slots))
    served = None if segments is None else _attend(level, q, shift, slots.positions, lowest, sunk, segments, *numbers)
    return None if served is None else Attended(*served)


class Segments(NamedTuple):
    """Slots as native/decode.h has them.

    Attributes:
        packed: the segments, one behind the other.
        pieces: how many.
        slots: how many slots they have.
    """

    packed: bytes
    pieces: int
    slots: int


def segments_of(slots: Slots) -> Segments | None:
    """What the kernels read; None where they do not serve."""
    keys, values = _pieces(slots.keys), _pieces(slots.values)
    if keys is None or values is None or len(keys.counts) != len(values.counts):
        return None
    return _packed(keys.tensors + values.tensors, keys.layout + values.layout)


class _Pieces(NamedTuple):
    """One side of the slots, in order.

    Attributes:
        tensors: of each piece the codes, the scales and the zero points, as far as there are any, and the tensor scale.
        layout: of each piece its kind, the elements that share a scale, and which of the four tensors it has (bits).
        counts: slots of each piece.
    """

    tensors: list[Tensor]
    layout: list[int]
    counts: list[int]


def _pieces(side: Vectors) -> _Pieces | None:
    codec, found = side.codec, _Pieces([], [], [])
    if side.exact.shape[2]:
        kind = FLOATS.get(side.exact.dtype)
        if kind is None:
            return None
        found.tensors.append(side.exact)
        found.layout.extend((kind, 0, 1))
        found.counts.append(side.exact.shape[2])
    for place in (*side.shared, side.parts):
        count = place[0].shape[2]
        if not count:
            continue
        kind = kind_of(side.codec, place[0].dtype)
        if kind is None:
            return None
        group = side.exact.shape[3] // place[1].shape[3] if codec.quantises else 0
        present = (1 << len(place)) - 1
        found.tensors.extend(place)
        if codec.quantises and side.scale is not None:
            found.tensors.append(side.scale)
            present |= 8
        found.layout.extend((kind, group, present))
        found.counts.append(count)
    return found


def _fits(dim: int, side: _Pieces) -> bool:
    """Whether such vectors are served: what ``_packed`` and native/decode_levels.cpp look at."""
    if dim % 16 or dim > MOST_DIM or not all(group == 0 or group >= 16 for group in side.layout[1::3]):
        return False
    parts, scales = ([x for x in side.tensors if (x.ndim == 4) is part] for part in (True, False))
    return all(in_rows(x) for x in parts) and all(x.is_contiguous() for x in scales)


def _attend(  # noqa: PLR0913, PLR0917 - what an operator of torch takes: tensors and numbers, no objects
    level: int,
    q: Tensor,
    shift: Tensor | None,
    positions: Tensor,
    lowest: Tensor | None,
    sinks: Tensor | None,
    segments: Segments,
    scale: float,
    softcap: float,
    weigh: bool,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    batch, kv_heads, rows, dim = q.shape
    slots = positions.shape[2]
    if positions.stride(2) != 1 or segments.slots != slots or positions.shape[:2] != (batch, kv_heads):
        return None
    if sinks is not None and sinks.numel() != kv_heads * rows:
        return None
    q = q.float().contiguous()
    shift = None if shift is None else shift.float().contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    lowest = None if lowest is None else lowest.contiguous()
    out = q.new_empty(batch, kv_heads, rows, value_dim)
    lse = q.new_empty(batch, kv_heads, rows)
    weights = q.new_empty(batch, kv_heads, slots if weigh else 0)
    call = _CALL.pack(
        *(batch, kv_heads, rows, dim, value_dim, slots),
        q.data_ptr(),
        address(shift),
        positions.data_ptr(),
        *positions.stride()[:2],
        address(lowest),
        address(sinks),
        *(scale, softcap),
        *(out.data_ptr(), lse.data_ptr(), weights.data_ptr() if weigh else 0),
        *(segments.pieces, threads()),
    )
    return (out, lse, weights) if _KERNEL(level, call, segments.packed) else None


def _packed(tensors: list[Tensor], layout: list[int]) -> Segments | None:
    """The segments of ``_Pieces``' tensors and layouts, the keys' before the values'.

    None if a head's slots are not next to each other, or keys are not as many as values.
    """
    sides: list[list[bytes]] = [[], []]
    counts: list[list[int]] = [[], []]
    at, half = 0, len(layout) // 2
    for index in range(0, len(layout), 3):
        kind, group, present = layout[index : index + 3]
        side = 0 if index < half else 1
        fields: list[int] = [kind, group]
        for bit in (1, 2, 4):
            if not present & bit:
                fields.extend((0, 0, 0))
                continue
            part = tensors[at]
            at += 1
            if not in_rows(part):
                return None
            size = part.element_size()
            fields.extend((part.data_ptr(), part.stride(0) * size, part.stride(1) * size))
            if bit == 1:
                counts[side].append(part.shape[2])
        fields.append(0)
        if present & 8:
            if not tensors[at].is_contiguous():
                return None
            fields[-1] = tensors[at].data_ptr()
            at += 1
        sides[side].append(_STORAGE.pack(*fields))
    if counts[0] != counts[1]:
        return None
    segments, first = [], 0
    for keys, values, count in zip(*sides, counts[0], strict=True):
        segments.append(keys + values + _RANGE.pack(first, count))
        first += count
    return Segments(b"".join(segments), len(segments), first)


@torch.library.custom_op("kvwinnow::attend_slots", mutates_args=(), device_types="cpu")
def attend_slots(  # noqa: PLR0913, PLR0917
    q: Tensor,
    shift: Tensor | None,
    positions: Tensor,
    lowest: Tensor | None,
    sinks: Tensor | None,
    tensors: list[Tensor],
    layout: list[int],
    scale: float,
    softcap: float,
    weigh: bool,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend`` for graphs: arguments are those of ``_attend`` and ``_packed``; what is not served is an error there.

    Raises:
        RuntimeError: the kernels do not serve these slots.
    """
    level, segments = current(), _packed(tensors, layout)
    served = None
    if level is not None and segments is not None:
        served = _attend(level, q, shift, positions, lowest, sinks, segments, scale, softcap, weigh, value_dim)
    if served is None:
        raise RuntimeError("kvwinnow's native attention does not serve these slots; set KVWINNOW_CPU_LEVEL=off")
    return served


@attend_slots.register_fake
def _(  # noqa: PLR0913, PLR0917
    q: Tensor,
    shift: Tensor | None,
    positions: Tensor,
    lowest: Tensor | None,
    sinks: Tensor | None,
    tensors: list[Tensor],
    layout: list[int],
    scale: float,
    softcap: float,
    weigh: bool,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads, rows, _ = q.shape
    out = q.new_empty(batch, kv_heads, rows, value_dim, dtype=torch.float32)
    lse = q.new_empty(batch, kv_heads, rows, dtype=torch.float32)
    slots = positions.shape[2] if weigh else 0
    return out, lse, q.new_empty(batch, kv_heads, slots, dtype=torch.float32)
