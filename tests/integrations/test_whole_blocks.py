"""``CompressedCache(model, policy, multiple_of=16)``: a real cache that evicts whole blocks of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvwinnow import H2O, CompressedCache, SnapKV, WholeBlocks, parse
from kvwinnow.errors import PolicyError
from tests.integrations.test_memory import storage_bytes
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, IN_BLOCKS, counts, held, logits, text

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

SLACK = {
    "h2o:budget=24": 1,
    "streamingllm:budget=24,evict_every=20": 20,
    "snapkv:budget=24,window=8,kernel=3": None,
    "compose:budget=24,prompt=snapkv(window=8,kernel=3),decode=h2o(sinks=4,evict_every=9)": 9,
}
"""Policies of 24 tokens, and how far decoding runs over it before rounding; None: for ever."""


def test_the_parameter_is_short_for_the_policy() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24", multiple_of=16)
    assert cache.policy == WholeBlocks(H2O(24), 16) == CompressedCache(model, H2O(24), multiple_of=16).policy
    assert cache.policy == CompressedCache(model, str(cache.policy)).policy
    assert cache.report().policy == "blocks:policy=h2o(budget=24,evict_every=1,sinks=0),multiple_of=16"
    assert CompressedCache(model, H2O(24)).policy == H2O(24)


@pytest.mark.parametrize(
    ("policy", "multiple_of", "says"),
    [
        ("h2o", 0, "multiple_of=0 must be a whole number of tokens, 1 or more"),
        ("h2o", 2.0, "multiple_of=2.0 must"),
        ("blocks:multiple_of=8", 16, "in blocks of 8 itself"),
        (1024, 16, r"policy=1024 is a int; give a Policy such as SnapKV\(budget=1024\)"),
    ],
)
def test_what_cannot_be_is_refused(policy: Any, multiple_of: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        CompressedCache(tiny_model(), policy, multiple_of=multiple_of)


@pytest.mark.parametrize(("prompt", "chunk"), [(10, 99), (39, 99), (61, 99), (61, 7), (64, 16)])
@pytest.mark.parametrize("m", [8, 16])
@pytest.mark.parametrize("policy", SLACK)
def test_every_head_keeps_what_the_closed_form_says_at_every_token(
    policy: str, m: int, prompt: int, chunk: int
) -> None:
    model = tiny_model()
    cache = CompressedCache(model, policy, multiple_of=m)
    with cache.prompt(length=prompt):
        for piece in tiny_tokens(prompt)[0].split(chunk, dim=1):
            logits(model, piece, cache)
    gone = m * max(0, (prompt - 24) // m)
    assert counts(cache) == {prompt - gone}
    slack, before = SLACK[policy], set(held(cache))
    for seen in range(prompt + 1, prompt + 60):
        logits(model, torch.tensor([[seen]]), cache)
        rounded = seen if slack is None else m * -(-slack // m)
        assert counts(cache) == {seen - gone - rounded * max(0, (seen - gone - 24) // rounded)}
        assert set(held(cache)) <= before | {seen - 1}  # nothing comes back
        before = set(held(cache))


@pytest.mark.parametrize("policy", SLACK)
def test_blocks_of_one_token_give_the_policys_own_answer(policy: str) -> None:
    model, (ids, mask) = tiny_model(), tiny_tokens(60, 41)
    answers = [text(model, ids, mask, CompressedCache(model, policy, multiple_of=m)) for m in (1, None)]
    assert answers[0] == answers[1]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", IN_BLOCKS.values(), ids=IN_BLOCKS)
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_a_prompt_takes_the_same_bytes_whatever_the_cut_leaves(policy: str, dtype: str) -> None:
    if "prompt=full" in policy:
        policy = "blocks:policy=hybrid(budget=24)"
    model, taken = tiny_model(), set()
    for prompt in range(64, 90, 5):
        cache = CompressedCache(model, policy, dtype=dtype)
        for piece in tiny_tokens(prompt)[0].split(31, dim=1):
            logits(model, piece, cache)
        assert cache.nbytes() == storage_bytes(cache)
        taken.add(cache.nbytes())
    assert taken == {cache.budgets.nbytes(24, 1)}


@pytest.mark.parametrize("policy", ["h2o:budget=40kB", "snapkv:budget=40kB,window=8", "tova:budget=40kB"])
def test_a_budget_in_bytes_is_obeyed_and_used_to_the_last_token(policy: str) -> None:
    model = tiny_model()
    for prompt in (200, 207, 213):
        cache = CompressedCache(model, policy, multiple_of=16)
        logits(model, tiny_tokens(prompt)[0], cache)
        (resolved,) = cache.budgets.state() or []
        assert 0 < min(counts(cache)) - resolved + 1 <= 16
        assert cache.nbytes() <= 40_000 < cache.budgets.nbytes(resolved + 1, 1)


@pytest.mark.parametrize("prompt", [30, 100])
def test_a_prompt_never_takes_more_slots_than_it_has_tokens_for_blocks_however_large(prompt: int) -> None:
    model = tiny_model()
    plain, cache = CompressedCache(model, "full"), CompressedCache(model, "h2o:budget=24", multiple_of=10**9)
    for each in (plain, cache):
        logits(model, tiny_tokens(prompt)[0], each)
    assert [cache.positions(0).shape, counts(cache)] == [plain.positions(0).shape, {prompt}]


# -- copies and files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", IN_BLOCKS.values(), ids=IN_BLOCKS)
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_forks_and_files_go_on_with_the_same_blocks(policy: str, dtype: str, tmp_path: Path) -> None:
    model, ids = tiny_model(), tiny_tokens(61)[0]
    cache = CompressedCache(model, policy, dtype=dtype)
    logits(model, ids[:, :50], cache)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    assert loaded.policy == parse(policy)
    assert loaded.nbytes() == cache.nbytes()
    caches = [cache.fork(), loaded, cache]
    answers = [text(model, ids, None, each, tokens=40) for each in caches]
    assert answers[0] == answers[1] == answers[2]
    assert counts(caches[0]) == counts(caches[1]) == counts(caches[2])
    assert [held(each, 1) for each in caches] == [held(cache, 1)] * 3


def test_beams_and_a_further_turn_keep_whole_blocks() -> None:
    model, ids = tiny_model(), tiny_tokens(61)[0]
    cache = CompressedCache(model, SnapKV(24, window=8), multiple_of=8)
    out = model.generate(ids, max_new_tokens=9, num_beams=3, do_sample=False, **{CACHE: cache})
    assert counts(cache) == {61 + 8 - 32}
    more = torch.cat([out, tiny_tokens(21, seed=5)[0]], dim=1)
    model.generate(more, max_new_tokens=1, do_sample=False, **{CACHE: cache})
    assert counts(cache) == {91 - 64}
