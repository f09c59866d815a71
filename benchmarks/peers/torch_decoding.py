"""One greedy generation with a transformers model and a cache, timed alike in every environment that has torch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from contract import WARM_UP, WARM_UP_NEW, Answer, Task, peak_rss
from token_times import Timed, timed
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Kind:
    """What differs from cache to cache.

    Attributes:
        new: an empty cache.
        nbytes: the bytes of a cache.
        nbytes_from: how they are known.
        fill: gives an empty cache as many random tokens as told; None: it cannot be filled.
        around_prompt: what is entered while the prompt is fed.
        positions: whether the model must be told the position of each token, since the cache does not know.
    """

    new: Callable[[], Any]
    nbytes: Callable[[Any], int]
    nbytes_from: str
    fill: Callable[[Any, int], None] | None = None
    around_prompt: Callable[[], AbstractContextManager[Any]] = nullcontext
    positions: bool = False


def loaded(task: Task) -> Any:
    """The model in the format of its weights, after torch has been told its threads."""
    torch.set_num_threads(task.threads)
    warnings.filterwarnings("ignore")
    return AutoModelForCausalLM.from_pretrained(task.model, dtype="auto", local_files_only=True).eval()


def generate(model: Any, kind: Kind, task: Task, version: str) -> Answer:
    """Warm up, then the generation that counts.

    Raises:
        ValueError: the task wants a filled cache, and this kind cannot be filled.
    """
    if task.filled and kind.fill is None:
        raise ValueError(f"{task.setting} cannot be filled")
    warm_up = dataclasses.replace(task, prompt=task.prompt[:WARM_UP], new_tokens=WARM_UP_NEW, filled=False)
    _Generation(model, kind, warm_up).run()
    generation = _Generation(model, kind, task)
    times = generation.run()
    return Answer(
        first_token_s=None if task.filled else times.first,
        decode_tokens_per_s=times.rate,
        peak_rss_bytes=None if task.filled else peak_rss(),
        cache_bytes=kind.nbytes(generation.cache),
        tokens=times.tokens,
        version=version,
        cache_bytes_from=kind.nbytes_from,
    )


class _Generation:
    def __init__(self, model: Any, kind: Kind, task: Task) -> None:
        self.model, self.kind, self.task, self.cache = model, kind, task, kind.new()
        self.seen = 0

    def run(self) -> Timed:
        """All tokens. Of a filled cache the first is a decoded one too, that after the prompt's last token."""
        prompt = self.task.prompt
        if self.task.filled and self.kind.fill is not None:
            with torch.no_grad():
                self.kind.fill(self.cache, len(prompt))
            self.seen = len(prompt)
            return timed(self.task, lambda: self._next(prompt[-1:]), self._following)
        return timed(self.task, lambda: self._first(prompt), self._following)

    def _first(self, prompt: list[int]) -> int:
        with self.kind.around_prompt():
            return self._next(prompt)

    def _following(self, before: int) -> int:
        return self._next([before])

    @torch.inference_mode()
    def _next(self, new: list[int]) -> int:
        """The token after ``new``, which follow what the cache has seen."""
        ids, more = torch.tensor([new]), {}
        if self.kind.positions:
            more["position_ids"] = torch.arange(self.seen, self.seen + len(new)).unsqueeze(0)
        self.seen += len(new)
        logits: Tensor = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **more).logits
        return int(logits[0, -1].argmax())


def random_tokens(model: Any, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer for ``count`` tokens, (1, Hkv, count, D) each, in the model's format."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, count, dim)
    return torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype)


def storages(found: Any) -> int:
    """Bytes of the storages of all tensors in ``found`` and in what it holds, each counted once."""
    sizes: dict[int, int] = {}
    _collect(found, sizes, set())
    return sum(sizes.values())


def _collect(found: Any, sizes: dict[int, int], seen: set[int]) -> None:
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        inner = getattr(found, "__tensor_flatten__", None)
        if inner is not None:  # a tensor made of others, as optimum-quanto's are
            for name in inner()[0]:
                _collect(getattr(found, name), sizes, seen)
            return
        storage = found.untyped_storage()
        if storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    elif isinstance(found, dict):
        for value in found.values():
            _collect(value, sizes, seen)
    elif isinstance(found, list | tuple):
        for value in found:
            _collect(value, sizes, seen)
    elif type(found).__module__.startswith(("transformers.cache_utils", "kvpress")):
        _collect(vars(found), sizes, seen)
