"""New keys and values to where they are stored, as they are stored: the native kernels of native/quantize.h."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops.cpu.level import current
from kvwinnow.ops.cpu.library import Kernel, threads
from kvwinnow.ops.cpu.storage import FLOATS, in_rows, kind_of
from kvwinnow.ops.slots import Slots

MOST_DIM = 512

_SIDES = ctypes.c_char_p, ctypes.c_int32  # and how many
_VECTORS = Kernel("kvw_write_vectors", *_SIDES, ctypes.c_char_p, ctypes.c_int32)
_TOKEN = Kernel("kvw_write_token", *_SIDES, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32)
_SOURCE = struct.Struct("@iiPqqqPP")
_STORED = struct.Struct("@iiiiqPqqPqqPqqPqq")
_PLACES = struct.Struct("@8qPPP")
_NEW = struct.Struct("@PqqPqP")
_NOWHERE = (0, 0, 0)


def write_token(slots: Slots, k: Tensor, v: Tensor, positions: Tensor) -> Tensor | None:
    """Store one token of each row in the first empty slot of each KV head; None, and nothing done, where torch has to.

    Args:
        slots: written to.
        k: (B, Hkv, 1, D).
        v: (B, Hkv, 1, D).
        positions: (B, 1) int32, the token's own.

    Returns:
        (B, Hkv, 1) int64, where it went.
    """
    sides = _sides(slots, k, v)
    if sides is None or positions.dtype is not torch.int32:
        return None
    stored, frozen, layout = sides
    if torch.compiler.is_compiling():
        # A graph cannot turn to torch when it runs, so whether the kernels serve is found out now.
        at: Tensor = torch.ops.kvwinnow.write_token(slots.positions, stored, k, v, positions, frozen, layout)
        return at
    return _write_token(slots.positions, stored, k, v, positions, frozen, layout)


def write_vectors(
    slots: Slots, k: Tensor, v: Tensor, count: int, *, rows: Tensor | None, columns: Tensor | None, at: Tensor | None
) -> bool:
    """Store some of (B, Hkv, n, D) keys and values; False where torch has to, and nothing is done.

    Args:
        slots: written to, but their positions.
        k: (B, Hkv, n, D).
        v: (B, Hkv, n, D).
        count: vectors of each KV head, where ``rows`` is None: the first ones of its slots.
        rows: (N,) int64 (batch, head) pair of each vector, counted over B * Hkv.
        columns: int64, of each vector its token; None: the first ``count``.
        at: (N,) int64 slot of each vector, none of the shared ones.
    """
    sides = _sides(slots, k, v)
    level = current()
    if sides is None or level is None:
        return False
    packed = _packed(*sides, k, v)
    if packed is None:
        return False
    held = [None if index is None else index.contiguous() for index in (rows, columns, at)]
    batch, heads, tokens, _ = k.shape
    total = batch * heads * count if rows is None else rows.shape[0]
    edge, tail = sides[2][:2]
    places = _PLACES.pack(
        *(batch, heads, tokens, slots.positions.shape[2], edge, tail, total, max(count, 1)),
        *(0 if index is None else index.data_ptr() for index in held),
    )
    return _VECTORS(level, packed, 2, places, threads())


def _sides(slots: Slots, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor], list[int]] | None:
    """What is written to, what is only read, and how it lies; None where the kernels do not serve.

    Of both sides: the tensors written to are the exact slots and the codec's parts; those read are the mean and the
    tensor scale, where there are any. The layout is the first slot after the exact ones, the first after the shared
    ones, and of each side seven numbers: how slots and exact slots are stored, group, rotation, whether float16 is cut,
    the number of parts, and which of mean and scale are there (bits).
    """
    if k.device.type != "cpu" or current() is None:
        return None
    keys, values = slots.keys, slots.values
    edge, tail = keys.exact.shape[2], keys.tail
    if values.exact.shape[2] != edge or values.tail != tail:
        return None
    stored: list[Tensor] = []
    frozen: list[Tensor] = []
    layout = [edge, tail]
    for side, x in ((keys, k), (values, v)):
        numbers = _numbers(side, x)
        if numbers is None:
            return None
        stored += (side.exact, *side.parts)
        frozen += [tensor for tensor in (side.mean, side.scale) if tensor is not None]
        layout += numbers
    if slots.positions.stride(2) != 1 or not all(map(in_rows, stored)) or not all(x.is_contiguous() for x in frozen):
        return None
    return stored, frozen, layout


def _numbers(side: Vectors, x: Tensor) -> list[int] | None:
    codec, dim = side.codec, x.shape[3]
    kind, exact = kind_of(codec, side.parts[0].dtype), FLOATS.get(side.exact.dtype)
    if kind is None or exact is None or x.dtype not in FLOATS or dim > MOST_DIM:
        return None
    group = dim // side.parts[1].shape[3] if codec.quantises else 0
    cut = not codec.quantises and side.parts[0].dtype is torch.float16
    present = (side.mean is not None) + 2 * (side.scale is not None)
    return [kind, exact, group, dim & -dim if codec.rotates else 0, int(cut), len(side.parts), present]


def _packed(stored: list[Tensor], frozen: list[Tensor], layout: list[int], k: Tensor, v: Tensor) -> bytes | None:
    """Both sides as native/quantize.h has them."""
    packed, first, other = b"", 0, 0
    for x, begin in ((k, 2), (v, 9)):
        kind, exact, group, rotation, cut, parts, present = layout[begin : begin + 7]
        size = x.element_size()
        if x.stride(3) != 1:
            return None
        mean = scale = 0
        if present & 1:
            mean = frozen[other].data_ptr()
            other += 1
        if present & 2:
            scale = frozen[other].data_ptr()
            other += 1
        batch, head, token, _ = x.stride()
        source = _SOURCE.pack(
            FLOATS[x.dtype], rotation, x.data_ptr(), batch * size, head * size, token * size, mean, scale
        )
        places: list[int] = []
        for tensor in stored[first : first + parts + 1]:
            batch, head, _, _ = tensor.stride()
            size = tensor.element_size()
            places += (tensor.data_ptr(), batch * size, head * size)
        places += _NOWHERE * (3 - parts)
        first += parts + 1
        packed += source + _STORED.pack(kind, group, exact, cut, x.shape[3], *places)
    return packed


def _write_token(
    positions: Tensor,
    stored: list[Tensor],
    k: Tensor,
    v: Tensor,
    position: Tensor,
    frozen: list[Tensor],
    layout: list[int],
) -> Tensor | None:
    level = current()
    packed = None if level is None else _packed(stored, frozen, layout, k, v)
    if level is None or packed is None:
        return None
    batch, heads, slots = positions.shape
    at = torch.empty(batch, heads, 1, dtype=torch.int64)
    edge, tail = layout[:2]
    places = _PLACES.pack(batch, heads, 1, slots, edge, tail, 0, 1, 0, 0, 0)
    new = _NEW.pack(
        *(positions.data_ptr(), *positions.stride()[:2], position.data_ptr(), position.stride(0), at.data_ptr())
    )
    return at if _TOKEN(level, packed, 2, places, new, threads()) else None


@torch.library.custom_op("kvwinnow::write_token", mutates_args=("positions", "stored"), device_types="cpu")
def write_token_in_a_graph(
    positions: Tensor,
    stored: list[Tensor],
    k: Tensor,
    v: Tensor,
    position: Tensor,
    frozen: list[Tensor],
    layout: list[int],
) -> Tensor:
    """``write_token`` for graphs: the arguments are those of ``_write_token``; what is not served is an error there.

    Raises:
        RuntimeError: the kernels do not serve these slots, or none is empty.
    """
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    at = _write_token(positions, stored, k, v, position, frozen, layout)
    if at is None:
        raise RuntimeError("kvwinnow's native writing does not serve these slots; set KVWINNOW_CPU_LEVEL=off")
    return at


@write_token_in_a_graph.register_fake
def _(
    positions: Tensor,
    stored: list[Tensor],
    k: Tensor,
    v: Tensor,
    position: Tensor,
    frozen: list[Tensor],
    layout: list[int],
) -> Tensor:
    return positions.new_empty(*positions.shape[:2], 1, dtype=torch.int64)
