"""Rows chosen, repeated and dropped in the midst of a stream: each goes on as a cache of its own would have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.cache import LayerCache, Step
from kvwinnow.codecs import parse_codec
from kvwinnow.ops import Variant
from kvwinnow.policies import Phase, parse
from tests.running import FULL_WIDTH
from tests.streams import plain_rope

HEADS, KV_HEADS, DIM = 4, 2, 16

calls = st.one_of(
    st.tuples(st.just("tokens"), st.sampled_from([1, 1, 1, 2, 9, 30])),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 99), min_size=1, max_size=5)),
    st.tuples(st.just("fork"), st.just(0)),
)


def new_tokens(rows: int, n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, n, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def feed(cache: LayerCache, qkv: list[Tensor], seen: list[int], budgets: list[int | None]) -> Tensor:
    """The next tokens of each row, of which ``seen`` came before."""
    n = qkv[0].shape[2]
    positions = torch.tensor(seen, dtype=torch.int32).unsqueeze(1) + torch.arange(n, dtype=torch.int32)
    phase = Phase.DECODE if n == 1 and seen[0] else Phase.PROMPT
    step = Step(phase, positions, (0,) * len(seen), tuple(old + n for old in seen), tuple(budgets))
    return cache.attend(*qkv, step, Variant(DIM**-0.5))


def held(cache: LayerCache, row: int) -> list[list[int]]:
    assert cache.slots is not None
    return [sorted(head[head >= 0].tolist()) for head in cache.slots.positions[row]]


@pytest.mark.parametrize("dtype", ["fp32", "fp4"])
@pytest.mark.parametrize("name", FULL_WIDTH)
@settings(max_examples=6)
@given(stream=st.lists(calls, min_size=1, max_size=8), first=st.sampled_from([20, 30, 45]))
def test_rows_of_a_stream_are_caches_of_their_own(name: str, dtype: str, stream: list[Any], first: int) -> None:
    policy = parse(FULL_WIDTH[name])
    budget = policy.limit if isinstance(policy.limit, int) else None

    def new_cache() -> LayerCache:
        return LayerCache(policy, parse_codec(dtype), parse_codec(dtype), exact=4, rope=plain_rope(DIM))

    together, alone, seen = new_cache(), [new_cache() for _ in range(3)], 0
    for seed, (what, value) in enumerate([("tokens", first), *stream]):
        if what == "rows":
            rows = [row % len(alone) for row in value]
            together.select_rows(rows)
            alone = [copy.deepcopy(alone[row]) for row in rows]
            continue
        if what == "fork":
            together = together.fork()
            continue
        qkv = new_tokens(len(alone), value, seed)
        out = feed(together, qkv, [seen] * len(alone), [budget] * len(alone))
        for row, cache in enumerate(alone):
            own = feed(cache, [x[row : row + 1] for x in qkv], [seen], [budget])
            torch.testing.assert_close(out[row : row + 1], own, rtol=1e-4, atol=1e-4)
            assert held(together, row) == held(cache, 0)
            assert together.kept[row] == cache.kept[0]
        seen += value
    assert together.slots is not None
    assert together.slots.positions.shape[0] == together.slots.keys.exact.shape[0] == len(together.kept) == len(alone)
