"""A saved sequence of llama.cpp, made longer, so that a long context is there without computing it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MARK = 8
"""Bytes at the beginning of a saved sequence that say what it is."""
OTHERWISE = "this version of llama.cpp saves a sequence in another way, so its cache cannot be filled"


def stretched(state: NDArray[np.uint8], tokens: int) -> NDArray[np.uint8]:
    """A sequence's saved state with as many tokens as told, whose rows are those of ``state``, repeated.

    Such a state is: a mark of eight bytes; streams, tokens; for each token its position, the number of its sequences
    (one) and that sequence; whether values lie transposed (no), layers; for each layer's keys and then for each layer's
    values: type, bytes of a row, rows.

    Raises:
        RuntimeError: the state is built otherwise.
    """
    place = MARK

    def take(kind: type[np.generic]) -> int:
        nonlocal place
        width = np.dtype(kind).itemsize
        if place + width > state.size:
            raise RuntimeError(OTHERWISE)
        found = int(state[place : place + width].view(kind)[0])
        place += width
        return found

    streams, held = take(np.uint32), take(np.uint32)
    if streams != 1 or place + 12 * held > state.size:
        raise RuntimeError(OTHERWISE)
    cells = state[place : place + 12 * held].view(np.int32).reshape(held, 3)
    place += cells.nbytes
    transposed, layers = take(np.uint32), take(np.uint32)
    if transposed or (cells != cells_of(held)).any():
        raise RuntimeError(OTHERWISE)
    parts = [state[:MARK], words(1, tokens), cells_of(tokens).view(np.uint8).ravel(), words(0, layers)]
    for _ in range(2 * layers):
        head = place
        take(np.int32)
        row = take(np.uint64)
        if place + held * row > state.size:
            raise RuntimeError(OTHERWISE)
        parts.append(state[head:place])
        rows = state[place : place + held * row].reshape(held, row)
        parts.append(np.resize(rows, (tokens, row)).ravel())
        place += held * row
    if place != state.size:
        raise RuntimeError(OTHERWISE)
    return np.concatenate(parts)


def words(*values: int) -> NDArray[np.uint8]:
    return np.array(values, np.uint32).view(np.uint8)


def cells_of(tokens: int) -> NDArray[np.int32]:
    """Position, number of sequences and sequence of each token, (tokens, 3)."""
    return np.stack([np.arange(tokens), np.ones(tokens), np.zeros(tokens)], 1).astype(np.int32)
