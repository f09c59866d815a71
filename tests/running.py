"""How tests run a model: greedy text, logits of a forward call, and the peak of what torch allocates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from kvwinnow import CompressedCache

CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""The argument by which this transformers takes a cache."""

FULL_WIDTH = {
    "full": "full",
    "window": "slidingwindow:budget=24",
    "streaming": "streamingllm:budget=24",
    "h2o": "h2o:budget=24",
    "h2o-bare": "h2o:budget=24,recent=0,evict_every=4",
    "hybrid": "hybrid:budget=24,evict_every=3",
    "snapkv": "snapkv:budget=24,window=8,kernel=3",
    "snapkv-avg": "snapkv:budget=24,window=8,kernel=5,pool=avg,sinks=0",
    "tova": "tova:budget=24",
    "knorm": "knorm:budget=24,sinks=2,evict_every=2",
    "keydiff": "keydiff:budget=24,recent=4",
    "expected": "expectedattention:budget=24,future=16",
    "compose": "compose:budget=24,prompt=snapkv(window=8,kernel=3),decode=h2o(sinks=4,normalize=age)",
}
"""One or two settings of every policy, by a short name; each that evicts holds 24 tokens per KV head.

PyramidKV, whose layers hold different numbers, has tests of its own.
"""

IN_BLOCKS = {
    "blocks-h2o": "blocks:policy=h2o(budget=24),multiple_of=8",
    "blocks-snapkv": "blocks:policy=snapkv(budget=24,window=8,kernel=3)",
    "blocks-streaming": "blocks:policy=streamingllm(budget=24,evict_every=20)",
    "blocks-compose": "blocks:policy=compose(budget=24,prompt=snapkv(window=8),decode=h2o(sinks=4)),multiple_of=5",
    "blocks-late": "blocks:policy=compose(budget=24,prompt=full,decode=h2o)",
}
"""Policies that evict whole blocks; how many tokens they hold differs from moment to moment."""

EVICTING = {name: text for name, text in FULL_WIDTH.items() if name != "full"}
ROLLING = {name: text for name, text in EVICTING.items() if not name.startswith(("snapkv", "expected"))}


@contextlib.contextmanager
def computing_on(threads: int) -> Iterator[None]:
    """Torch has so many threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_budget(name: str, budget: int | float | str) -> str:
    """The policy of that short name at another budget."""
    return FULL_WIDTH[name].replace("budget=24", f"budget={budget}")


def text(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor | None = None,
    cache: CompressedCache | None = None,
    *,
    tokens: int = 12,
    **options: Any,
) -> list[list[int]]:
    """The ``tokens`` tokens that ``generate`` adds to each row, greedily unless ``options`` say otherwise."""
    given = {} if cache is None else {CACHE: cache}
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": tokens, "do_sample": False, **options}
    out = model.generate(ids, attention_mask=mask, **given, **settings)
    return out[:, ids.shape[1] :].tolist()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: CompressedCache | None = None, **options: Any) -> Tensor:
    """(rows, columns, vocabulary) of one forward call."""
    given = {} if cache is None else {CACHE: cache}
    return model(ids, **given, **options).logits


def held(cache: CompressedCache, layer: int = 0, row: int = 0, head: int = 0) -> list[int]:
    """The positions one KV head holds, sorted."""
    positions = cache.positions(layer)[row, head]
    return sorted(positions[positions >= 0].tolist())


def counts(cache: CompressedCache) -> set[int]:
    """How many tokens the KV heads of all rows and layers hold: one number if they agree."""
    layers = range(len(cache))
    return {int(n) for layer in layers for n in (cache.positions(layer) >= 0).sum(-1).flatten()}


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator held at once during ``run``, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
