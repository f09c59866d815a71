"""What meets the cache from outside: other wrappers, autocast, default dtypes, scaled RoPE, foreign numbers."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvwinnow import H2O, CompressedCache, KvwinnowError, SnapKV
from kvwinnow.integrations.transformers.structure import trained_length
from kvwinnow.statistics import Kind
from tests.models import tiny_model

IDS = torch.arange(3, 63).unsqueeze(0)


def generate(model: Any, cache: CompressedCache | None, ids: Tensor = IDS, **options: Any) -> Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | options
    tokens: Tensor = model.generate(ids, **options, **({} if cache is None else {"past_key_values": cache}))
    return tokens


def test_another_librarys_wrapper_over_ours_does_not_count_a_step_twice() -> None:
    model = tiny_model()
    expected = generate(model, None)
    first = CompressedCache(model, "full")
    ours = model.model.forward

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    model.model.forward = theirs
    second = CompressedCache(model, "full")
    for cache in (first, second, copy.deepcopy(second)):
        assert torch.equal(generate(model, cache), expected)
        assert cache.report().tokens_seen == expected.shape[1] - 1
    del first, second, cache
    gc.collect()
    assert torch.equal(generate(model, None), expected)


def test_autocast_leaves_the_sums_in_float32() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=64")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(IDS, past_key_values=cache)
    for layer in cache._layers():
        torch.testing.assert_close(layer.running[Kind.MASS].sum(-1), torch.full((1, 2), 60.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    model = tiny_model(dim=32)
    plain = CompressedCache(model, "h2o:budget=20", dtype="int4")
    expected = generate(model, plain)
    cache = CompressedCache(model, "h2o:budget=20", dtype="int4")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            model(IDS, past_key_values=cache)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for token in expected[0, 60:-1]:
            model(token.view(1, 1), past_key_values=cache)
    assert torch.equal(cache.positions(1), plain.positions(1))
    assert cache.nbytes() == plain.nbytes()


def test_a_row_that_holds_nothing_stays_finite() -> None:
    model = tiny_model()
    ids, mask = IDS[:, :10].expand(2, -1), torch.ones(2, 11, dtype=torch.long)
    mask[1] = 0
    with torch.no_grad():
        cache = CompressedCache(model, "h2o:budget=8")
        model(ids, attention_mask=mask[:, :10], past_key_values=cache)
        out = model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    assert bool(out.logits.isfinite().all())
    assert all(bool(sums.isfinite().all()) for layer in cache._layers() for sums in layer.running.values())


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 64),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 128),
    ],
)
def test_scaled_rope_stretches_the_trained_length(rope: dict[str, Any], length: int) -> None:
    model = tiny_model("qwen2", trained=64, rope_parameters=rope)
    assert trained_length(model.config) == length
    with torch.no_grad():
        ids = torch.full((1, length), 7)
        model(ids, past_key_values=CompressedCache(model, "streamingllm:budget=32"))
        with pytest.raises(KvwinnowError, match=f"trained to {length}"):
            model(torch.full((1, length + 1), 7), past_key_values=CompressedCache(model, "full"))


def test_a_stated_longer_context_is_not_stretched_again() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert trained_length(tiny_model(trained=1024, rope_parameters=rope).config) == 1024
    # Llama 3.2 states 131,072 beside a factor of 32 over 8,192, which is twice that.
    assert trained_length(tiny_model(trained=1024, rope_parameters={**rope, "factor": 32.0}).config) == 1024


def test_a_model_that_scales_each_type_of_layer_states_the_stretched_context() -> None:
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    types = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert trained_length(tiny_model("gemma3", trained=128, rope_parameters=types).config) == 128


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    assert H2O(budget=np.int64(64)) == H2O(budget=64)
    assert SnapKV(budget=np.float64(0.5)) == SnapKV(budget=0.5)
    model = tiny_model()
    cache = CompressedCache(model, SnapKV(budget=0.75))
    mask = torch.ones(1, 60, dtype=torch.long)
    with torch.no_grad(), cache.prompt(length=mask.sum(1)):
        for chunk in IDS.split(20, dim=1):
            model(chunk, past_key_values=cache)
    assert cache.report().tokens_kept == 45


def test_a_share_is_exact_in_spite_of_the_float() -> None:
    model = tiny_model()
    cache = CompressedCache(model, H2O(budget=0.29))
    with torch.no_grad():
        model(torch.arange(3, 103).unsqueeze(0), past_key_values=cache)
    assert cache.report().tokens_kept == 29  # 0.29 * 100 is 28.999999999999996


def test_a_byte_budget_holds_after_the_model_moved_to_another_dtype() -> None:
    model = tiny_model(dim=64).to(torch.bfloat16)
    cache = CompressedCache(model, "streamingllm:budget=20KiB", dtype="int4")
    model.float()
    generate(model, cache, max_new_tokens=60)
    assert 19 * 2**10 < cache.nbytes() <= 20 * 2**10


def test_keys_are_centred_only_by_a_mean_of_enough_tokens() -> None:
    model = tiny_model(dim=32)
    for first, centred in ((31, False), (32, True)):
        cache = CompressedCache(model, "full", dtype="int4")
        with torch.no_grad():
            model(IDS[:, :first], past_key_values=cache)
        slots = cache._layers()[0].slots
        assert slots is not None
        assert slots.keys.mean is not None
        assert bool(slots.keys.mean.any()) is centred


def test_refusals_at_the_seams() -> None:
    model = tiny_model()
    with pytest.raises(KvwinnowError, match="without a language head"):
        CompressedCache(model.model, "full")
    cache = CompressedCache(model, "snapkv:budget=0.75")
    with pytest.raises(KvwinnowError, match="generate is no part of a prompt"), cache.prompt(60):
        generate(model, cache)
    with pytest.raises(KvwinnowError, match=r"reset\(\) inside"), cache.prompt(60):
        cache.reset()
    with pytest.raises(KvwinnowError, match="cannot be pickled"):
        pickle.dumps(cache)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    with pytest.raises(KvwinnowError, match="has seen all 60 tokens given"):
        generate(model, cache)


def test_a_size_of_as_many_digits_as_are_read_is_a_size() -> None:
    model = tiny_model()
    cache = CompressedCache(model, f"streamingllm:budget={'9' * 24}TiB")
    assert torch.equal(generate(model, cache), generate(model, None))
    with pytest.raises(KvwinnowError, match=r"^budget='9{50,60}\.\.\.' is no budget") as refused:
        CompressedCache(model, f"streamingllm:budget={'9' * 400}GiB")
    assert len(str(refused.value)) < 300
