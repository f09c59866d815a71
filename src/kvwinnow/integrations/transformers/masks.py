"""What transformers' masks say: causal, causal within a window, or something that the cache cannot honour."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from kvwinnow.errors import KvwinnowError

BLOCK = 256
"""Queries looked at once, where a mask must be tried to know what it hides."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Transformers' mask functions: from indices of row, head, query and key to whether the query sees the key."""


def window_of(
    mask: MaskFunction, windows: Iterable[int | None], *, rows: int, queries: range, keys: range, device: torch.device
) -> int | None:
    """The window of a causal mask; None: it has none.

    Args:
        mask: the mask, padding aside.
        windows: those it may have.
        rows: number of rows.
        queries: columns that attend.
        keys: columns they attend to.
        device: where the mask's own tensors lie.

    Raises:
        KvwinnowError: the mask is another one: images that see each other in both directions, a prefix, packed
            sequences.
    """
    known, window = _read(mask)
    if known:
        return window
    # Masks made of parts (no image among the tokens, say) may still be causal: look at all they hide.
    left = list(dict.fromkeys([None, *windows]))
    row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    head = torch.zeros_like(row[:1])
    key = torch.arange(keys.start, keys.stop, device=device).view(1, 1, 1, -1)
    for start in range(queries.start, queries.stop, BLOCK):
        query = torch.arange(start, min(start + BLOCK, queries.stop), device=device).view(1, 1, -1, 1)
        seen = mask(row, head, query, key)
        left = [
            window
            for window in left
            if bool((seen == ((key <= query) & (key > query - (window or keys.stop + 1)))).all())
        ]
    if not left:
        raise KvwinnowError(
            "the model masks this prompt in another way than causally (as some do with images, prefixes or packed "
            "sequences, whose tokens see later ones or not all earlier ones), which CompressedCache does not serve; "
            "give text alone, one sequence a row"
        )
    return left[0]


def _read(mask: Any) -> tuple[bool, int | None]:
    """Whether a mask function is one of transformers' plain ones, and its window."""
    if mask is causal_mask_function:
        return True, None
    # Transformers builds a window as and_masks(sliding_window_overlay(window), causal_mask_function).
    if getattr(mask, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return False, None
    window = None
    for part in inspect.getclosurevars(mask).nonlocals.get("mask_functions", ()):
        if getattr(part, "__qualname__", "") == "sliding_window_overlay.<locals>.inner_mask" and window is None:
            window = inspect.getclosurevars(part).nonlocals["sliding_window"]
        elif part is not causal_mask_function:
            return False, None
    return window is not None, window
