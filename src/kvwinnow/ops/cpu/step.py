"""A layer's decode step in one native call: the token stored, attended to with all others, the output brought back."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kvwinnow.ops.cpu import attention, quantize
from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS, address
from kvwinnow.ops.slots import Slots
from kvwinnow.ops.variant import Variant

_KERNEL = Kernel("kvw_step", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
_LAYER = struct.Struct("@Pqqii")
_STEP = struct.Struct("@PqqPqqPqqiiiiqPqPPffPPPP")


class Stepped(NamedTuple):
    """What a decode step gives.

    Attributes:
        slot: (B, Hkv, 1) int64, where the token went.
        out: (B, Hq, 1, Dv), in the queries' dtype; None: torch has to attend.
        weights: (B, Hkv, S) float32, the softmax weight of each slot, mean over the queries; None if not asked for.
    """

    slot: Tensor
    out: Tensor | None
    weights: Tensor | None


class _Layer(NamedTuple):
    """Slots as native/step.h has them.

    Attributes:
        packed: the struct Layer.
        segments: what is read, one behind the other.
        dims: of keys and of values.
    """

    packed: bytes
    segments: bytes
    dims: tuple[int, int]


def step(
    q: Tensor, slots: Slots, k: Tensor, v: Tensor, positions: Tensor, variant: Variant, mass: Tensor | None, weigh: bool
) -> Stepped | None:
    """``ops.decode``; None, and nothing done, where torch has to serve."""
    if k.device.type != "cpu" or torch.compiler.is_compiling() or positions.dtype is not torch.int32:
        return None
    level, kinds = current(), (FLOATS.get(q.dtype), FLOATS.get(k.dtype), FLOATS.get(v.dtype))
    if level is None or None in kinds:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):  # the kernels have no derivative
        return None
    strides = q.stride(), k.stride(), v.stride()
    if not strides[0][3] == strides[1][3] == strides[2][3] == 1:
        return None
    layer: _Layer | None = slots.stepping.get([*slots.tensors(), slots.positions], lambda: _layer(slots))
    if layer is None:
        return None
    batch, kv_heads, count = slots.positions.shape
    heads, (dim, value_dim) = q.shape[1], layer.dims
    # Where shapes do not agree torch has the word for it.
    if q.shape != (batch, heads, 1, dim) or heads % kv_heads or positions.shape != (batch, 1):
        return None
    if k.shape != (batch, kv_heads, 1, dim) or v.shape != (batch, kv_heads, 1, value_dim):
        return None
    if mass is not None and not (
        mass.shape == slots.positions.shape and mass.dtype is torch.float32 and mass.is_contiguous()
    ):
        return None
    lowest = None
    if variant.sliding is not None:  # the token that is new has the highest position
        lowest = torch.maximum(slots.positions.amax(-1), positions).sub_(variant.sliding).clamp_(min=-1).contiguous()
    sinks = None if variant.sinks is None else variant.sinks.to("cpu", torch.float32).contiguous()
    if sinks is not None and sinks.numel() != heads:
        return None
    slot = slots.positions.new_empty(batch, kv_heads, 1, dtype=torch.int64)
    out = q.new_empty(batch, heads, 1, value_dim)
    weights = q.new_empty(batch, kv_heads, count, dtype=torch.float32) if weigh else None
    packed = _STEP.pack(
        *(q.data_ptr(), *strides[0][:2], k.data_ptr(), *strides[1][:2], v.data_ptr(), *strides[2][:2]),
        *(*kinds, threads(), heads // kv_heads, positions.data_ptr(), positions.stride(0)),
        *(address(lowest), address(sinks), variant.scale, variant.softcap or 0.0),
        *(slot.data_ptr(), out.data_ptr(), address(weights), address(mass)),
    )
    code = _KERNEL.code(level, layer.packed, layer.segments, packed)
    if code < 0:
        return None
    return Stepped(slot, None if code else out, weights)


def _layer(slots: Slots) -> _Layer | None:
    strides = slots.positions.stride()
    if strides[2] != 1:
        return None
    sides, segments = quantize.sides_of(slots), attention.segments_of(slots)
    if sides is None or segments is None or segments.slots != slots.positions.shape[2]:
        return None
    packed = b"".join(
        (
            *(quantize.NO_SOURCE + side for side in (sides.keys, sides.values)),
            quantize.places_of_token(slots.positions, sides),
            _LAYER.pack(slots.positions.data_ptr(), strides[0], strides[1], segments.pieces, 0),
        )
    )
    return _Layer(packed, segments.packed, (slots.keys.exact.shape[3], slots.values.exact.shape[3]))
