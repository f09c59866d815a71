"""Memory is what is allocated: counted whole, predicted exactly, bounded, and given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvwinnow import CompressedCache
from kvwinnow.cache.memory import GROWTH
from tests.models import tiny_model, tiny_tokens
from tests.running import EVICTING, FULL_WIDTH, ROLLING, counts, logits, text, with_budget

DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "fp8-fp4": {"k_dtype": "fp8", "v_dtype": "fp4"},
    "fp4-mx": {"dtype": "fp4:style=mx"},
    "int4-plain": {"dtype": "int4:group=8,rotate=false,centre=false"},
    "int8-int4": {"k_dtype": "int8", "v_dtype": "int4"},
    "bf16-int8": {"k_dtype": "bf16", "v_dtype": "int8"},
}


def tensors_in(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached from a thing, whatever it is made of."""
    if id(thing) in seen or isinstance(thing, type):
        return
    seen.add(id(thing))
    inside: Iterable[object] = ()
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        inside = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inside = thing
    elif dataclasses.is_dataclass(thing):
        inside = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    elif hasattr(thing, "__dict__"):
        inside = vars(thing).values()
    for part in inside:
        yield from tensors_in(part, seen)


def storage_bytes(cache: CompressedCache) -> int:
    """Bytes of all distinct storages that the cache keeps alive."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors_in(cache, set())}
    return sum(storage.nbytes() for storage in storages.values())


def slots(cache: CompressedCache, layer: int = 0) -> int:
    return cache.positions(layer).shape[2]


# -- counted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_nbytes_is_the_sum_of_the_storages_at_every_moment(policy: str, dtypes: dict[str, Any]) -> None:
    model = tiny_model()
    cache = CompressedCache(model, policy, **dtypes)
    assert cache.nbytes() == storage_bytes(cache) == 0
    ids, mask = tiny_tokens(40, 21)
    logits(model, ids, cache, attention_mask=mask)
    assert cache.nbytes() == storage_bytes(cache) > 0
    for seed in range(9):
        logits(model, tiny_tokens(1, 1, seed=seed)[0], cache)
        assert cache.nbytes() == storage_bytes(cache)
    with cache.prompt(length=30):
        for chunk in tiny_tokens(30, 30, seed=1)[0].split(7, dim=1):
            logits(model, chunk, cache)
            assert cache.nbytes() == storage_bytes(cache)
    cache.reset()
    assert cache.nbytes() == storage_bytes(cache) == 0


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_the_report_counts_what_is_held(policy: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, policy, dtype="int4")
    ids, mask = tiny_tokens(90, 60)
    logits(model, ids, cache, attention_mask=mask)
    report = cache.report()
    layers, kv_heads, dim = 2, 2, 16
    assert (report.tokens_seen, report.tokens_kept, report.nbytes) == (90, 24, cache.nbytes())
    assert report.full_nbytes == (90 + 60) * layers * 2 * kv_heads * dim * 2
    assert report.ratio == report.full_nbytes / cache.nbytes()


# -- predicted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize(("budget", "rows"), [(31, 2), (64, 1)])
def test_a_prompt_above_the_budget_takes_the_bytes_foretold(
    name: str, dtypes: dict[str, Any], budget: int, rows: int
) -> None:
    model = tiny_model()
    cache = CompressedCache(model, with_budget(name, budget), **dtypes)
    logits(model, tiny_tokens(*[90] * rows)[0], cache)
    assert counts(cache) == {budget}
    assert cache.budgets.nbytes(budget, rows) == cache.nbytes() == storage_bytes(cache)


@pytest.mark.parametrize("name", EVICTING)
def test_padding_and_chunks_do_not_change_the_bytes_foretold(name: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(90, 50)
    cache = CompressedCache(model, with_budget(name, 40), dtype="int4")
    for end in (30, 60, 90):
        logits(model, ids[:, end - 30 : end], cache, attention_mask=mask[:, :end])
    assert cache.budgets.nbytes(40, 2) == cache.nbytes()


@pytest.mark.parametrize("size", ["26kB", "33000B", "64KiB"])
@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["int4"], DTYPES["int8-int4"]], ids=str)
@pytest.mark.parametrize("name", EVICTING)
def test_a_budget_in_bytes_is_obeyed_and_used_to_the_last_token(name: str, dtypes: dict[str, Any], size: str) -> None:
    limit = {"26kB": 26_000, "33000B": 33_000, "64KiB": 65_536}[size]
    model = tiny_model(trained=2048)
    cache = CompressedCache(model, with_budget(name, size), **dtypes)
    ids, _ = tiny_tokens(1800)
    for chunk in (ids[:, :1000], ids[:, 1000:]):
        logits(model, chunk, cache, logits_to_keep=1)
        assert cache.nbytes() <= limit
    (kept,) = counts(cache)
    assert kept < 1800
    assert cache.budgets.nbytes(kept + 1, 1) > limit


# -- bounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "int4"])
@pytest.mark.parametrize("policy", [*EVICTING.values(), "full"], ids=[*EVICTING, "full"])
def test_no_more_than_a_growth_step_of_slots_stands_empty(policy: str, dtype: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, policy, dtype=dtype)
    spare = GROWTH + (cache.exact if dtype == "int4" else 0)
    for length in (3, 1, 1, 30, 1, 70, 20, *[1] * 40, 9, 31, 1):
        logits(model, tiny_tokens(length, seed=length)[0], cache)
        assert max(counts(cache)) <= slots(cache) <= max(counts(cache)) + spare


@pytest.mark.parametrize(
    ("name", "slack"), [("window", 1), ("streaming", 1), ("h2o", 1), ("h2o-bare", 4), ("hybrid", 3)]
)
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_a_rolling_policy_takes_the_memory_of_its_budget_and_its_slack_and_no_more(
    name: str, slack: int, dtype: str
) -> None:
    model = tiny_model()
    cache = CompressedCache(model, FULL_WIDTH[name], dtype=dtype)
    logits(model, tiny_tokens(60)[0], cache)
    first = cache.nbytes()
    for seed in range(4):
        for token in tiny_tokens(20, seed=seed)[0].split(1, dim=1):
            logits(model, token, cache)
            assert cache.nbytes() == first
            assert slots(cache) == 24 + slack
        logits(model, tiny_tokens(9, seed=seed)[0], cache)
        assert cache.nbytes() == first


@pytest.mark.parametrize("name", ROLLING)
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_decoding_writes_in_place(name: str, dtype: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, FULL_WIDTH[name], dtype=dtype)
    logits(model, tiny_tokens(60)[0], cache)
    logits(model, tiny_tokens(1)[0], cache)  # what observed the prompt is gone
    before = {tensor.data_ptr() for tensor in tensors_in(cache, set())}
    for token in tiny_tokens(30, seed=1)[0].split(1, dim=1):
        logits(model, token, cache)
    assert {tensor.data_ptr() for tensor in tensors_in(cache, set())} == before


def test_the_observing_queries_of_snapkv_go_with_the_first_decode_step() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "snapkv:budget=24,window=8")
    logits(model, tiny_tokens(60)[0], cache)
    before = cache.nbytes()
    logits(model, tiny_tokens(1)[0], cache)
    layers, heads, window, dim, bytes_each = 2, 4, 8, 16, 4
    assert before - cache.nbytes() == layers * heads * window * dim * bytes_each


def test_a_bf16_model_takes_two_bytes_an_element() -> None:
    model = tiny_model().to(torch.bfloat16)
    cache = CompressedCache(model, "streamingllm:budget=63")
    text(model, tiny_tokens(90)[0], cache=cache)
    layers, kv_heads, dim, count = 2, 2, 16, 64
    assert cache.nbytes() == layers * kv_heads * count * (2 * dim * 2 + 4)


def test_a_cache_that_is_gone_leaves_nothing_behind() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    text(model, tiny_tokens(90)[0], cache=cache)
    left = [tensor for module in model.modules() for tensor in tensors_in(vars(module), set())]
    owned = {tensor.data_ptr() for tensor in tensors_in(cache, set())}
    assert owned.isdisjoint(tensor.data_ptr() for tensor in left)
