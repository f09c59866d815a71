"""New keys and values to where they are stored, as they are stored: the native kernels of native/quantize.h."""

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

_SIDES = ctypes.c_char_p, ctypes.c_int32  # and how many
_VECTORS = Kernel("kvw_write_vectors", *_SIDES, ctypes.c_char_p, ctypes.c_int32)
_TOKEN = Kernel("kvw_write_token", *_SIDES, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32)
_SOURCE = struct.Struct("@iiPqqq")
_STORED = struct.Struct("@6iqPPPqqPqqPqqPqq")
_PLACES = struct.Struct("@8qPPP")
_NEW = struct.Struct("@PqqPqP")
_NOWHERE = (0, 0, 0)
NO_SOURCE = bytes(_SOURCE.size)
"""In place of vectors that are named later."""


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
    level = current() if k.device.type == "cpu" and positions.dtype is torch.int32 else None
    if level is None:
        return None
    if torch.compiler.is_compiling():
        # A graph cannot turn to torch when it runs, so whether the kernels serve is found out now.
        target = _target(slots)
        if target is None or not (_serves(k) and _serves(v)):
            return None
        at: Tensor = torch.ops.kvwinnow.write_token(
            slots.positions, target.stored, k, v, positions, target.frozen, target.layout
        )
        return at
    sides = sides_of(slots)
    return None if sides is None else _write_token(level, slots.positions, sides, k, v, positions)


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
    level = current() if k.device.type == "cpu" else None
    sides = sides_of(slots) if level is not None else None
    packed = None if sides is None else _packed(sides, slots.positions, k, v)
    if level is None or sides is None or packed is None:
        return False
    held = [None if index is None else index.contiguous() for index in (rows, columns, at)]
    batch, heads, tokens, _ = k.shape
    total = batch * heads * count if rows is None else rows.shape[0]
    if any(index is not None and (index.dtype is not torch.int64 or index.numel() != total) for index in held):
        return False
    places = _PLACES.pack(
        *(batch, heads, tokens, slots.positions.shape[2], sides.edge, sides.tail, total, max(count, 1)),
        *map(address, held),
    )
    return _VECTORS(level, packed, 2, places, threads())


class _Target(NamedTuple):
    """Where new vectors go, in words that operators of torch take.

    Attributes:
        stored: of both sides the exact slots and the codec's parts: what is written to.
        frozen: of both sides the mean and the tensor scale, where there are any: what is only read.
        layout: the first slot after the exact ones, the first after the shared ones, and of each side eight numbers:
            how slots and exact slots are stored, group, rotation, whether float16 is cut, the head dimension, the
            number of parts, and which of mean and scale are there (bits).
    """

    stored: list[Tensor]
    frozen: list[Tensor]
    layout: list[int]


class Sides(NamedTuple):
    """The same in native/quantize.h's: keys' and values' targets but for their sources."""

    keys: bytes
    values: bytes
    edge: int
    tail: int
    dims: tuple[int, int]


def _target(slots: Slots) -> _Target | None:
    """None where the kernels do not serve."""
    keys, values = slots.keys, slots.values
    edge, tail = keys.exact.shape[2], keys.tail
    if values.exact.shape[2] != edge or values.tail != tail:
        return None
    stored: list[Tensor] = []
    frozen: list[Tensor] = []
    layout = [edge, tail]
    for side in (keys, values):
        numbers = _numbers(side)
        if numbers is None:
            return None
        stored += (side.exact, *side.parts)
        frozen += [tensor for tensor in (side.mean, side.scale) if tensor is not None]
        layout += numbers
    if not all(map(in_rows, stored)) or not all(x.is_contiguous() for x in frozen):
        return None
    return _Target(stored, frozen, layout)


def sides_of(slots: Slots) -> Sides | None:
    """Where the kernels write; None where they do not serve."""

    def work_out() -> Sides | None:
        target = _target(slots)
        return None if target is None else _packed_sides(*target)

    found: Sides | None = slots.writing.get(slots.tensors(), work_out)
    return found


def _numbers(side: Vectors) -> list[int] | None:
    codec, dim = side.codec, side.exact.shape[3]
    kind, exact = kind_of(codec, side.parts[0].dtype), FLOATS.get(side.exact.dtype)
    if kind is None or exact is None or dim > MOST_DIM:
        return None
    group = dim // side.parts[1].shape[3] if codec.quantises else 0
    cut = not codec.quantises and side.parts[0].dtype is torch.float16
    present = (side.mean is not None) + 2 * (side.scale is not None)
    return [kind, exact, group, dim & -dim if codec.rotates else 0, int(cut), dim, len(side.parts), present]


def _packed_sides(stored: list[Tensor], frozen: list[Tensor], layout: list[int]) -> Sides:
    packed, dims, first, other = [], [], 0, 0
    for begin in (2, 10):
        *numbers, dim, parts, present = layout[begin : begin + 8]
        constants = [0, 0]
        for bit in (0, 1):
            if present >> bit & 1:
                constants[bit] = frozen[other].data_ptr()
                other += 1
        places: list[int] = []
        for tensor in stored[first : first + parts + 1]:
            batch, head, _, _ = tensor.stride()
            size = tensor.element_size()
            places += (tensor.data_ptr(), batch * size, head * size)
        places += _NOWHERE * (3 - parts)
        first += parts + 1
        packed.append(_STORED.pack(*numbers, 0, dim, *constants, *places))
        dims.append(dim)
    return Sides(packed[0], packed[1], layout[0], layout[1], (dims[0], dims[1]))


def _serves(x: Tensor) -> bool:
    return x.dtype in FLOATS and x.stride(3) == 1


def _packed(sides: Sides, positions: Tensor, k: Tensor, v: Tensor) -> bytes | None:
    """Both sides with their sources; ``positions`` are those of the slots."""
    if not (_serves(k) and _serves(v)):
        return None
    shape = (*positions.shape[:2], k.shape[2])
    if (*k.shape[:3], *v.shape[:3]) != shape * 2 or (k.shape[3], v.shape[3]) != sides.dims:
        return None
    return _source(k) + sides.keys + _source(v) + sides.values


def _source(x: Tensor) -> bytes:
    size, (batch, head, token, _) = x.element_size(), x.stride()
    return _SOURCE.pack(FLOATS[x.dtype], 0, x.data_ptr(), batch * size, head * size, token * size)


def _write_token(level: int, positions: Tensor, sides: Sides, k: Tensor, v: Tensor, position: Tensor) -> Tensor | None:
    packed = _packed(sides, positions, k, v)
    strides = positions.stride()
    if packed is None or strides[2] != 1 or k.shape[2] != 1 or position.shape != (positions.shape[0], 1):
        return None
    at = positions.new_empty(*positions.shape[:2], 1, dtype=torch.int64)
    places = places_of_token(positions, sides)
    new = _NEW.pack(
        positions.data_ptr(), strides[0], strides[1], position.data_ptr(), position.stride(0), at.data_ptr()
    )
    return at if _TOKEN(level, packed, 2, places, new, threads()) else None


def places_of_token(positions: Tensor, sides: Sides) -> bytes:
    """Where one token of each row may go; ``positions`` are those of the slots."""
    batch, heads, slots = positions.shape
    return _PLACES.pack(batch, heads, 1, slots, sides.edge, sides.tail, 0, 1, 0, 0, 0)


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
    """``write_token`` for graphs: what is not served is an error there.

    Args:
        positions: those of the slots.
        stored: see ``_Target``.
        k: (B, Hkv, 1, D).
        v: (B, Hkv, 1, D).
        position: (B, 1) int32, the token's own.
        frozen: see ``_Target``.
        layout: see ``_Target``.

    Returns:
        (B, Hkv, 1) int64, where the token went.

    Raises:
        RuntimeError: the kernels do not serve these slots, or none is empty.
    """
    level = current()
    if level is not None:
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        sides = _packed_sides(stored, frozen, layout)
        at = _write_token(level, positions, sides, k, v, position)
        if at is not None:
            return at
    raise RuntimeError("kvwinnow's native writing does not serve these slots; set KVWINNOW_CPU_LEVEL=off")


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
