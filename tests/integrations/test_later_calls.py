"""What a further call on a used cache may say about what is cached already, and what an early error leaves."""

from __future__ import annotations

import pytest
import torch

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import tiny_model

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
