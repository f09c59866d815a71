"""Outside of calls with one of our caches, a model is as it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, FULL_WIDTH, held, logits, text

IMPLEMENTATIONS = ["eager", "sdpa"]


def padded() -> tuple[Tensor, Tensor]:
    return tiny_tokens(9, 30, 2)


def wrapped(model: PreTrainedModel) -> list[str]:
    """Which methods of the objects themselves hide those of their classes."""
    return [
        name
        for module in (model, model.base_model)
        for name in ("forward", "generate", "generate_batch")
        if name in vars(module)
    ]


# -- plain calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_plain_calls_are_bit_equal_before_beside_and_after_a_cache(implementation: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    ids, mask = padded()
    before = logits(model, ids, attention_mask=mask)
    cache = CompressedCache(model, "h2o:budget=24")
    assert torch.equal(logits(model, ids, attention_mask=mask), before)
    text(model, ids, mask, cache)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, ids, attention_mask=mask), before)
    del cache
    gc.collect()
    assert torch.equal(logits(model, ids, attention_mask=mask), before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_plain_generate_beside_a_cache_says_what_it_said(implementation: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    ids, mask = padded()
    before = text(model, ids, mask)
    cache = CompressedCache(model, "snapkv:budget=24,window=8")
    text(model, ids, mask, cache)
    assert text(model, ids, mask) == before


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_the_models_own_implementation_does_not_matter_to_the_cache(policy: str, implementation: str) -> None:
    model, other = tiny_model(), tiny_model()
    model.set_attn_implementation(implementation)
    ids, mask = padded()
    cache, beside = CompressedCache(model, policy), CompressedCache(other, policy)
    assert torch.equal(logits(model, ids, cache, attention_mask=mask), logits(other, ids, beside, attention_mask=mask))


def test_eager_attentions_are_still_returned_beside_a_cache() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    ids, _ = tiny_tokens(12)
    before = model(ids, output_attentions=True).attentions
    cache = CompressedCache(model, "full")
    logits(model, ids, cache)
    after = model(ids, output_attentions=True).attentions
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_wrappers_go_with_the_last_cache() -> None:
    model = tiny_model()
    first, second = CompressedCache(model, "full"), CompressedCache(model, "h2o")
    assert wrapped(model)
    del first
    gc.collect()
    assert text(model, tiny_tokens(5)[0], cache=second) == text(model, tiny_tokens(5)[0])
    del second
    gc.collect()
    assert wrapped(model) == []


def test_a_forward_that_another_library_put_on_the_object_is_called_and_comes_back() -> None:
    model = tiny_model()
    decoder, calls = model.base_model, []
    original = decoder.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    decoder.forward = counted
    cache = CompressedCache(model, "full")
    logits(model, tiny_tokens(5)[0], cache)
    assert len(calls) == 1
    del cache
    gc.collect()
    assert decoder.forward is counted


def test_a_plain_call_inside_a_call_with_a_cache_is_a_plain_call() -> None:
    model = tiny_model()
    ids, mask = padded()
    before, inner = logits(model, ids, attention_mask=mask), []

    def look(*_: Any) -> None:
        handle.remove()
        inner.append(logits(model, ids, attention_mask=mask))

    cache = CompressedCache(model, "full")
    handle = model.base_model.layers[0].register_forward_hook(look)
    outer = logits(model, ids, cache, attention_mask=mask)
    assert torch.equal(inner[0], before)
    assert torch.allclose(outer[mask.bool()], before[mask.bool()], atol=1e-4)


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["prompt", "decode"])
def test_an_interrupted_call_restores_the_model_and_marks_the_cache(error: type[BaseException], at: str) -> None:
    model = tiny_model()
    ids, mask = padded()
    before = logits(model, ids, attention_mask=mask)
    fresh = text(model, ids, mask, CompressedCache(model, "h2o:budget=9"))
    cache, calls = CompressedCache(model, "h2o:budget=9"), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == (1 if at == "prompt" else 3):
            raise error("stop")

    handle = model.base_model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(error, match="stop"):
        text(model, ids, mask, cache)
    handle.remove()

    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, ids, attention_mask=mask), before)
    with pytest.raises(KvwinnowError, match=r"interrupted.*cache\.reset\(\)"):
        logits(model, ids, cache)
    cache.reset()
    assert text(model, ids, mask, cache) == fresh


def test_a_refused_call_leaves_the_cache_usable() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(20)
    cache, beside = CompressedCache(model, "h2o:budget=9"), CompressedCache(model, "h2o:budget=9")
    logits(model, ids, cache)
    logits(model, ids, beside)
    with pytest.raises(KvwinnowError):
        logits(model, ids.expand(2, -1), cache)
    new = tiny_tokens(1, seed=1)[0]
    assert torch.equal(logits(model, new, cache), logits(model, new, beside))


def test_an_interrupted_prompt_block_ends() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=0.5")
    with pytest.raises(RuntimeError, match="stop"), cache.prompt(length=40):
        raise RuntimeError("stop")
    with cache.prompt(length=40):
        logits(model, tiny_tokens(40)[0], cache)
    assert len(held(cache)) == 20


# -- several caches, several models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_two_caches_of_one_model_do_not_know_each_other(policy: str) -> None:
    model = tiny_model()
    prompts = [tiny_tokens(40, seed=seed)[0] for seed in (1, 2)]
    alone = [CompressedCache(model, policy) for _ in prompts]
    expected = [[logits(model, ids, cache)] for ids, cache in zip(prompts, alone, strict=True)]
    steps = list(tiny_tokens(8)[0].split(1, dim=1))
    for outputs, cache in zip(expected, alone, strict=True):
        outputs += [logits(model, step, cache) for step in steps]
    together = [CompressedCache(model, policy) for _ in prompts]
    seen = [[logits(model, ids, cache)] for ids, cache in zip(prompts, together, strict=True)]
    for step in steps:
        for outputs, cache in zip(seen, together, strict=True):
            outputs.append(logits(model, step, cache))
    for outputs, right in zip(seen, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(outputs, right, strict=True))


def test_a_deep_copy_of_the_model_is_independent() -> None:
    model = tiny_model()
    ids, mask = padded()
    cache = CompressedCache(model, "h2o:budget=9")
    expected = text(model, ids, mask, CompressedCache(model, "h2o:budget=9"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1.0)
    assert torch.equal(logits(twin, ids, attention_mask=mask), -logits(model, ids, attention_mask=mask))
    other = CompressedCache(twin, "h2o:budget=9")
    assert torch.equal(logits(twin, ids, other, attention_mask=mask), -logits(model, ids, cache, attention_mask=mask))
    cache.reset()
    with pytest.raises(KvwinnowError, match="another model"):
        logits(twin, ids, cache)
    assert text(model, ids, mask, cache) == expected


@pytest.mark.parametrize("first", ["model", "twin"])
def test_the_wrappers_of_a_model_and_its_deep_copy_go_each_with_its_own_caches(first: str) -> None:
    model = tiny_model()
    caches = {"model": CompressedCache(model, "full")}
    twin = copy.deepcopy(model)
    caches["twin"] = CompressedCache(twin, "full")
    del caches[first]
    gc.collect()
    left, gone = (twin, model) if first == "model" else (model, twin)
    assert wrapped(gone) == []
    (cache,) = caches.values()
    assert text(left, tiny_tokens(5)[0], cache=cache) == text(gone, tiny_tokens(5)[0])
    del cache
    caches.clear()
    gc.collect()
    assert wrapped(left) == []


def test_a_model_can_be_pickled_and_saved_beside_a_cache() -> None:
    model = tiny_model()
    ids, mask = padded()
    cache = CompressedCache(model, "full")
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin, ids, attention_mask=mask), logits(model, ids, attention_mask=mask))
    torch.save(model, io.BytesIO())
    with pytest.raises(KvwinnowError, match="another model"):
        logits(twin, ids, cache)


@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_a_deep_copy_of_a_cache_answers_as_the_original_and_leaves_it_alone(policy: str, dtype: str) -> None:
    model = tiny_model()
    ids, mask = padded()
    cache = CompressedCache(model, policy, dtype=dtype)
    logits(model, ids, cache, attention_mask=mask)
    more = tiny_tokens(1, 1, 1, seed=3)[0]
    logits(model, more, cache)
    twin, frozen = copy.deepcopy(cache), copy.deepcopy(cache)
    assert twin.nbytes() == cache.nbytes()
    outputs = [logits(model, tiny_tokens(6, 6, 6, seed=seed)[0], twin) for seed in range(4)]
    assert all(torch.equal(cache.positions(layer), frozen.positions(layer)) for layer in range(2))
    again = [logits(model, tiny_tokens(6, 6, 6, seed=seed)[0], cache) for seed in range(4)]
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))


def test_a_deep_copy_of_a_prompts_cache_serves_several_continuations() -> None:
    model = tiny_model()
    prompt = tiny_tokens(40)[0]
    cache = CompressedCache(model, "snapkv:budget=24,window=8")
    logits(model, prompt, cache)
    for seed in (1, 2):
        question = torch.cat([prompt, tiny_tokens(5, seed=seed)[0]], dim=1)
        own = CompressedCache(model, "snapkv:budget=24,window=8")
        logits(model, prompt, own)
        assert text(model, question, cache=copy.deepcopy(cache)) == text(model, question, cache=own)


def test_a_cache_given_to_another_model_says_so() -> None:
    model, ids = tiny_model(), tiny_tokens(5)[0]
    cache = CompressedCache(model, "full")
    strangers = [tiny_model(seed=1), tiny_model(seed=2), tiny_model("qwen2"), tiny_model(layers=5)]
    own = CompressedCache(strangers[1], "full")
    for stranger in strangers:
        for call in (lambda model: model(ids, **{CACHE: cache}), lambda model: text(model, ids, cache=cache)):
            with pytest.raises(KvwinnowError, match=r"another model.*CompressedCache"):
                call(stranger)
    assert text(model, ids, cache=cache) == text(model, ids)
    assert text(strangers[1], ids, cache=own) == text(strangers[1], ids)


# -- ways to call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_grad_mode_does_not_matter(policy: str) -> None:
    model = tiny_model()
    ids, steps = tiny_tokens(40)[0], tiny_tokens(6, seed=1)[0].split(1, dim=1)
    reference = CompressedCache(model, policy)
    expected = [logits(model, new, reference) for new in (ids, *steps)]
    for prompt_mode, decode_mode in [
        (torch.inference_mode, torch.no_grad),
        (torch.no_grad, torch.inference_mode),
        (torch.enable_grad, torch.enable_grad),
        (torch.inference_mode, torch.enable_grad),
    ]:
        cache = CompressedCache(model, policy)
        with prompt_mode():
            outputs = [model(ids, **{CACHE: cache}).logits]
        with decode_mode():
            outputs += [model(step, **{CACHE: cache}).logits for step in steps]
        assert all(torch.equal(one.detach(), other) for one, other in zip(outputs, expected, strict=True))


def test_a_cache_may_be_reset_and_copied_outside_the_inference_mode_it_was_filled_in() -> None:
    model, ids = tiny_model(), tiny_tokens(40)[0]
    cache = CompressedCache(model, "h2o:budget=24", dtype="int4")
    with torch.inference_mode():
        model(ids, **{CACHE: cache})
    twin = copy.deepcopy(cache)
    assert torch.equal(logits(model, ids[:, :1], twin), logits(model, ids[:, :1], cache))


def test_the_decoder_may_be_called_directly() -> None:
    model, ids = tiny_model(), tiny_tokens(20)[0]
    cache = CompressedCache(model, "full")
    with torch.no_grad():
        expected = model.base_model(ids).last_hidden_state
        first = model.base_model(ids[:, :15], **{CACHE: cache}).last_hidden_state
        second = model.model(ids[:, 15:], None, None, cache).last_hidden_state
    assert torch.allclose(torch.cat([first, second], dim=1), expected, atol=1e-4)


def test_hidden_states_are_returned_as_ever() -> None:
    model, ids = tiny_model(), tiny_tokens(20)[0]
    cache = CompressedCache(model, "full")
    with torch.no_grad():
        plain = model(ids, output_hidden_states=True).hidden_states
        ours = model(ids, output_hidden_states=True, **{CACHE: cache}).hidden_states
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(ours, plain, strict=True))
