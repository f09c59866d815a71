"""Records a trace from a real run with the full cache: a prompt, and what the model says after it, greedily.

Nothing of the model is touched. A policy that never evicts asks a ``CompressedCache`` for the attention that each token
receives; after every step of the trace the sums are read and set to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow.cache.moments import QueryMoments
from kvwinnow.errors import TraceError, UnsupportedModelError
from kvwinnow.evaluation.generation import check_tokens, end_tokens, forward
from kvwinnow.integrations.transformers import CompressedCache
from kvwinnow.integrations.transformers.rope import find_ropes, lone_token
from kvwinnow.integrations.transformers.structure import Structure, inspect_model, text_decoder
from kvwinnow.integrations.transformers.unwrap import unwrap
from kvwinnow.ops import Rope, Variant
from kvwinnow.ops.variant import capped
from kvwinnow.policies import Phase, Policy
from kvwinnow.simulation.token_texts import token_texts
from kvwinnow.simulation.trace import Floats, ModelShape, QueryFacts, Trace, Vectors
from kvwinnow.statistics import MASS, Kind, Statistics

Progress = Callable[[int, int], None]
"""Told after each piece how many tokens have been fed, and of how many at most."""

PIECE = 512
"""Tokens of the prompt fed at once."""
LEAD = 16
"""First tokens whose queries are kept one by one, so that as many of them as a policy wants can be left out."""
FUTURE = 1024
"""Positions after the prompt whose rotations are recorded."""


def record(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    new_tokens: int = 64,
    tokenizer: Any = None,
    name: str | None = None,
    vectors: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Run the model with the full cache and record what each token is paid in attention.

    The steps of the prompt end where its last 1, 2, 4, 8, ... queries begin, so that windows of these lengths can be
    summed exactly. Each generated token is fed and has a step of its own; a token that ends the answer is the last.
    Layers that keep a window of their own are left out.

    Args:
        model: a model that ``CompressedCache`` serves.
        ids: (1, n) the prompt.
        new_tokens: tokens to generate at most, 0 or more.
        tokenizer: the model's, for the tokens' texts; None: these are the tokens' numbers, and no token ends the answer
            but those of the model's generation config.
        name: of the model in the trace; None: what its configuration says.
        vectors: whether to record keys, values and queries too, and each query head's weights while decoding.
        progress: called as the work goes on.

    Raises:
        TraceError: nothing to record: every layer of the model has a window, or the prompt is no single row of tokens.
        KvwinnowError: the model or the prompt is not served.
    """
    model = unwrap(model)
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise TraceError(f"the prompt has shape {tuple(ids.shape)}; a trace is of one row of tokens, (1, n)")
    if new_tokens < 0:
        raise TraceError(f"new_tokens={new_tokens} cannot be generated; give 0 or more")
    check_tokens(model, ids)
    structure = inspect_model(model)
    if None not in structure.sliding:
        windows = [window for window in structure.sliding if window is not None]
        raise TraceError(
            f"every layer of this model sees the latest {max(windows):,} tokens only and keeps just these, so there is "
            "nothing that a policy could evict and nothing to record"
        )
    ropes = _ropes(model, structure) if vectors else None
    recorder = _Recorder(model, structure, ids.shape[1], new_tokens, vectors, ropes)
    texts = recorder.run(ids.to(model.device), _ends(model, tokenizer), progress or (lambda done, total: None))
    shown = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    return recorder.trace(
        tuple(map(str, texts)) if tokenizer is None else token_texts(tokenizer, texts), shown, model.dtype.itemsize
    )


def prompt_steps(prompt: int) -> list[tuple[int, int]]:
    """The queries [first, last) of each step of a prompt: its last one, the one before, the two before, and so on."""
    ends = [prompt - 2**k for k in range(prompt.bit_length(), -1, -1) if 2**k < prompt] + [prompt]
    return list(zip([0, *ends], ends, strict=False))


def nbytes(structure: Structure, prompt: int, new_tokens: int, *, itemsize: int, vectors: bool) -> tuple[int, int]:
    """Bytes of a trace, and of the full cache that is held beside it while it is recorded.

    Args:
        structure: of the model.
        prompt: tokens of the prompt.
        new_tokens: tokens generated at most.
        itemsize: bytes of an element in the model's dtype.
        vectors: whether keys and values are recorded.
    """
    tokens, layers = prompt + new_tokens, structure.sliding.count(None)
    steps = len(prompt_steps(prompt)) + new_tokens
    heads, kv_heads, dim = structure.heads, structure.kv_heads, structure.dim
    trace = (steps + 1) * layers * kv_heads * tokens * 4
    if vectors:
        trace += 2 * layers * kv_heads * tokens * dim * (4 if itemsize == 4 else 2)
        trace += new_tokens * layers * heads * tokens * 4
        trace += layers * heads * (LEAD + dim + 1) * dim * 4
    return trace, layers * kv_heads * tokens * (2 * dim * itemsize + 3 * 4)


@dataclass(frozen=True)
class _Watch(Policy):
    """Keeps everything and has everything measured that is stored for a slot."""

    name: ClassVar[str] = "recorder"

    def statistics(self, phase: Phase) -> Statistics:
        return MASS

    def running(self) -> tuple[Kind, ...]:
        return Kind.MASS, Kind.KEY_NORM


@dataclass
class _Layer:
    """What is seen of one layer beside the cache's own statistics.

    Attributes:
        variant: how it attends.
        lead: queries of the first tokens, their rotation undone.
        moments: of the others of the prompt.
    """

    rope: Rope | None
    variant: Variant | None = None
    lead: list[Tensor] = field(default_factory=list)
    moments: QueryMoments | None = None


class _Recorder:
    def __init__(
        self,
        model: PreTrainedModel,
        structure: Structure,
        prompt: int,
        new_tokens: int,
        vectors: bool,
        ropes: list[Rope | None] | None,
    ) -> None:
        self.model, self.structure, self.prompt, self.limit = model, structure, prompt, prompt + new_tokens
        self.vectors, self.ropes = vectors, ropes
        self.cache = CompressedCache(model, _Watch())
        self.numbers = [layer for layer, window in enumerate(structure.sliding) if window is None]
        self.layers = [self.cache._layers()[number] for number in self.numbers]
        self.seen = [_Layer(None if ropes is None else ropes[number]) for number in self.numbers]
        for index, (layer, seen) in enumerate(zip(self.layers, self.seen, strict=True)):
            self._watch(index, layer, seen)
        self.steps = prompt_steps(prompt)
        heads = structure.kv_heads
        self.mass = np.zeros((len(self.steps) + new_tokens, len(self.layers), heads, self.limit), dtype=np.float32)
        each = (new_tokens if vectors else 0, len(self.layers), structure.heads, self.limit)
        self.head_mass = np.zeros(each, dtype=np.float32)
        self.fed = 0

    def run(self, ids: Tensor, ends: set[int], progress: Progress) -> list[int]:
        """Feed the prompt, then what the model makes of it; return the ids of all tokens fed."""
        tokens: list[int] = ids[0].tolist()
        with self.cache.prompt(length=self.prompt):
            for step, (first, last) in enumerate(self.steps):
                for start in range(first, last, PIECE):
                    logits = self._feed(ids[:, start : min(start + PIECE, last)], progress)
                self._read(step)
        while self.fed < self.limit and not (self.fed > self.prompt and tokens[-1] in ends):
            tokens.append(int(logits.argmax()))
            logits = self._feed(ids.new_tensor([[tokens[-1]]]), progress)
            self._read(len(self.steps))
            self.steps.append((self.fed - 1, self.fed))
        return tokens

    def trace(self, texts: tuple[str, ...], name: str, itemsize: int) -> Trace:
        """What was recorded."""
        norms = [layer.running[Kind.KEY_NORM][0, :, : self.fed] for layer in self.layers]
        shape = ModelShape(
            name=name,
            heads=self.structure.heads,
            kv_heads=self.structure.kv_heads,
            dim=self.structure.dim,
            itemsize=itemsize,
            windows=self.structure.sliding,
            softmax_sinks=any(seen.variant is not None and seen.variant.sinks is not None for seen in self.seen),
        )
        return Trace(
            tokens=texts,
            prompt=self.prompt,
            steps=np.array(self.steps, dtype=np.int32),
            mass=np.ascontiguousarray(self.mass[: len(self.steps), :, :, : self.fed]),
            key_norm=_array(torch.stack([norm.cpu() for norm in norms])),
            vectors=self._vectors(itemsize) if self.vectors else None,
            model=shape,
        )

    def _feed(self, ids: Tensor, progress: Progress) -> Tensor:
        logits = forward(self.model, self.cache, ids)
        self.fed += ids.shape[1]
        progress(self.fed, self.limit)
        return logits

    def _read(self, step: int) -> None:
        """Take what the step's queries paid, and have the sums begin anew."""
        for number, layer in enumerate(self.layers):
            assert layer.slots is not None, "the model has run"
            # Nothing is ever evicted, so tokens lie in the order they came in.
            assert int(layer.slots.positions[0, :, self.fed - 1].min()) == self.fed - 1, "slots in position order"
            sums = layer.running[Kind.MASS]
            self.mass[step, number, :, : self.fed] = _array(sums[0, :, : self.fed])
            sums.zero_()

    def _watch(self, index: int, layer: Any, seen: _Layer) -> None:
        original = layer.attend

        def attend(q: Tensor, k: Tensor, v: Tensor, step: Any, variant: Variant) -> Tensor:
            out: Tensor = original(q, k, v, step, variant)
            seen.variant = variant
            if self.vectors and step.phase is Phase.DECODE:
                weights = _array(_head_weights(q, layer, variant))
                self.head_mass[self.fed - self.prompt, index, :, : weights.shape[1]] = weights
            elif self.vectors and self.ropes is not None:
                self._take_in(q, seen)
            return out

        layer.attend = attend  # of this one object

    def _take_in(self, q: Tensor, seen: _Layer) -> None:
        """Keep the first queries, their rotation undone, and add the others to the moments."""
        n, first = q.shape[2], self.fed
        lead = min(n, max(0, LEAD - first))
        if lead:
            plain = q[0, :, :lead].float()
            if seen.rope is not None:
                plain = seen.rope.undo(plain, torch.arange(first, first + lead, device=q.device))
            seen.lead.append(plain)
        if seen.moments is None:
            seen.moments = QueryMoments(1, q.shape[1], q.shape[3], q.device)
        if lead < n:
            seen.moments.add(0, q[0, :, lead:], first + lead, seen.rope)

    def _vectors(self, itemsize: int) -> Vectors:
        kept = np.float32 if itemsize == torch.float32.itemsize else np.float16
        shape = (len(self.layers), self.structure.kv_heads, self.fed, self.structure.dim)
        keys, values = np.empty(shape, kept), np.empty(shape, kept)
        for index, layer in enumerate(self.layers):
            assert layer.slots is not None, "the model has run"
            keys[index] = _array(layer.slots.keys.unstored()[0, :, : self.fed])
            values[index] = _array(layer.slots.values.unstored()[0, :, : self.fed])
        head_mass = np.ascontiguousarray(self.head_mass[: self.fed - self.prompt, :, :, : self.fed])
        return Vectors(keys, values, head_mass, self._queries())

    def _queries(self) -> QueryFacts | None:
        if self.ropes is None:
            return None
        angles: list[Floats] = []
        tables: list[tuple[int, bool]] = []
        known: dict[int, int] = {}
        places = torch.arange(self.prompt, self.prompt + FUTURE, device=self.layers[0].running[Kind.MASS].device)
        moments, scales = [], []
        for seen in self.seen:
            assert seen.moments is not None, "the model has run"
            assert seen.variant is not None, "the model has run"
            if id(seen.rope) not in known:
                known[id(seen.rope)] = len(angles)
                angles.append(np.zeros((2, FUTURE, 0), np.float32) if seen.rope is None else _turns(seen.rope, places))
            tables.append((known[id(seen.rope)], seen.rope is not None and seen.rope.interleaved))
            moments.append(seen.moments)
            scales.append(seen.variant.scale)
        return QueryFacts(
            lead=np.stack([_array(torch.cat(seen.lead, dim=1)) for seen in self.seen]),
            count=moments[0].counts[0],
            mean=np.stack([_array(moment.mean[0]) for moment in moments]),
            products=np.stack([_array(moment.products[0]) for moment in moments]),
            scale=np.array(scales, dtype=np.float64).astype(np.float32),
            angles=tuple(angles),
            tables=tuple(tables),
        )


def _head_weights(q: Tensor, layer: Any, variant: Variant) -> Tensor:
    """(Hq, tokens) softmax weights that one new query (1, Hq, 1, D) gives to the tokens held, it included."""
    held = layer.slots.positions[0, 0] >= 0
    keys = layer.slots.keys.unstored()[0, :, held]
    logits = q[0].float().view(keys.shape[0], -1, q.shape[3]) @ keys.mT * variant.scale
    logits = capped(logits, variant.softcap).flatten(0, 1)
    if variant.sinks is not None:
        logits = torch.cat([logits, variant.sinks.float().view(-1, 1).to(logits.device)], dim=1)
    return logits.softmax(-1)[:, : keys.shape[1]]


def _ropes(model: PreTrainedModel, structure: Structure) -> list[Rope | None] | None:
    decoder = text_decoder(model)
    try:
        return find_ropes(
            decoder, structure.layers, structure.trained_length, lone_token(model, decoder), "expectedattention"
        )
    except UnsupportedModelError:
        return None  # the trace does without, and whoever asks for it is told


def _turns(rope: Rope, positions: Tensor) -> Floats:
    """(2, n, R) cosines and sines."""
    turns: Floats = _array(torch.stack(rope.angles(positions)))
    return turns


def _ends(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    return end_tokens(model, _NoTokenizer if tokenizer is None else tokenizer)


class _NoTokenizer:
    eos_token_id = None


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()
