"""What transformers asks of a cache beside storing: lengths, masks, rows of beams, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from kvwinnow.errors import CacheStateError
from kvwinnow.integrations.transformers import attachment, mrope
from kvwinnow.integrations.transformers.calls import Seen
from kvwinnow.integrations.transformers.generation import Generation, plan
from kvwinnow.integrations.transformers.structure import Structure
from kvwinnow.integrations.transformers.unwrap import refuse_learnt_prompts


class CacheInterface(Cache):
    """The methods of transformers' ``Cache`` that say what a ``CompressedCache`` is and has seen."""

    structure: Structure
    _seen: Seen
    _declared: tuple[int, ...] | None
    _generation: Generation | None
    _next_rows: tuple[int, ...] | None

    _noticed: bool
    _model: weakref.ref[PreTrainedModel]
    _called: weakref.WeakSet[nn.Module]

    def _select_rows(self, rows: Sequence[int]) -> None:
        raise NotImplementedError

    # -- generate ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def generation(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around one call of ``generate``: refuse at its start what would fail later, or go wrong in silence."""
        self._begin_generation(model, args, kwargs)
        self._noticed = False
        try:
            yield
        finally:
            # The last order of beams is never taken up, so that every beam which ended there can be continued.
            self._generation = self._next_rows = None

    def _begin_generation(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model is not self._model():
            self._refuse_model(model)
        if self._declared is not None:
            raise CacheStateError("generate is no part of a prompt; call it after the `with cache.prompt(...)` block")
        # PEFT's generate lets its own model prepare the inputs of the one it wraps.
        refuse_learnt_prompts(getattr(model.prepare_inputs_for_generation, "__self__", None))
        self._generation = plan(self._seen, model, args, kwargs)
        self._next_rows = self._generation.rows
        self._seen = dataclasses.replace(self._seen, ended=True)
        if self._seen.columns:
            mrope.remind(model, self._generation.offsets(), model.device)

    def _notice_generation(self) -> None:
        """Look for a ``generate`` that was called with this cache and is not wrapped.

        Python looks up ``model.generate`` before it makes the arguments, and the cache may be made among them; or the
        model is another than the cache's.
        """
        if self._generation is not None and not self._noticed:
            return
        call = attachment.generate_with(self)
        if call is None:
            if self._noticed:  # it has come to its end
                self._generation, self._next_rows, self._noticed = None, None, False
        elif not self._noticed:
            self._begin_generation(call[0], (), call[1])
            self._noticed = True

    def check_dropped(self, decoder: nn.Module, given: dict[str, Any]) -> None:
        """Refuse a ``generate`` that goes on without the cache it was given, as Phi-3 does where LongRoPE switches."""
        seen, mask = self._seen.columns, given.get("attention_mask")
        without = all(given.get(name) is None for name in attachment.CACHE_ARGUMENTS)
        # Other plain calls within generate, such as those of guidance, have masks of their own.
        if decoder in self._called and without and seen and isinstance(mask, Tensor) and mask.shape[-1] == seen + 1:
            raise CacheStateError(
                f"after {seen:,} tokens this model's generate throws its cache away, since its LongRoPE "
                "frequencies change here; let generation end before, or begin with a longer prompt"
            )

    def _refuse_model(self, other: nn.Module) -> NoReturn:
        own = self._model()
        raise CacheStateError(
            f"this CompressedCache was made for another model ({type(own).__name__ if own else 'gone by now'}) and is "
            f"given to a {type(other).__name__}; make one for each: CompressedCache(model, policy)"
        )

    # -- lengths and masks -------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.structure.layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included: what transformers slices inputs and counts positions by."""
        if attachment.running() is not self:
            self._notice_generation()
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
        self._notice_generation()
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
