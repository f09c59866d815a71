"""What breaks for users of other libraries with the model at hand, by the number of the fault; here it is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import KINDS, WINDOW, shown, tiny_model, tiny_tokens
from tests.running import CACHE, FULL_WIDTH, counts, held, logits, text

pytestmark = [
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:all layers of this model see the latest:UserWarning"),
]

SLIDING = [kind for kind, family in KINDS.items() if "sliding" in kind or "layer_types" in family.own]
SCALED = [kind for kind in KINDS if "rope" in kind]


# -- 2: grouped queries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "kv_heads"), [("falcon", 1), ("falcon, new", 2), ("gpt2", 8)])
def test_fault_02_a_family_stores_one_key_for_each_kv_head(kind: str, kv_heads: int) -> None:
    """Falcon's new architecture repeats keys and values for all query heads before it hands them to the cache."""
    model = tiny_model(kind, heads=8, kv_heads=2, dim=16)
    cache = CompressedCache(model, "h2o:budget=64")
    text(model, tiny_tokens(100)[0], cache=cache, tokens=5)
    assert cache.positions(0).shape == (1, kv_heads, 65)
    per_slot = 2 * 16 * 4 + 4 + 4  # key and value in float32, position, attention received
    assert cache.nbytes() == 2 * kv_heads * 65 * per_slot


# -- 12: scaled RoPE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALED, ids=shown)
def test_fault_12_a_scaled_model_says_what_it_says_uncompressed_far_beyond_the_original_length(kind: str) -> None:
    model = tiny_model(kind, trained=512)
    ids, mask = tiny_tokens(300, 170)
    assert text(model, ids, mask, CompressedCache(model, "snapkv:budget=400")) == text(model, ids, mask)
    cut = CompressedCache(model, "streamingllm:budget=40")
    text(model, ids, mask, cut)
    assert counts(cut) == {40}


# -- 13: sliding layers and softmax sinks -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv"])
@pytest.mark.parametrize("kind", SLIDING, ids=shown)
def test_fault_13_sliding_layers_keep_their_own_window_whatever_the_policy(kind: str, name: str) -> None:
    model = tiny_model(kind, layers=4)
    ids, mask = tiny_tokens(70, 41)
    cache = CompressedCache(model, FULL_WIDTH[name])
    text(model, ids, mask, cache, tokens=6)
    sliding = cache.structure.sliding
    assert WINDOW in sliding
    for layer, window in enumerate(sliding):
        for row, seen in enumerate((75, 46)):
            tokens = held(cache, layer, row)
            if window is not None:
                assert tokens == list(range(seen - WINDOW + 1, seen))
            elif name == "full":
                assert tokens == list(range(seen))
            else:
                assert 24 <= len(tokens) <= 24 + 5


@pytest.mark.parametrize("kind", SLIDING, ids=shown)
def test_fault_13_the_sequence_length_is_that_of_the_sequence(kind: str) -> None:
    model = tiny_model(kind)
    ids, _ = tiny_tokens(50)
    cache = CompressedCache(model, "full")
    logits(model, ids, cache)
    assert [cache.get_seq_length(layer) for layer in range(2)] == [50, 50]
    assert cache.report().tokens_seen == 50
    # Three turns, each longer than the window, one of them fed token by token.
    turns = [tiny_tokens(n, seed=n)[0] for n in (1, 30, 1, 1)]
    seen = ids
    for turn in turns:
        seen = torch.cat([seen, turn], 1)
        out = logits(model, turn, cache)
        torch.testing.assert_close(out, logits(model, seen)[:, -turn.shape[1] :], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 2])
def test_fault_13_the_smallest_windows(window: int) -> None:
    model = tiny_model("gemma2", sliding_window=window)
    ids, mask = tiny_tokens(20, 7)
    # Transformers' own cache keeps everything for a window of 1, so the model without a cache is asked.
    assert text(model, ids, mask, CompressedCache(model, "full")) == text(model, ids, mask, use_cache=False)


@pytest.mark.parametrize("kind", SLIDING, ids=shown)
@pytest.mark.parametrize("size", ["24KiB", "40kB"])
def test_fault_13_a_budget_in_bytes_counts_the_sliding_layers(kind: str, size: str) -> None:
    model = tiny_model(kind, layers=4)
    cache = CompressedCache(model, f"h2o:budget={size}")
    text(model, tiny_tokens(200)[0], cache=cache, tokens=10)
    limit = 24 * 1024 if size == "24KiB" else 40_000
    assert cache.nbytes() <= limit
    if None in cache.structure.sliding:
        assert cache.nbytes() > 0.9 * limit


def test_fault_13_sinks_in_the_softmax_are_honoured() -> None:
    model = tiny_model("gpt_oss")
    ids, mask = tiny_tokens(60, 22)
    expected = logits(model, ids[:1])
    torch.testing.assert_close(logits(model, ids[:1], CompressedCache(model, "full")), expected, atol=2e-4, rtol=1e-4)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    without = CompressedCache(model, "full")
    assert (logits(model, ids[:1], without) - expected).abs().max() > 0.1
    assert text(model, ids, mask, CompressedCache(model, "full")) == text(model, ids, mask)


def test_fault_13_a_policy_that_cannot_evict_anything_says_so() -> None:
    with pytest.warns(UserWarning, match="latest 12 tokens only and keep just these, so h2o:budget=24"):
        CompressedCache(tiny_model("mistral, sliding"), "h2o:budget=24,sinks=0,recent=3,evict_every=1")


def test_fault_13_the_report_counts_sliding_layers_as_what_they_are() -> None:
    model = tiny_model("gemma2", layers=4)
    cache = CompressedCache(model, "snapkv:budget=24,window=8,kernel=3")
    ids, mask = tiny_tokens(70, 5)
    logits(model, ids, cache, attention_mask=mask)
    report = cache.report()
    assert report.tokens_kept == 24
    tokens = 2 * (70 + 5) + 2 * (WINDOW - 1 + 5)  # two full layers, two that slide
    assert report.full_nbytes == tokens * 2 * 2 * 16 * 2  # keys and values, KV heads, dimension, bfloat16


def test_fault_13_learned_positions_end_in_a_sentence() -> None:
    model = tiny_model("gpt2", trained=32)
    ids, _ = tiny_tokens(28)
    assert len(text(model, ids, cache=CompressedCache(model, "h2o:budget=8"), tokens=5)[0]) == 5
    with pytest.raises(KvwinnowError, match="reaches 33 tokens, and this model has learned 32 positions"):
        text(model, ids, cache=CompressedCache(model, "h2o:budget=8"), tokens=10)


# -- 20: other implementations of attention ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "falcon", "gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_fault_20_the_implementation_set_for_the_model_does_not_matter(implementation: str, kind: str) -> None:
    model, default = tiny_model(kind, attn_implementation=implementation), tiny_model(kind)
    if kind != "falcon":  # whose layers do not let it be changed
        model.set_attn_implementation(implementation)
    ids, mask = tiny_tokens(40, 25)
    expected = text(default, ids, mask, CompressedCache(default, "h2o:budget=16"))
    config: Any = model.get_decoder().config
    assert config._attn_implementation == implementation
    assert text(model, ids, mask, CompressedCache(model, "h2o:budget=16")) == expected
    assert config._attn_implementation == implementation
    assert text(model, ids, mask, CompressedCache(model, "full")) == text(model, ids, mask)


# -- 21: families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=shown)
def test_fault_21_the_type_of_a_model_decides_nothing(kind: str) -> None:
    model = tiny_model(kind)
    ids, mask = tiny_tokens(40, 25)
    expected = text(model, ids, mask)
    model.config.model_type = "unheard-of"
    model.get_decoder().config.model_type = "unheard-of"
    assert text(model, ids, mask, CompressedCache(model, "full")) == expected


def test_fault_21_plain_calls_of_a_model_stay_as_they_are() -> None:
    for kind in ("falcon", "gemma3, vision", "gpt_oss"):
        model = tiny_model(kind)
        ids, _ = tiny_tokens(30)
        expected = logits(model, ids)
        cache = CompressedCache(model, "h2o:budget=16")
        logits(model, ids, cache)
        assert torch.equal(logits(model, ids), expected)
        assert torch.equal(model(ids, **{CACHE: DynamicCache()}).logits, expected)
