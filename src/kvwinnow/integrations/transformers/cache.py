"""CompressedCache: what a user gives to ``model.generate(..., past_key_values=cache)``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvwinnow.cache import LayerCache, Step
from kvwinnow.cache.memory import LayerShape, exact_slots, sliding_budget
from kvwinnow.codecs import Codec, parse_codec
from kvwinnow.errors import CacheStateError, CodecError, KvwinnowError, PolicyError, UnsupportedModelError
from kvwinnow.integrations.transformers import attachment, mrope, saving
from kvwinnow.integrations.transformers.budgets import Budgets
from kvwinnow.integrations.transformers.calls import NewTokens, Seen, check_call, check_trained_length
from kvwinnow.integrations.transformers.dtypes import attention_dtype, codecs_in
from kvwinnow.integrations.transformers.generation import Generation
from kvwinnow.integrations.transformers.interface import CacheInterface
from kvwinnow.integrations.transformers.report import CacheReport
from kvwinnow.integrations.transformers.rope import find_ropes, lone_token
from kvwinnow.integrations.transformers.structure import Structure, inspect_model, text_decoder
from kvwinnow.integrations.transformers.unwrap import unwrap
from kvwinnow.ops import Rope, Variant
from kvwinnow.ops.cpu import level
from kvwinnow.policies import Phase, Policy, SlidingWindow, WholeBlocks, parse
from kvwinnow.statistics import Kind


class CompressedCache(CacheInterface):
    """A KV cache for one transformers model that evicts tokens by a policy and stores the others in a codec.

    Give it to ``generate`` or to a forward call as ``past_key_values`` (``cache`` from transformers 5.24 on). It
    arranges the model's attention around these calls only. One cache holds one batch of conversations: further
    prompts on the same cache are further turns, and ``reset()`` makes it ready for others.

    Args:
        model: a loaded transformers model, or a PeftModel around one; docs/models.md says which structures are served.
        policy: which tokens stay; a Policy or its text form such as "snapkv:budget=1024".
        dtype: how keys and values are stored: "fp32", "bf16", "fp16", "fp8", "int8", "int4", "int4:group=32", "fp4",
            "fp4:style=mx", a torch dtype or a Codec. None: unquantised, each layer in the dtype of its own keys and
            values.
        k_dtype: the same for keys alone.
        v_dtype: the same for values alone.
        multiple_of: evict whole blocks of that many tokens only, as a paged cache does (vLLM's usual block has 16), so
            that a KV head keeps the budget to budget + multiple_of - 1 tokens; short for the policy ``WholeBlocks``.
            None: the policy as it is.

    Raises:
        UnsupportedModelError: the model's structure is not served.
        PolicyError: the policy is unknown or contradicts itself.
        CodecError: the dtype is unknown, does not fit the head dimension, or is given twice.
        UnsupportedSetupError: KVWINNOW_CPU_LEVEL or KVWINNOW_CPU_LIBRARY asks for what is not there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy | str,
        *,
        dtype: str | torch.dtype | Codec | None = None,
        k_dtype: str | torch.dtype | Codec | None = None,
        v_dtype: str | torch.dtype | Codec | None = None,
        multiple_of: int | None = None,
    ) -> None:
        if dtype is not None and (k_dtype is not None or v_dtype is not None):
            raise CodecError(
                f"dtype={dtype!r} names both, and k_dtype={k_dtype!r}, v_dtype={v_dtype!r} are given beside it; "
                "give dtype alone, or k_dtype and v_dtype"
            )
        model = unwrap(model)
        structure = inspect_model(model)
        policy = parse(policy) if isinstance(policy, str) else policy
        if not isinstance(policy, Policy):
            raise PolicyError(
                f"policy={policy!r} is a {type(policy).__name__}; give a Policy such as SnapKV(budget=1024) or its text"
            )
        policy = policy if multiple_of is None else WholeBlocks(policy, multiple_of)
        follows = (dtype is None and k_dtype is None, dtype is None and v_dtype is None)
        own = model.dtype if dtype is None else dtype
        codecs = (parse_codec(own if k_dtype is None else k_dtype), parse_codec(own if v_dtype is None else v_dtype))
        for codec in codecs:
            codec.layout(structure.dim)
        ropes: list[Rope | None] = [None] * structure.layers
        if policy.statistics(Phase.PROMPT).kind is Kind.QUERIES:
            decoder = text_decoder(model)
            ropes = find_ropes(decoder, len(ropes), structure.trained_length, lone_token(model, decoder), policy.name)
        self._set_up(model, structure, policy, codecs, follows, ropes)
        windows = {window for window in structure.sliding if window is not None}
        if policy.limit is not None and None not in structure.sliding:
            warnings.warn(
                f"all layers of this model see the latest {max(windows):,} tokens only and keep just these, so "
                f"{policy} has nothing to evict",
                stacklevel=2,
            )

    def _set_up(
        self,
        model: PreTrainedModel,
        structure: Structure,
        policy: Policy,
        codecs: tuple[Codec, Codec],
        follows: tuple[bool, bool],
        ropes: list[Rope | None],
    ) -> None:
        """Become an empty cache, of parts that are known to fit."""
        level.current()  # instructions that are asked for and not there are refused now, not in the middle of a prompt
        self.structure, self.policy, self.follows = structure, policy, follows
        self.k_codec, self.v_codec = codecs
        self.exact = exact_slots(policy)
        super().__init__(layers=self._new_layers(ropes))
        shape = LayerShape(structure.heads, structure.kv_heads, structure.dim, self.exact, model.dtype.itemsize)
        self.budgets = Budgets(policy, codecs, shape, structure.sliding)
        self._seen = Seen()
        self._step: Step | None = None
        self._declared: tuple[int, ...] | None = None
        self._before_prompt = self._seen
        self._generation: Generation | None = None
        self._noticed = False
        self._next_rows: tuple[int, ...] | None = None
        self._interrupted = False
        self._forking = threading.Lock()
        self._model = weakref.ref(model)
        decoder = text_decoder(model)
        self._decoder = weakref.ref(decoder)
        self.budgets.follow(self._layer_dtypes(), follows)
        # A vision-language model prepares its decoder's masks itself, in the call around it.
        self._called = weakref.WeakSet((decoder, model.base_model))
        attachment.attach(self, model, tuple(self._called))

    def _new_layers(self, ropes: list[Rope | None]) -> list[Any]:
        codecs, layers = (self.k_codec, self.v_codec), list[Any]()
        sharing, number = self.structure.sliding.count(None), 0
        for window, rope in zip(self.structure.sliding, ropes, strict=True):
            if window is not None:  # keeps its own window, whatever the policy
                budget = sliding_budget(window)
                layers.append(LayerCache(SlidingWindow(budget=budget), *codecs, exact=self.exact, budget=budget))
                continue
            layers.append(LayerCache(self.policy, *codecs, exact=self.exact, layer=number, layers=sharing, rope=rope))
            number += 1
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
        if not isinstance(layer, int) or not -self.structure.layers <= layer < self.structure.layers:
            raise CacheStateError(f"layer {layer!r} is none of the model's layers 0 to {self.structure.layers - 1}")
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
            k_dtype=", ".join(dict.fromkeys(str(layer.k_codec) for layer in self._layers())),
            v_dtype=", ".join(dict.fromkeys(str(layer.v_codec) for layer in self._layers())),
            tokens_seen=max(self._seen.tokens, default=0),
            tokens_kept=max((kept for layer in whole or self._layers() for kept in layer.kept), default=0),
            nbytes=self.nbytes(),
            shared_nbytes=sum(layer.shared_nbytes() for layer in self._layers()),
            full_nbytes=held * per_token,
        )

    def fork(self) -> CompressedCache:
        """Another cache with the same content, which shares the tokens held so far: one document, many questions.

        Neither cache sees what the other is given or evicts from now on, as if it were a ``copy.deepcopy``; but only
        positions, statistics and the few unquantised slots are copied, and later each stores its own new tokens.
        What is shared is freed with the last cache that holds a token of it.

        Raises:
            CacheStateError: a call was interrupted, or a prompt is being fed.
        """
        self._refuse_unfinished("fork()")
        twin = self._twin()
        # Tensors made in inference mode could not be written to by a later call outside it.
        with self._forking, torch.inference_mode(False), torch.no_grad():
            twin.layers = [layer.fork() for layer in self._layers()]  # type: ignore[misc]
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything held to one safetensors file, compressed as it lies in memory.

        The file appears as a whole or not at all: whatever goes wrong, an existing one stays as it was.

        Raises:
            DocumentError: the file cannot be written, or the policy has no text form to find it by.
            CacheStateError: there is nothing to save, a call was interrupted, or a prompt is being fed.
        """
        self._refuse_unfinished("save()")
        saving.save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: PreTrainedModel, *, device: str | torch.device | None = None
    ) -> CompressedCache:
        """A cache as ``save`` wrote it, for the same model. Nothing in the file is executed.

        Args:
            path: the file.
            model: the model it was saved with, in the same dtype, on any device.
            device: where to put the cache; None: where the model's layers are.

        Raises:
            DocumentError: the file is none of ``save``, is damaged, or belongs to another model.
            UnsupportedModelError: the model's structure is not served.
        """
        # As in fork().
        with torch.inference_mode(False), torch.no_grad():
            return saving.load(path, model, device)

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
                f"prompt(length={length!r}) was declared and {', '.join(map(str, fed))} tokens were fed; declare what "
                "you feed (without the last token if generate is to read it), since shares of the prompt follow from it"
            )

    # -- what the attachment calls -----------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, decoder: nn.Module, given: dict[str, Any]) -> Iterator[None]:
        """Around one forward call of the decoder with this cache: plan the step, and see whether it came to its end."""
        if decoder not in self._called:
            self._refuse_model(decoder)
        if self._interrupted:
            self._refuse_interrupted()
        self._notice_generation()
        ids = given.get("input_ids")
        rows = self._next_rows
        seen = self._seen if rows is None else self._seen.select(rows)
        new = check_call(seen, self.structure, decoder, given, self._declared)
        totals = self._totals(seen, new)
        if rows is not None:
            self._select_rows(rows)
            self._next_rows = None
        decoding = new.columns == 1 and totals is None and self._seen.columns > 0
        phase = Phase.DECODE if decoding else Phase.PROMPT
        after = self._seen.after(new, ids, decoding=decoding)
        if not self._seen.columns:
            self.budgets.follow(self._layer_dtypes(), self.follows)
        budgets = self.budgets.resolve(phase, self._seen, new, totals)
        device = ids.device if ids is not None else given["inputs_embeds"].device
        self._step = Step(phase, new.positions(self._seen, device), new.starts, after.tokens, budgets)
        if decoding:
            self._check_beyond_trained_length(max(after.tokens))
        model = self._model()
        if self._generation is None:
            mrope.remind(model, self._seen.offsets, device)
        before = mrope.remembered(model)
        yield
        # Reached only if the model came to its end: an exception leaves the cache marked as interrupted.
        if any(layer.slots is None for layer in self._layers()):
            raise CacheStateError("the model did not pass all its layers through the cache; is use_cache=False set?")
        if not decoding or mrope.remembered(model) is not before:  # to look waits for the device
            after = dataclasses.replace(after, offsets=mrope.offsets(model, new.batch))
        self._seen, self._step, self._interrupted = after, None, False

    def _layer_dtypes(self) -> tuple[torch.dtype, ...]:
        """Each layer's dtype now: the model may have been moved to another since the cache was made."""
        model = self._model()
        assert model is not None, "a call of the model's decoder keeps the model alive"
        attentions = map(model.get_submodule, self.structure.names)
        return tuple(attention_dtype(attention, model.dtype) for attention in attentions)

    def _follow(self, layer: LayerCache, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        """Have an empty layer store what the user left to it in the dtypes that its keys and values come in."""
        if layer.slots is None:
            layer.k_codec, layer.v_codec = codecs_in((self.k_codec, self.v_codec), self.follows, dtypes)

    def _per_row(self, lengths: tuple[int, ...], batch: int) -> tuple[int, ...]:
        return lengths * batch if len(lengths) == 1 else lengths

    def _totals(self, seen: Seen, new: NewTokens) -> tuple[int, ...] | None:
        """For each row, tokens once the prompt being fed is complete; None: nobody declared one."""
        if self._declared is None:
            return None if self._generation is None else self._generation.totals(seen, new)
        lengths = self._per_row(self._declared, new.batch)
        if len(lengths) != new.batch:
            raise KvwinnowError(f"prompt(length={list(lengths)}) gives {len(lengths)} lengths for {new.batch} rows")
        return tuple(old + n for old, n in zip(self._before_prompt.row_tokens(new.batch), lengths, strict=True))

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
    def decoding(self) -> bool:
        """Whether the forward call that runs decodes one token a row."""
        return self._step is not None and self._step.phase is Phase.DECODE

    @property
    def tokens_seen(self) -> tuple[int, ...]:
        """For each row, tokens seen before the forward call that runs, without padding."""
        return self._seen.tokens

    @property
    def config(self) -> Any:
        """The decoder's configuration, which its attention layers share."""
        decoder = self._decoder()
        assert decoder is not None, "a call of the model's decoder keeps the decoder alive"
        return decoder.config

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
        self._follow(layer, (k.dtype, v.dtype))
        self._interrupted = True  # until the call has come to its end

        def attend(q: Tensor, variant: Variant) -> Tensor:
            # Under autocast, float32 products would silently be taken in 16 bits.
            cast = torch.is_autocast_enabled(q.device.type)
            if not cast and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                return layer.attend(q, k, v, step, variant)
            # Tensors made in inference mode could not be written to by a later call outside it.
            plain = torch.autocast(q.device.type, enabled=False) if cast else contextlib.nullcontext()
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
        twin = self._twin()
        with torch.inference_mode(False), torch.no_grad():
            twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def _twin(self) -> CompressedCache:
        """An empty cache that has seen what this one has."""
        model = self._model()
        if model is None:
            raise CacheStateError("the model of this cache is gone, so the cache cannot be copied")
        # What was found out about the model holds for the twin too, and a warning was given once.
        codecs, ropes = (self.k_codec, self.v_codec), [layer.rope for layer in self._layers()]
        twin = CompressedCache.__new__(CompressedCache)
        twin._set_up(model, self.structure, self.policy, codecs, self.follows, ropes)
        twin.budgets = copy.deepcopy(self.budgets)
        twin._seen, twin._interrupted = self._seen, self._interrupted
        return twin

    def _refuse_unfinished(self, what: str) -> None:
        if self._declared is not None:
            raise CacheStateError(f"{what} inside `with cache.prompt(...)` takes a prompt half fed; call it after it")
        if self._interrupted:
            self._refuse_interrupted()

    def _refuse_interrupted(self) -> NoReturn:
        raise CacheStateError(
            "an earlier call with this cache was interrupted midway, so its layers differ in what they hold; "
            "call cache.reset() and give the prompt again"
        )

    def _layers(self) -> list[LayerCache]:
        return self.layers  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"CompressedCache({self.report()})"

    def _select_rows(self, rows: Sequence[int]) -> None:
        if list(rows) == list(range(len(self._seen.tokens))):
            return
        self._interrupted = True  # until all layers hold the same rows
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers():
                layer.select_rows(rows)
        self.budgets.select(rows)
        self._seen, self._interrupted = self._seen.select(rows), False
