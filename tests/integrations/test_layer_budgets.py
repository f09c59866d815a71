"""PyramidKV in whole models: every layer has its own budget, and their sum is what was asked for."""

from __future__ import annotations

import pytest
import torch

from kvwinnow import CompressedCache, Policy, parse
from tests.models import tiny_model, tiny_tokens
from tests.running import held, logits, text
from tests.test_oracle_models import check_against_masks

PYRAMIDS = {
    "pyramidkv": "pyramidkv:budget=40,window=8,kernel=3,beta=4",
    "composed": "compose:budget=40,prompt=pyramidkv(window=8,kernel=3,beta=4),decode=h2o(sinks=2)",
}
LAYERS = 4


def layer_counts(cache: CompressedCache, row: int = 0) -> list[int]:
    return [len(held(cache, layer, row)) for layer in range(LAYERS)]


def expected(policy: str | Policy, seen: int, budget: int = 40) -> list[int]:
    policy = parse(policy) if isinstance(policy, str) else policy
    return [policy.layer_budget(budget, layer=layer, layers=LAYERS, seen=seen) for layer in range(LAYERS)]


@pytest.mark.parametrize("policy", PYRAMIDS.values(), ids=PYRAMIDS)
def test_each_layer_holds_its_own_budget_and_all_together_the_sum(policy: str) -> None:
    model = tiny_model(layers=LAYERS)
    cache = CompressedCache(model, policy)
    logits(model, tiny_tokens(200)[0], cache)
    # From 70 to 10 by steps of 20, but the least is 12 = 4 sinks and a window of 8: from 68 to 12.
    assert layer_counts(cache) == expected(policy, 200) == [68, 49, 31, 12]
    assert sum(layer_counts(cache)) == LAYERS * 40


@pytest.mark.parametrize("policy", PYRAMIDS.values(), ids=PYRAMIDS)
@pytest.mark.parametrize("length", [5, 39, 40])
def test_a_prompt_within_the_budget_is_not_cut_in_any_layer(policy: str, length: int) -> None:
    model = tiny_model(layers=LAYERS)
    ids, _ = tiny_tokens(length)
    cache = CompressedCache(model, policy)
    assert torch.allclose(logits(model, ids, cache), logits(model, ids), atol=1e-4)
    assert layer_counts(cache) == [length] * LAYERS


def test_a_prompt_a_little_over_the_budget_loses_little_in_every_layer() -> None:
    model = tiny_model(layers=LAYERS)
    cache = CompressedCache(model, PYRAMIDS["pyramidkv"])
    logits(model, tiny_tokens(52)[0], cache)
    assert layer_counts(cache) == [44, 41, 39, 36]


@pytest.mark.parametrize("policy", PYRAMIDS.values(), ids=PYRAMIDS)
def test_chunks_and_turns_end_at_the_layers_budgets(policy: str) -> None:
    model = tiny_model(layers=LAYERS)
    cache = CompressedCache(model, policy)
    seen = 0
    for turn in (30, 30, 60, 1, 25, 1):
        logits(model, tiny_tokens(turn, seed=seen)[0], cache)
        seen += turn
        if turn > 1:
            most = expected(policy, seen)
            assert all(held <= budget for held, budget in zip(layer_counts(cache), most, strict=True))
            assert sum(layer_counts(cache)) <= LAYERS * 40
    if policy.startswith("compose"):
        assert layer_counts(cache) == most


@pytest.mark.parametrize("policy", PYRAMIDS.values(), ids=PYRAMIDS)
def test_a_padded_row_is_cut_as_the_row_alone(policy: str) -> None:
    model = tiny_model(layers=LAYERS)
    ids, mask = tiny_tokens(130, 47, 9)
    cache = CompressedCache(model, policy)
    together = text(model, ids, mask, cache, tokens=10)
    for row, length in enumerate((130, 47, 9)):
        alone = CompressedCache(model, policy)
        assert together[row] == text(model, ids[row : row + 1, -length:], cache=alone, tokens=10)[0]
        assert layer_counts(cache, row) == layer_counts(alone)


@pytest.mark.parametrize(
    "policy", ["pyramidkv:budget=16,window=4,kernel=3,sinks=1,beta=4", "pyramidkv:budget=0.5,window=2"]
)
def test_generation_is_that_of_the_model_under_masks(policy: str) -> None:
    check_against_masks(tiny_model(layers=3), policy, 31, 19, 6)


@pytest.mark.parametrize("policy", PYRAMIDS.values(), ids=PYRAMIDS)
@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
def test_bytes_are_those_foretold(policy: str, dtype: str) -> None:
    model = tiny_model(layers=LAYERS)
    for seen in (52, 200):
        cache = CompressedCache(model, policy, dtype=dtype)
        logits(model, tiny_tokens(seen, seen)[0], cache)
        assert cache.nbytes() == cache.budgets.nbytes(40, 2, seen) <= cache.budgets.nbytes(40, 2)


@pytest.mark.parametrize("size", ["120kB", "200KiB"])
@pytest.mark.parametrize("policy", PYRAMIDS.values(), ids=PYRAMIDS)
def test_a_budget_in_bytes_is_obeyed(policy: str, size: str) -> None:
    limit = {"120kB": 120_000, "200KiB": 200 * 1024}[size]
    model = tiny_model(layers=LAYERS)
    cache = CompressedCache(model, policy.replace("budget=40", f"budget={size}"))
    for chunk in tiny_tokens(500)[0].split(250, dim=1):
        logits(model, chunk, cache)
        # At most a step of 32 slots a layer (of 2 heads, 2 x 16 floats and at most two numbers) is not made use of.
        assert limit - LAYERS * 2 * 33 * (2 * 16 * 4 + 8) - 4 * 2 * 136 <= cache.nbytes() <= limit
