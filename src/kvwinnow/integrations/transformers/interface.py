"""What transformers asks of a cache beside storing: lengths, masks, rows of beams, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from kvwinnow.errors import CacheStateError
from kvwinnow.integrations.transformers import attachment
from kvwinnow.integrations.transformers.calls import Seen
from kvwinnow.integrations.transformers.generation import Generation
from kvwinnow.integrations.transformers.structure import Structure


class CacheInterface(Cache):
    """The methods of transformers' ``Cache`` that say what a ``CompressedCache`` is and has seen."""

    structure: Structure
    _seen: Seen
    _declared: tuple[int, ...] | None
    _generation: Generation | None
    _next_rows: tuple[int, ...] | None

    def _select_rows(self, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return self.structure.layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included: what transformers slices inputs and counts positions by."""
        return self._seen.columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._seen.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.structure.direct and attachment.running() is self:
            return 1, 0  # the mask that such a model builds is not looked at, so let it be small
        return self._seen.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self._seen.tokens) or -1

    @property
    def max_batch_size(self) -> int:
        return self.batch_size

    @property
    def max_cache_len(self) -> int:
        return -1

    @property
    def is_initialized(self) -> bool:
        return self._seen.columns > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.structure.layers

    @property
    def is_linear(self) -> list[bool]:
        return [False] * self.structure.layers

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * self.structure.layers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row r go on with what row ``beam_idx[r]`` holds; called by beam search after every step.

        Inside ``generate`` the rows change places when the next token comes.

        Args:
            beam_idx: (rows,) whole numbers.

        Raises:
            CacheStateError: they are not rows of this cache, or a prompt is being fed.
        """
        self._reorder("reorder_cache", _listed(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order; as ``reorder_cache``, or (rows,) bool.

        Raises:
            CacheStateError: they are not rows of this cache, or a prompt is being fed.
        """
        chosen = isinstance(indices, Tensor) and indices.dtype == torch.bool
        self._reorder("batch_select_indices", _listed(indices.nonzero().flatten() if chosen else indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make ``repeats`` rows of each, side by side.

        Raises:
            CacheStateError: ``repeats`` is no positive number, or a prompt is being fed.
        """
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise CacheStateError(f"batch_repeat_interleave(repeats={repeats!r}) must be a whole number, 1 or more")
        rows = range(len(self._seen.tokens))
        self._reorder("batch_repeat_interleave", [row for row in rows for _ in range(repeats)])

    def _reorder(self, method: str, rows: Any) -> None:
        batch = len(self._seen.tokens)
        if self._declared is not None:
            raise CacheStateError(f"{method} inside `with cache.prompt(...)` mixes rows half fed; call it after it")
        if not batch:
            return
        if not isinstance(rows, list) or not rows or any(type(row) is not int or not 0 <= row < batch for row in rows):
            raise CacheStateError(
                f"{method} was given the rows {rows}, and this cache holds rows 0 to {batch - 1}; give one or more of "
                "them, one-dimensional"
            )
        if self._generation is None:
            self._select_rows(rows)
        else:
            self._next_rows = tuple(rows if self._next_rows is None else (self._next_rows[row] for row in rows))

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("taking tokens back (crop)")

    def activate_past_recording(self) -> None:
        _refuse("assisted generation")

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        _refuse("offloading")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        _refuse("offloading")

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        _refuse("early initialization")


def _listed(rows: Any) -> Any:
    return rows.tolist() if isinstance(rows, Tensor) else rows


def _refuse(what: str) -> NoReturn:
    raise CacheStateError(f"CompressedCache does not support {what}; use greedy search, sampling or beam search")
