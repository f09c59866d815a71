"""Requests on vLLM's second model runner get the tokens that they get on the first, and from the transformers cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

from tests.vllm.conftest import Reference
from tests.vllm.engines import Ask
from tests.vllm.on_v2 import Events, Run, process

NEW = 16
"""Tokens of an answer, in which both of the policies that evict while decoding cut once more."""
POLICIES = ("snapkv:budget=64", None, "streamingllm:budget=64", "h2o:budget=64")


@pytest.fixture(scope="module")
def second(tiny_folder: str) -> Iterator[Run]:
    """``answers`` of the tiny model on V2."""
    with process() as run:
        yield lambda options, *others: run(
            {"model": tiny_folder, "skip_tokenizer_init": True, "max_num_seqs": 8, **options}, *others
        )


@pytest.fixture(scope="module")
def batch(noise: list[int]) -> list[Ask]:
    """Requests of different prompts, lengths and policies."""
    return [Ask(noise[i * 400 : i * 400 + 150 + 17 * i], policy, NEW) for i, policy in enumerate(POLICIES)]


@pytest.fixture(scope="module")
def expected(batch: list[Ask], tiny_cache: Reference) -> list[list[int]]:
    """What the transformers cache answers."""
    texts = [tiny_cache(ask.prompt, ask.policy or "full", tokens=ask.tokens) for ask in batch]
    whole = [tiny_cache(ask.prompt, "full", tokens=ask.tokens) for ask in batch]
    assert all((text == full) == (ask.policy is None) for text, full, ask in zip(texts, whole, batch, strict=True))
    return texts


def texts(answers: list[Any]) -> list[list[int]]:
    return [answer.texts[0] for answer in answers]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 47},  # chunks of it split SnapKV's window of 32 queries
        {"async_scheduling": True, "max_num_batched_tokens": 94},
        {"enforce_eager": False},
    ],
    ids=["whole prompts", "chunks", "asynchronous", "compiled graphs"],
)
def test_a_mixed_batch(second: Run, batch: list[Ask], expected: list[list[int]], options: dict[str, Any]) -> None:
    assert texts(second(options, batch)) == expected


def test_batches_of_nobody_s_tokens_in_between(second: Run, batch: list[Ask], expected: list[list[int]]) -> None:
    """Their rows are numbered as those of real requests are."""
    assert texts(second({"max_num_batched_tokens": 94}, batch, Events(dummies=True))) == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_lose_their_blocks(
    second: Run, batch: list[Ask], expected: list[list[int]], asynchronous: bool
) -> None:
    """They come back as new ones, with the tokens that they had generated behind their prompts."""
    options = {"max_num_batched_tokens": 94, "async_scheduling": asynchronous}
    answers = second(options, batch, Events(lose_all=13))
    assert texts(answers) == expected
    assert all(answer.preemptions > 0 for answer in answers)


def test_requests_that_are_given_up(second: Run, batch: list[Ask], expected: list[list[int]]) -> None:
    """Amid their prompts and while they are answered; their rows go to others, one of which comes later."""
    asks = [batch[0], batch[3], batch[2], batch[1], batch[3], batch[0]]
    answers = second({"max_num_batched_tokens": 94, "max_num_seqs": 4}, asks, Events(give_up=((2, 1), (9, 0), (9, 2))))
    assert texts([answers[i] for i in (3, 4, 5)]) == [expected[i] for i in (1, 3, 0)]


def test_requests_that_share_a_prefix(second: Run, noise: list[int], tiny_cache: Reference) -> None:
    prompt = noise[:150]
    policies = ["snapkv:budget=64", None, "h2o:budget=64", "snapkv:budget=64"]
    asks = [Ask(prompt, policy, 8) for policy in policies]
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 160}  # one prompt after another
    answers = second(options, asks)
    assert texts(answers) == [tiny_cache(prompt, policy or "full", tokens=8) for policy in policies]
    assert [answer.cached for answer in answers] == [0, 64, 0, 64]


def test_a_prompt_longer_than_the_pool(second: Run, noise: list[int], tiny_cache: Reference) -> None:
    options = {
        "additional_config": {"kvwinnow": {"prefill_budget": 64}},
        "num_gpu_blocks_override": 12,
        "max_num_batched_tokens": 128,
        "max_model_len": 2048,
    }
    prompt = noise[:1100]
    for policy in ("snapkv:budget=64", "h2o:budget=64"):
        expected = tiny_cache(prompt, policy, chunk=128, tokens=NEW)
        assert texts(second(options, [Ask(prompt, policy, NEW)])) == [expected], policy
