"""What a further call on a used cache may say about what is cached already, and what an early error leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.errors import CacheStateError
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, counts, logits, text

IDS = torch.arange(3, 43).unsqueeze(0)


def test_a_mask_that_hides_cached_tokens_is_refused() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "full")
    mask = torch.ones(1, 50, dtype=torch.long)
    mask[0, 5] = 0
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(KvwinnowError, match=r"shows \[39\] .*which are \[40\].*not hidden"):
            model(IDS[:, :10], past_key_values=cache, attention_mask=mask)
        mask[0, 5] = 1
        model(IDS[:, :10], past_key_values=cache, attention_mask=mask)
    assert cache.report().tokens_seen == 50


def test_a_share_goes_on_after_a_turn_of_one_generated_token() -> None:
    """``generate`` with one new token decodes nothing, and its prompt is complete all the same."""
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=0.5")
    first = model.generate(IDS, past_key_values=cache, max_new_tokens=1, do_sample=False, eos_token_id=None)
    assert cache.report().tokens_kept == 20
    turn = torch.cat([first, IDS[:, :19]], dim=1)
    model.generate(turn, past_key_values=cache, max_new_tokens=1, do_sample=False, eos_token_id=None)
    assert cache.report().tokens_seen == 60
    assert cache.report().tokens_kept == 30


def test_an_error_before_the_first_layer_leaves_the_cache_as_it_was() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "full")
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        before = cache.positions(0)
        with pytest.raises(ValueError, match="exactly one"):
            model(IDS, inputs_embeds=model.get_input_embeddings()(IDS), past_key_values=cache)
        assert torch.equal(cache.positions(0), before)
        model(IDS[:, :1], past_key_values=cache)
    assert cache.report().tokens_seen == 41


# -- a cache made among generate's arguments ---------------------------------------------------------------------------
# Python looks up ``model.generate`` before it makes the arguments, so that the first cache of a model comes too late to
# wrap it.


def inline(model: PreTrainedModel, ids: Tensor, make: Callable[[], CompressedCache], **options: Any) -> list[list[int]]:
    """``text`` of a cache that is made after ``model.generate`` was looked up."""
    out = model.generate(ids, max_new_tokens=12, do_sample=False, **options, **{CACHE: make()})
    return out[:, ids.shape[1] :].tolist()


def saved(model: PreTrainedModel, path: Path) -> Tensor:
    """Digest a prompt into a file, and let the cache go; returns the prompt."""
    ids = tiny_tokens(70)[0]
    cache = CompressedCache(model, "h2o:budget=30")
    logits(model, ids, cache)
    cache.save(path)
    return ids


@pytest.mark.parametrize("length", [94, 20])
def test_another_prompt_is_refused_though_the_cache_is_made_within_the_call(length: int, tmp_path: Path) -> None:
    model = tiny_model()
    saved(model, tmp_path / "x")
    gc.collect()
    assert "generate" not in vars(model)
    with pytest.raises(CacheStateError, match="begins with none of"):
        inline(model, tiny_tokens(length, seed=3)[0], lambda: CompressedCache.load(tmp_path / "x", model))


def test_a_loaded_cache_goes_on_though_it_is_made_within_the_call(tmp_path: Path) -> None:
    model = tiny_model()
    ids = torch.cat([saved(model, tmp_path / "x"), tiny_tokens(5, seed=4)[0]], 1)
    named = CompressedCache.load(tmp_path / "x", model)
    expected = text(model, ids, cache=named)
    del named
    gc.collect()
    assert inline(model, ids, lambda: CompressedCache.load(tmp_path / "x", model)) == expected


def test_chunks_of_a_share_work_though_the_cache_is_made_within_the_call() -> None:
    model, ids = tiny_model(), tiny_tokens(70)[0]
    made: list[CompressedCache] = []

    def make() -> CompressedCache:
        made.append(CompressedCache(model, "h2o:budget=0.5"))
        return made[0]

    said = inline(model, ids, make, prefill_chunk_size=16)
    cache = CompressedCache(model, "h2o:budget=0.5")
    assert text(model, ids, cache=cache, prefill_chunk_size=16) == said
    assert counts(made[0]) == {35}
    # What that call arranged ends with it: rows change places at once, and further calls are further turns.
    logits(model, ids[:, :4], made[0])
    made[0].batch_repeat_interleave(2)
    assert made[0].batch_size == 2


def test_what_generate_does_not_serve_is_refused_though_the_cache_is_made_within_the_call() -> None:
    model = tiny_model()
    with pytest.raises(KvwinnowError, match="does not support assisted generation"):
        inline(model, tiny_tokens(30)[0], lambda: CompressedCache(model, "full"), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("length", [20, 94])
def test_another_models_generate_is_refused_whatever_the_lengths(length: int) -> None:
    model, other = tiny_model(), tiny_model("qwen2")
    cache = CompressedCache(model, "full")
    logits(model, tiny_tokens(70)[0], cache)
    with pytest.raises(CacheStateError, match="made for another model"):
        text(other, tiny_tokens(length)[0], cache=cache)
