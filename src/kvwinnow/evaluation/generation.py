"""Greedy generation with a cache, streamed and measured."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import TextStreamer

from kvwinnow.errors import KvwinnowError
from kvwinnow.integrations.loading import reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvwinnow.integrations.transformers import CacheReport, CompressedCache

Listener = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """One generated answer and what it cost.

    Attributes:
        text: the answer without special tokens.
        prompt_tokens: length of the prompt.
        new_tokens: tokens generated, the one that ended the answer included.
        first_token_seconds: from the start of the prompt's forward pass until the first token was known.
        decode_seconds: from then until the last token was known.
        report: the cache's figures after the last token.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_seconds: float
    report: CacheReport

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the tokens after the first one; None if there was no other."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None


def encode(tokenizer: PreTrainedTokenizerBase, user: str, *, system: str | None = None) -> Tensor:
    """(1, n) token ids of a user's message in the tokenizer's chat template, or of the plain text if it has none.

    Raises:
        KvwinnowError: the message has no tokens, a system message is given and there is no template for it, or the
            template raises an error.
    """
    template: Any = tokenizer
    if template.chat_template:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": user})
        try:
            ids = template.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: besides what jinja2 raises, anything
            way_out = "correct the template" if system is None else "leave the system message out, or correct it"
            raise KvwinnowError(
                f"the chat template of this model's tokenizer fails: {reason(error)}; {way_out} (chat_template.jinja "
                "or tokenizer_config.json beside the weights)"
            ) from error
    elif system is not None:
        raise KvwinnowError(
            "this model's tokenizer has no chat template, so a system message has no place; leave it out"
        )
    else:
        ids = template(user)["input_ids"]
    if not ids:
        raise KvwinnowError("the prompt has no tokens; give it some text")
    return torch.tensor([ids])


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CompressedCache,
    ids: Tensor,
    *,
    max_new_tokens: int,
    prefill_chunk: int | None = None,
    on_text: Listener | None = None,
) -> Answer:
    """Generate greedily until an end token or ``max_new_tokens``, and measure it.

    The seconds are wall clock of the forward passes and of the choice of tokens, texts passed to ``on_text``
    included. Nothing is warmed up here.

    Args:
        model: a model that the cache was made for.
        tokenizer: the model's.
        cache: empty.
        ids: (1, n) the prompt.
        max_new_tokens: 1 or more.
        prefill_chunk: feed the prompt in pieces of at most this many tokens; None: in one piece.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        KvwinnowError: a token of the prompt is none of the model's.
    """
    check_tokens(model, ids)
    text: Any = _Text(tokenizer, on_text)
    ids = ids.to(model.device)
    start = time.perf_counter()
    times = []
    for token in _tokens(model, cache, ids, end_tokens(model, tokenizer), max_new_tokens, prefill_chunk):
        times.append(time.perf_counter())
        text.put(torch.tensor([token]))
    text.end()
    return Answer(
        text="".join(text.pieces).strip(),
        prompt_tokens=ids.shape[1],
        new_tokens=len(times),
        first_token_seconds=times[0] - start,
        decode_seconds=times[-1] - times[0],
        report=cache.report(),
    )


def check_tokens(model: Any, ids: Tensor) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        KvwinnowError: the largest one is beyond the embedding table.
    """
    known, largest = int(model.get_input_embeddings().num_embeddings), int(ids.max())
    if largest >= known:
        raise KvwinnowError(
            f"the prompt has token id {largest}, and the model's embedding table ends at {known - 1}; this tokenizer "
            "is another model's: put the right one beside the weights"
        )


def _tokens(
    model: PreTrainedModel, cache: CompressedCache, ids: Tensor, ends: set[int], limit: int, chunk: int | None
) -> Iterator[int]:
    logits = _prefill(model, cache, ids, chunk)
    for count in range(1, limit + 1):
        token = int(logits.argmax())
        yield token
        if token in ends or count == limit:
            return
        logits = forward(model, cache, torch.tensor([[token]], device=ids.device))


def _prefill(model: PreTrainedModel, cache: CompressedCache, ids: Tensor, chunk: int | None) -> Tensor:
    length = ids.shape[1]
    with cache.prompt(length=length):
        for piece in torch.split(ids, min(chunk or length, length), dim=1):
            logits = forward(model, cache, piece)
    return logits


@torch.inference_mode()
def forward(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """(vocabulary,) logits of the token after ``ids``; those of the others are never computed."""
    return cast(Tensor, model(ids, **{_cache_argument(model): cache}, logits_to_keep=1).logits[0, -1])


def _cache_argument(model: Any) -> str:
    """``cache`` from transformers 5.24 on, which warns at every use of the older name, ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}


class _Text(TextStreamer):
    """Collects an answer's text and passes it on in pieces that later tokens no longer change."""

    def __init__(self, tokenizer: Any, on_text: Listener | None) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.pieces: list[str] = []
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        if self._on_text is not None and text:
            self._on_text(text)
