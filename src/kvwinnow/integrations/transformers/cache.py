"""CompressedCache: what a user gives to ``model.generate(..., past_key_values=cache)``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from kvwinnow.cache import LayerCache, Step
from kvwinnow.cache.memory import LayerShape
from kvwinnow.codecs import Codec, parse_codec
from kvwinnow.errors import CacheStateError, CodecError, KvwinnowError, PolicyError, UnsupportedModelError
from kvwinnow.integrations.transformers import attachment
from kvwinnow.integrations.transformers.budgets import Budgets, sliding_budget
from kvwinnow.integrations.transformers.calls import Seen, check_call, check_generation, check_trained_length
from kvwinnow.integrations.transformers.report import CacheReport
from kvwinnow.integrations.transformers.structure import inspect_model, text_decoder
from kvwinnow.ops import Variant
from kvwinnow.policies import Phase, Policy, SlidingWindow, parse

EXACT_SLOTS = 4
"""Slots that codecs which quantise leave unquantised, at least: StreamingLLM's four sinks (arXiv 2309.17453)."""


class CompressedCache(Cache):
    """A KV cache for one transformers model that evicts tokens by a policy and stores the others in a codec.

    Give it to ``generate`` or to a forward call as ``past_key_values`` (``cache`` from transformers 5.24 on). It
    arranges the model's attention around these calls only. One cache holds one batch of conversations: further
    prompts on the same cache are further turns, and ``reset()`` makes it ready for others.

    Args:
        model: a loaded transformers model; docs/models.md says which structures are served.
        policy: which tokens stay; a Policy or its text form such as "snapkv:budget=1024".
        dtype: how keys and values are stored: "fp32", "bf16", "fp16", "int8", "int4", "int4:group=32", a torch dtype
            or a Codec. None: the model's own dtype.
        k_dtype: the same for keys alone.
        v_dtype: the same for values alone.

    Raises:
        UnsupportedModelError: the model's structure is not served.
        PolicyError: the policy is unknown or contradicts itself.
        CodecError: the dtype is unknown, does not fit the head dimension, or is given twice.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy | str,
        *,
        dtype: str | torch.dtype | Codec | None = None,
        k_dtype: str | torch.dtype | Codec | None = None,
        v_dtype: str | torch.dtype | Codec | None = None,
    ) -> None:
        if dtype is not None and (k_dtype is not None or v_dtype is not None):
            raise CodecError(
                f"dtype={dtype!r} names both, and k_dtype={k_dtype!r}, v_dtype={v_dtype!r} are given beside it; "
                "give dtype alone, or k_dtype and v_dtype"
            )
        self.structure = inspect_model(model)
        self.policy = parse(policy) if isinstance(policy, str) else policy
        if not isinstance(self.policy, Policy):
            raise PolicyError(
                f"policy={policy!r} is a {type(policy).__name__}; give a Policy such as SnapKV(budget=1024) or its text"
            )
        own = model.dtype if dtype is None else dtype
        self.k_codec = parse_codec(own if k_dtype is None else k_dtype)
        self.v_codec = parse_codec(own if v_dtype is None else v_dtype)
        for codec in (self.k_codec, self.v_codec):
            codec.layout(self.structure.dim)
        sinks, _ = self.policy.protected(1)
        self.exact = max(EXACT_SLOTS, sinks)
        super().__init__(layers=self._new_layers())
        shape = LayerShape(self.structure.heads, self.structure.kv_heads, self.structure.dim, self.exact, model.dtype)
        self.budgets = Budgets(self.policy, (self.k_codec, self.v_codec), shape, self.structure.sliding)
        self._seen = Seen()
        self._step: Step | None = None
        self._declared: tuple[int, ...] | None = None
        self._before_prompt = self._seen
        self._interrupted = False
        self._model = weakref.ref(model)
        decoder = text_decoder(model)
        self._decoder = weakref.ref(decoder)
        # A vision-language model prepares its decoder's masks itself, in the call around it.
        self._called = weakref.WeakSet((decoder, model.base_model))
        attachment.attach(self, model, tuple(self._called))
        windows = {window for window in self.structure.sliding if window is not None}
        if self.policy.limit is not None and None not in self.structure.sliding:
            warnings.warn(
                f"all layers of this model see the latest {max(windows):,} tokens only and keep just these, so "
                f"{self.policy} has nothing to evict",
                stacklevel=2,
            )

    def _new_layers(self) -> list[Any]:
        codecs = (self.k_codec, self.v_codec)
        layers = []
        for window in self.structure.sliding:
            budget = None if window is None else sliding_budget(window)
            policy = self.policy if budget is None else SlidingWindow(budget=budget)
            layers.append(LayerCache(policy, *codecs, exact=self.exact, budget=budget))
        return layers

    # -- what users ask ----------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes allocated for everything the cache holds: the sum of the storages that torch reports."""
        return sum(layer.nbytes() for layer in self._layers())

    def positions(self, layer: int) -> Tensor:
        """Which tokens a layer holds.

        Returns:
            (B, Hkv, S) int32, a copy: each slot's token as its index in its row, padding not counted; -1 = empty.
            S is 0 before the first token.

        Raises:
            CacheStateError: the model has no such layer.
        """
        if not -self.structure.layers <= layer < self.structure.layers:
            raise CacheStateError(f"layer {layer} is none of the model's layers 0 to {self.structure.layers - 1}")
        slots = self._layers()[layer].slots
        if slots is None:
            return torch.empty(0, self.structure.kv_heads, 0, dtype=torch.int32)
        return slots.positions.clone()

    def report(self) -> CacheReport:
        """The cache's contents in figures."""
        per_token = 2 * self.structure.kv_heads * self.structure.dim * torch.bfloat16.itemsize
        sliding = self.structure.sliding
        whole = [layer for layer, window in zip(self._layers(), sliding, strict=True) if window is None]
        held = sum(
            seen if window is None else min(seen, sliding_budget(window))
            for seen in self._seen.tokens
            for window in sliding
        )
        return CacheReport(
            policy=str(self.policy),
            k_dtype=str(self.k_codec),
            v_dtype=str(self.v_codec),
            tokens_seen=max(self._seen.tokens, default=0),
            tokens_kept=max((kept for layer in whole or self._layers() for kept in layer.kept), default=0),
            nbytes=self.nbytes(),
            full_nbytes=held * per_token,
        )

    def reset(self) -> None:
        """Forget everything and give the memory back; the next prompt is as if it were the first.

        Raises:
            CacheStateError: inside ``with cache.prompt(...)``, whose prompt would lose its beginning.
        """
        if self._declared is not None:
            raise CacheStateError("reset() inside `with cache.prompt(...)` loses the prompt's start; call it before")
        for layer in self._layers():
            layer.reset()
        self.budgets.reset()
        self._seen = Seen()
        self._step, self._declared, self._interrupted = None, None, False

    @contextlib.contextmanager
    def prompt(self, length: int | Sequence[int] | Tensor) -> Iterator[CompressedCache]:
        """Declare that the calls inside feed one prompt in chunks, be they of one token.

        Args:
            length: tokens of the whole prompt without padding; for a padded batch one number per row, such as
                ``attention_mask.sum(1)``.

        Raises:
            KvwinnowError: no positive numbers, or in the end not the number of tokens that was fed.
        """
        given = length.tolist() if isinstance(length, Tensor) else length
        lengths = tuple(given) if isinstance(given, Sequence) else (given,)
        if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
            raise KvwinnowError(f"prompt(length={length!r}) must be the prompt's number of tokens, 1 or more, per row")
        if self._declared is not None:
            raise CacheStateError(f"a prompt of {self._declared} tokens is being fed; end its `with` block first")
        check_trained_length(self.structure, max(self._seen.tokens, default=0) + max(lengths))
        before = self._before_prompt = self._seen
        self._declared = lengths
        try:
            yield self
        finally:
            self._declared = None
        batch = len(self._seen.tokens) or len(lengths)
        rows = zip(self._seen.row_tokens(batch), before.row_tokens(batch), strict=True)
        fed = tuple(now - old for now, old in rows)
        if fed != self._per_row(lengths, batch):
            raise KvwinnowError(
                f"prompt(length={length!r}) was declared and {list(fed)} tokens were fed; declare what you feed, since "
                "shares of the prompt follow from it"
            )

    # -- what the attachment calls -----------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, decoder: nn.Module, given: dict[str, Any]) -> Iterator[None]:
        """Around one forward call of the decoder with this cache: plan the step, and see whether it came to its end."""
        if decoder not in self._called:
            self._refuse_model(decoder)
        if self._interrupted:
            raise CacheStateError(
                "an earlier call with this cache was interrupted midway, so its layers differ in what they hold; "
                "call cache.reset() and give the prompt again"
            )
        ids = given.get("input_ids")
        new = check_call(self._seen, self.structure, decoder, given, self._declared)
        decoding = new.columns == 1 and self._declared is None and self._seen.columns > 0
        phase = Phase.DECODE if decoding else Phase.PROMPT
        after = self._seen.after(new, ids, decoding=decoding)
        if not self._seen.columns:
            self.budgets.model_dtype(self._dtype())
        budgets = self.budgets.resolve(phase, self._seen, new, self._totals(new.batch))
        device = ids.device if ids is not None else given["inputs_embeds"].device
        self._step = Step(phase, new.positions(self._seen, device), new.starts, after.tokens, budgets)
        if decoding:
            self._check_beyond_trained_length(max(after.tokens))
        yield
        # Reached only if the model came to its end: an exception leaves the cache marked as interrupted.
        if any(layer.slots is None for layer in self._layers()):
            raise CacheStateError("the model did not pass all its layers through the cache; is use_cache=False set?")
        self._seen, self._step, self._interrupted = after, None, False

    def _dtype(self) -> torch.dtype:
        """The model's dtype now: it may have been moved to another since the cache was made."""
        model = self._model()
        assert model is not None, "a call of the model's decoder keeps the model alive"
        return model.dtype

    def _per_row(self, lengths: tuple[int, ...], batch: int) -> tuple[int, ...]:
        return lengths * batch if len(lengths) == 1 else lengths

    def _totals(self, batch: int) -> tuple[int, ...] | None:
        """For each row, tokens once the declared prompt is complete; None: nothing was declared."""
        if self._declared is None:
            return None
        lengths = self._per_row(self._declared, batch)
        if len(lengths) != batch:
            raise KvwinnowError(f"prompt(length={list(lengths)}) gives {len(lengths)} lengths for {batch} rows")
        return tuple(old + n for old, n in zip(self._before_prompt.row_tokens(batch), lengths, strict=True))

    def _check_beyond_trained_length(self, tokens: int) -> None:
        trained = self.structure.trained_length
        if trained is not None and tokens > trained and self.structure.learned_positions:
            raise KvwinnowError(
                f"generation reaches {tokens:,} tokens, and this model has learned {trained:,} positions and no more; "
                "ask for fewer new tokens, or shorten the prompt"
            )
        if trained is not None and tokens == trained + 1:
            warnings.warn(
                f"generation goes beyond the {trained:,} tokens the model was trained to; expect its text to decay",
                stacklevel=2,
            )

    @property
    def config(self) -> Any:
        """The decoder's configuration, which its attention layers share."""
        decoder = self._decoder()
        assert decoder is not None, "a call of the model's decoder keeps the decoder alive"
        return decoder.config

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

    def check_generate(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse at the start of ``generate`` what would fail later, or go wrong in silence."""
        if model is not self._model():
            self._refuse_model(model)
        check_generation(model, args, kwargs, share=isinstance(self.policy.limit, float))
        inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if self._declared is not None:
            raise CacheStateError("generate is no part of a prompt; call it after the `with cache.prompt(...)` block")
        if isinstance(inputs, Tensor):
            self._seen.check_continues(inputs)
        self._seen = dataclasses.replace(self._seen, ended=True)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's layer: leaves the layer's work for the attention function, which comes next."""
        step = self._step
        if step is None or attachment.running() is not self:
            raise CacheStateError(
                "this CompressedCache was made for another model; make one for each: CompressedCache(model, policy)"
            )
        layer, name = self._layers()[layer_idx], self.structure.names[layer_idx]
        k, v = (self._of_kv_heads(x, step, name) for x in (key_states, value_states))
        self._interrupted = True  # until the call has come to its end

        def attend(q: Tensor, variant: Variant) -> Tensor:
            # Tensors made in inference mode could not be written to by a later call outside it.
            # Under autocast, float32 products would silently be taken in 16 bits.
            plain = torch.autocast(q.device.type, enabled=False)
            with torch.inference_mode(False), torch.no_grad(), plain:
                return layer.attend(q, k, v, step, variant)

        sliding = self.structure.sliding[layer_idx]
        attachment.hand_over(attachment.HandOver(name, sliding, key_states, value_states, attend))
        return key_states, value_states

    def _of_kv_heads(self, x: Tensor, step: Step, name: str) -> Tensor:
        """(B, Hkv, n, D) of a layer's keys or values; some models repeat them for each query head before they cache."""
        rows, columns = step.positions.shape
        kv_heads, group = self.structure.kv_heads, self.structure.heads // self.structure.kv_heads
        wanted = (rows, kv_heads, columns, self.structure.dim)
        if x.shape == (rows, kv_heads * group, columns, self.structure.dim) and group > 1:
            kept = x[:, ::group]
            if self.is_initialized or torch.equal(kept.repeat_interleave(group, 1), x):
                return kept
        if x.shape != wanted:
            raise UnsupportedModelError(
                f"{name} caches tensors of shape {tuple(x.shape)} where its configuration says {wanted} (rows, "
                "key/value heads, new tokens, head dimension); CompressedCache serves no other, see docs/models.md"
            )
        return x

    def __reduce__(self) -> NoReturn:
        raise CacheStateError("a CompressedCache belongs to its model and cannot be pickled; use copy.deepcopy(cache)")

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        model = self._model()
        if model is None:
            raise CacheStateError("the model of this cache is gone, so the cache cannot be copied")
        twin = CompressedCache(model, self.policy, k_dtype=self.k_codec, v_dtype=self.v_codec)
        twin.layers = copy.deepcopy(self.layers, memo)
        twin.budgets = copy.deepcopy(self.budgets, memo)
        twin._seen, twin._interrupted = self._seen, self._interrupted
        return twin

    def _refuse_model(self, other: nn.Module) -> NoReturn:
        own = self._model()
        raise CacheStateError(
            f"this CompressedCache was made for another model ({type(own).__name__ if own else 'gone by now'}) and is "
            f"given to a {type(other).__name__}; make one for each: CompressedCache(model, policy)"
        )

    def _layers(self) -> list[LayerCache]:
        return self.layers  # type: ignore[return-value]

    # -- transformers' Cache interface -------------------------------------------------------------

    def __len__(self) -> int:
        return self.structure.layers

    def __repr__(self) -> str:
        return f"CompressedCache({self.report()})"

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
        _refuse("beam search")

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("taking tokens back (crop)")

    def activate_past_recording(self) -> None:
        _refuse("assisted generation")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("contrastive search")

    def batch_select_indices(self, indices: Tensor) -> None:
        _refuse("contrastive search")

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        _refuse("offloading")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        _refuse("offloading")

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        _refuse("early initialization")


def _refuse(what: str) -> NoReturn:
    raise CacheStateError(f"CompressedCache does not support {what} yet; use greedy search or sampling (num_beams=1)")
