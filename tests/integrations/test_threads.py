"""Threads that share one model: each says what it says alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

from kvwinnow import CompressedCache
from tests.models import VOCABULARY, tiny_model, tiny_tokens
from tests.running import CACHE, logits, text

ROUNDS = 6


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns as often as Python can, so that a gap between two of them is found."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def side_by_side(*jobs: Callable[[], object]) -> list[list[object]]:
    """What each job returned in ``ROUNDS`` rounds, all jobs running at once; an exception of a job is raised here."""
    results: list[list[object]] = [[] for _ in jobs]
    errors: list[BaseException] = []

    def repeat(job: Callable[[], object], own: list[object]) -> None:
        try:
            own.extend(job() for _ in range(ROUNDS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(jobs, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_two_caches_and_a_plain_call_run_at_once_on_one_model(implementation: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    batches = [tiny_tokens(9, 30, seed=1), tiny_tokens(20, 4, seed=2), tiny_tokens(3, 25, seed=3)]
    policies = ["h2o:budget=12", "snapkv:budget=14,window=4", None]

    def job(which: int) -> Callable[[], object]:
        (ids, mask), policy = batches[which], policies[which]
        return lambda: text(model, ids, mask, CompressedCache(model, policy) if policy else None, tokens=6)

    alone = [job(which)() for which in range(3)]
    for results, expected in zip(side_by_side(*map(job, range(3))), alone, strict=True):
        assert results == [expected] * ROUNDS
    assert model.config._attn_implementation == implementation


@pytest.mark.usefixtures("eager_switching")
def test_plain_forward_calls_stay_bit_equal_while_another_thread_uses_a_cache() -> None:
    model = tiny_model(layers=3)
    ids, mask = tiny_tokens(9, 30)
    expected = logits(model, ids, attention_mask=mask)
    cache = CompressedCache(model, "h2o:budget=500")

    def plain() -> bool:
        return all(torch.equal(logits(model, ids, attention_mask=mask), expected) for _ in range(20))

    def compressed() -> None:
        for _ in range(20):
            logits(model, ids[:, :1], cache)

    assert side_by_side(plain, compressed)[0] == [True] * ROUNDS


def test_a_streamer_reads_from_another_thread() -> None:
    words = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
    model, ids = tiny_model(), tiny_tokens(30)[0]
    cache = CompressedCache(model, "h2o:budget=12")
    expected = text(model, ids, cache=CompressedCache(model, "h2o:budget=12"))[0]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {CACHE: cache, "streamer": streamer, "max_new_tokens": 12, "do_sample": False}
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs=options)
    thread.start()
    pieces = "".join(streamer).split()
    thread.join()
    assert pieces == [f"w{n}" for n in expected]
