"""One digested document, many questions: forks answer as deep copies do, and share what they do not write."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.errors import CacheStateError
from tests.integrations.test_memory import storage_bytes, tensors_in
from tests.models import tiny_model, tiny_tokens
from tests.running import FULL_WIDTH, held, logits, text

CODECS = ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "fp4:style=mx"]


def digested(policy: str, dtype: str = "fp32", **dtypes: Any) -> tuple[Any, torch.Tensor, CompressedCache]:
    """A model, a document of 90 tokens, and a cache that holds it."""
    model = tiny_model()
    dtypes = dtypes or {"dtype": dtype}
    cache = CompressedCache(model, policy, **dtypes)
    ids = tiny_tokens(90)[0]
    logits(model, ids, cache)
    return model, ids, cache


def asked(ids: torch.Tensor, seed: int, length: int = 7) -> torch.Tensor:
    """The document and a question."""
    return torch.cat([ids, tiny_tokens(length, seed=seed)[0]], dim=1)


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_forks_answer_as_deep_copies_do(policy: str, dtype: str) -> None:
    model, ids, cache = digested(policy, dtype)
    before = [cache.positions(layer) for layer in range(len(cache))]
    answers = [text(model, asked(ids, seed), cache=copy.deepcopy(cache), tokens=6) for seed in (1, 2)]
    forks = [cache.fork() for _ in (1, 2)]
    assert [
        text(model, asked(ids, seed), cache=fork, tokens=6) for seed, fork in zip((1, 2), forks, strict=True)
    ] == answers
    assert all(torch.equal(cache.positions(layer), positions) for layer, positions in enumerate(before))
    # The donor goes on as well, in slots of its own.
    assert text(model, asked(ids, 1), cache=cache, tokens=6) == answers[0]


@pytest.mark.parametrize(
    "dtypes", [{"k_dtype": "fp32", "v_dtype": "int4"}, {"k_dtype": "fp8", "v_dtype": "bf16"}], ids=str
)
@pytest.mark.parametrize("policy", ["h2o:budget=24", "full", "snapkv:budget=24,window=8"])
def test_keys_and_values_of_different_formats_are_forked_alike(policy: str, dtypes: dict[str, Any]) -> None:
    model, ids, cache = digested(policy, **dtypes)
    twin, fork = copy.deepcopy(cache), cache.fork()
    talk = other = ids
    for turn in range(3):
        talk, other = asked(talk, turn), asked(other, turn)
        talk = torch.cat([talk, torch.tensor(text(model, talk, cache=fork))], dim=1)
        other = torch.cat([other, torch.tensor(text(model, other, cache=twin))], dim=1)
        assert talk.tolist() == other.tolist()
        assert [held(fork, layer) for layer in range(2)] == [held(twin, layer) for layer in range(2)]
        fork = fork.fork()  # a fork of a fork at every turn
        assert fork.nbytes() == storage_bytes(fork)


@pytest.mark.parametrize("policy", ["h2o:budget=24", "snapkv:budget=24,window=8,kernel=3"])
def test_a_padded_batch_is_forked_row_by_row(policy: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(70, 41)
    cache = CompressedCache(model, policy, dtype="int4")
    logits(model, ids, cache, attention_mask=mask)
    more, more_mask = tiny_tokens(9, 9, seed=1)
    whole, shown = torch.cat([ids, more], 1), torch.cat([mask, more_mask], 1)
    expected = text(model, whole, shown, copy.deepcopy(cache))
    assert text(model, whole, shown, cache.fork()) == expected


@pytest.mark.parametrize("dtype", ["fp32", "int4", "fp4"])
def test_a_fork_is_fed_in_chunks_and_reset_like_any_cache(dtype: str) -> None:
    model, ids, cache = digested("snapkv:budget=24,window=8", dtype)
    fork, twin = cache.fork(), copy.deepcopy(cache)
    for made in (fork, twin):
        with made.prompt(length=33):
            for chunk in tiny_tokens(33, seed=5)[0].split(10, dim=1):
                logits(model, chunk, made)
    assert [held(fork, layer) for layer in range(2)] == [held(twin, layer) for layer in range(2)]
    fork.reset()
    assert fork.nbytes() == 0
    assert text(model, ids, cache=fork) == text(model, ids, cache=CompressedCache(model, cache.policy, dtype=dtype))
    assert text(model, asked(ids, 3), cache=cache) == text(model, asked(ids, 3), cache=_fresh(model, ids, cache))


def _fresh(model: Any, ids: torch.Tensor, like: CompressedCache) -> CompressedCache:
    made = CompressedCache(model, like.policy, k_dtype=like.k_codec, v_dtype=like.v_codec)
    logits(model, ids, made)
    return made


@pytest.mark.parametrize("dtype", ["fp32", "int4", "fp4"])
@pytest.mark.parametrize("policy", ["full", "h2o:budget=24", "snapkv:budget=24,window=8"])
def test_memory_is_the_document_once_and_what_each_fork_wrote(policy: str, dtype: str) -> None:
    model, ids, cache = digested(policy, dtype)
    document = cache.nbytes()
    assert cache.report().shared_nbytes == 0
    forks = [cache.fork() for _ in range(4)]
    for seed, fork in enumerate(forks):
        text(model, asked(ids, seed), cache=fork, tokens=4)
    everything = [cache, *forks]
    for made in everything:
        assert made.nbytes() == storage_bytes(made)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_in(everything, set())
    }
    once = sum(storage.nbytes() for storage in storages.values())
    own = [made.nbytes() - made.report().shared_nbytes for made in forks]
    assert once == document + sum(own)
    assert f"{forks[0].report().shared_nbytes:,} of them shared" in str(forks[0].report())


@pytest.mark.parametrize("dtype", ["fp32", "int4", "fp4"])
@pytest.mark.parametrize("policy", ["h2o:budget=24", "snapkv:budget=24,window=8", "pyramidkv:budget=24,window=8"])
def test_a_fork_whose_rows_are_chosen_shares_nothing_any_more(policy: str, dtype: str) -> None:
    model, ids, cache = digested(policy, dtype)
    twin, fork = copy.deepcopy(cache), cache.fork()
    answers = [text(model, asked(ids, 1), cache=made, num_beams=3, tokens=20) for made in (fork, twin)]
    assert answers[0] == answers[1]
    assert fork.report().shared_nbytes == 0
    assert fork.nbytes() == twin.nbytes() == storage_bytes(fork)


def test_a_fork_asks_nothing_of_the_model_and_repeats_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    model, _, cache = digested("expectedattention:budget=24,future=16")
    calls: list[Any] = []
    model.model.layers[0].register_forward_pre_hook(lambda *given: calls.append(given))
    cache.fork(), copy.deepcopy(cache)
    assert not calls
    with pytest.warns(UserWarning, match="nothing to evict"):
        sliding = CompressedCache(tiny_model("mistral, sliding"), "h2o:budget=24")
    recwarn.clear()
    sliding.fork()
    assert not recwarn.list


@pytest.mark.parametrize("policy", ["full", "h2o:budget=24"])
def test_a_long_line_of_forks_stays_about_as_small_as_a_copy(policy: str) -> None:
    model, _, fork = digested(policy, "int4")
    twin = copy.deepcopy(fork)
    for seed in range(64):
        fork, new = fork.fork(), tiny_tokens(1, seed=seed)[0]
        torch.testing.assert_close(logits(model, new, fork), logits(model, new, twin), atol=1e-3, rtol=1e-3)
    segments = len(fork.layers[0].slots.keys.shared)
    assert segments <= 8
    slots = [made.positions(0).shape[2] for made in (fork, twin)]
    assert slots[0] <= slots[1] + 64 + 32
    assert fork.nbytes() == storage_bytes(fork)


@pytest.mark.parametrize("policy", ["h2o:budget=24", "snapkv:budget=24,window=8", "tova:budget=24"])
def test_a_line_of_forks_that_evict_does_not_carry_the_dead_along(policy: str) -> None:
    """A slot that is shared cannot be used again, so what is left of a long past is copied once in a while."""
    model = tiny_model(trained=4096)
    fork = CompressedCache(model, policy)
    logits(model, tiny_tokens(90)[0], fork)
    twin = copy.deepcopy(fork)
    for seed in range(80):
        fork = fork.fork()
        for length in (5, 1, 1, 1):
            new = tiny_tokens(length, seed=seed)[0]
            torch.testing.assert_close(logits(model, new, fork), logits(model, new, twin), atol=1e-4, rtol=1e-4)
    assert fork.positions(0).shape[2] <= 2 * (24 + 4 + 32) + 64
    assert fork.nbytes() == storage_bytes(fork)


def test_forks_live_on_without_their_donor() -> None:
    model, ids, cache = digested("h2o:budget=24", "int4")
    expected = text(model, asked(ids, 1), cache=copy.deepcopy(cache))
    fork = cache.fork()
    cache.reset()
    del cache
    assert text(model, asked(ids, 1), cache=fork) == expected


def test_forks_made_and_used_in_inference_mode_go_on_outside_it() -> None:
    model, ids, cache = digested("h2o:budget=24", "int4")
    expected = text(model, asked(ids, 1), cache=copy.deepcopy(cache))
    with torch.inference_mode():
        fork, twin = cache.fork(), copy.deepcopy(cache)
    assert text(model, asked(ids, 1), cache=fork) == text(model, asked(ids, 1), cache=twin) == expected


def test_many_threads_fork_one_document() -> None:
    model, ids, cache = digested("h2o:budget=24", "int4")
    expected = text(model, asked(ids, 1), cache=copy.deepcopy(cache))
    answers: list[Any] = []

    def answer() -> None:
        answers.append(text(model, asked(ids, 1), cache=cache.fork()))

    threads = [threading.Thread(target=answer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 6


def test_an_empty_cache_is_forked_into_an_empty_one() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    fork = cache.fork()
    ids = tiny_tokens(50)[0]
    assert text(model, ids, cache=fork) == text(model, ids, cache=cache)


def test_another_prompt_is_refused_by_a_fork_as_by_its_donor() -> None:
    model, _, cache = digested("h2o:budget=24")
    with pytest.raises(CacheStateError, match="begins with none of"):
        text(model, tiny_tokens(95, seed=9)[0], cache=cache.fork())


def test_a_prompt_half_fed_is_not_forked() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    with pytest.raises(KvwinnowError), cache.prompt(length=40):  # noqa: PT012 - the block itself complains at its end
        logits(model, tiny_tokens(20)[0], cache)
        with pytest.raises(CacheStateError, match=r"fork\(\) inside .*cache.prompt"):
            cache.fork()


def test_an_interrupted_cache_is_not_forked() -> None:
    model, ids, cache = digested("h2o:budget=24")
    handle = model.base_model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids[:, :3], cache)
    handle.remove()
    with pytest.raises(CacheStateError, match="interrupted"):
        cache.fork()
