"""Greedy tokens in float32 are those of the transformers cache, whatever the steps that vLLM makes of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.conftest import Reference, TinyEngines
from tests.vllm.engines import Ask, Engines

LONG = 1817
"""Tokens of a prompt that ends within a block, and whose last chunk does."""

POLICIES = (
    "snapkv:budget=128",
    "snapkv:budget=256",
    "snapkv:budget=512",
    "streamingllm:budget=256",
    "h2o:budget=256",
    "hybrid:budget=256",
    "compose:budget=256",
    "tova:budget=256",
)
SMOKE = {"snapkv:budget=256", "h2o:budget=256"}

SHORT = 300
MIXED = (
    "snapkv:budget=96",
    None,
    "streamingllm:budget=96",
    "h2o:budget=96",
    "none",
    "compose:budget=96",
    "hybrid:budget=112",
    "tova:budget=96",
)
"""Policies of a batch; two of its requests stay uncompressed."""


@pytest.fixture(scope="module")
def batch(noise: list[int]) -> list[Ask]:
    """Requests of different prompts, lengths and policies."""
    return [Ask(noise[i * 500 : i * 500 + SHORT + 17 * i], policy) for i, policy in enumerate(MIXED)]


@pytest.fixture(scope="module")
def alone(tiny_engines: TinyEngines, batch: list[Ask]) -> list[list[int]]:
    """What each request of the batch is answered when it is alone and its prompt one chunk."""
    engine = tiny_engines()
    texts = [engine.text(ask) for ask in batch]
    assert all(len(set(text)) > 15 for text in texts)  # a text that goes in circles would prove little
    return texts


@pytest.mark.parametrize(
    "policy", [pytest.param(text, marks=[pytest.mark.smoke] if text in SMOKE else []) for text in POLICIES]
)
def test_tokens_are_those_of_the_transformers_cache(
    engines: Engines, transformers_cache: Reference, document: list[int], policy: str
) -> None:
    prompt = document[:LONG]
    assert engines().text(Ask(prompt, policy)) == transformers_cache(prompt, policy)


@pytest.mark.parametrize(
    "policy", ["slidingwindow:budget=96", "keydiff:budget=96", "snapkv:budget=0.3", "compose:prompt=full,budget=96"]
)
def test_so_it_is_with_other_policies(
    tiny_engines: TinyEngines, tiny_cache: Reference, noise: list[int], policy: str
) -> None:
    prompt = noise[:SHORT]
    assert tiny_engines().text(Ask(prompt, policy)) == tiny_cache(prompt, policy)


def test_without_a_policy_tokens_are_those_of_the_whole_cache(
    engines: Engines, transformers_cache: Reference, document: list[int]
) -> None:
    prompt = document[:LONG]
    whole = transformers_cache(prompt, "full")
    assert engines().text(Ask(prompt)) == whole
    assert whole != transformers_cache(prompt, "streamingllm:budget=256")  # else equal tokens would prove little


@pytest.mark.smoke
def test_a_mixed_batch_is_answered_as_its_requests_alone(
    tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]]
) -> None:
    assert tiny_engines().texts(batch[::-1]) == alone[::-1]


def test_each_of_several_answers_is_that_of_a_request_of_its_own(tiny_engines: TinyEngines, batch: list[Ask]) -> None:
    engine = tiny_engines()
    several = [replace(batch[i], n=3, temperature=1.0, seed=7) for i in (0, 3)]
    answers = [answer.texts for answer in engine.run(several)]
    assert answers == [engine.texts([replace(ask, n=1, seed=7 + i) for i in range(3)]) for ask in several]
    assert all(len({tuple(text) for text in texts}) == 3 for texts in answers)


@pytest.mark.parametrize("chunk", [24, 94, 257])
def test_chunks_change_no_token(
    tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]], chunk: int
) -> None:
    """Among them such as end within SnapKV's last 32 queries, and chunks shorter than these."""
    engine = tiny_engines(max_num_batched_tokens=chunk, max_num_seqs=8)
    assert engine.text(batch[0]) == alone[0]  # of its 300 tokens chunks end at 288, at 282 and at 257
    assert engine.texts(batch) == alone


def test_a_small_pool_changes_no_token(tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]]) -> None:
    engine = tiny_engines(num_gpu_blocks_override=34, max_model_len=1024)
    assert engine.texts(batch) == alone


def test_compiled_graphs_change_no_token(tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]]) -> None:
    assert tiny_engines(enforce_eager=False).texts(batch) == alone


def test_the_server_s_own_policy_is_that_of_requests_that_name_none(
    tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]]
) -> None:
    engine = tiny_engines(additional_config={"kvwinnow": {"policy": MIXED[0]}})
    asks = [Ask(batch[0].prompt), Ask(batch[1].prompt, "none"), batch[3]]
    assert engine.texts(asks) == [alone[0], alone[1], alone[3]]
