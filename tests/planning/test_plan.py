"""``plan``: what real caches take, what fits, and that what is said to fit does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import kvwinnow
from kvwinnow import CompressedCache, SnapKV
from kvwinnow.errors import CodecError, KvwinnowError, PolicyError, UnsupportedModelError
from kvwinnow.planning import Architecture, Attention, Latent, Parameters, Plan, State, find, plan
from kvwinnow.planning.caches import with_budget
from kvwinnow.planning.config import architecture
from kvwinnow.planning.planner import ContextPlan
from kvwinnow.planning.weights import FORMATS
from kvwinnow.policies import POLICIES, WholeBlocks
from tests.models import KINDS, shown, tiny_model, tiny_tokens

K, GIB = 1024, 2**30
SMALL = Architecture("small", (Attention(8, 2, 64),) * 4, parameters=Parameters(10**6), trained=8192)
MIXED = dataclasses.replace(SMALL, layers=(Attention(8, 2, 64, 100), Attention(8, 2, 64)) * 2)


def at(model: Any, context: int | str, **asked: Any) -> ContextPlan:
    return plan(model, context=context, **asked).contexts[0]


# -- against caches --------------------------------------------------------------------------------


def in_float32(model: Any) -> Architecture:
    return dataclasses.replace(architecture(model.config.to_dict()), dtype="fp32")


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning", "ignore:.*has nothing to evict:UserWarning")
@pytest.mark.parametrize("kind", KINDS, ids=shown)
def test_the_plan_is_what_the_cache_of_every_family_takes(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    ids, _ = tiny_tokens(70, 70)
    cache = CompressedCache(model, "snapkv:budget=0.6", dtype="int4")
    planned = at(in_float32(model), 70, batch=2, policy="snapkv:budget=0.6", dtype="int4", new=5)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        assert cache.nbytes() == planned.kept
        for _ in range(5):
            model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.nbytes() == planned.kept_later


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_is_what_the_cache_of_every_policy_takes(policy: str) -> None:
    model = tiny_model("gemma2", layers=4)
    text = {"full": "full", "blocks": "blocks:policy=h2o(budget=48)"}.get(policy, f"{policy}:budget=48")
    ids, _ = tiny_tokens(90)
    cache = CompressedCache(model, text, k_dtype="int8", v_dtype="fp4")
    planned = at(in_float32(model), 90, policy=text, k_dtype="int8", v_dtype="fp4", new=40)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        assert cache.nbytes() == planned.kept
        for _ in range(40):
            model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.nbytes() == planned.kept_later


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon", "qwen3_moe"])
def test_the_full_cache_is_what_transformers_takes(kind: str) -> None:
    model = tiny_model(kind)
    ids, _ = tiny_tokens(33, 33)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == at(in_float32(model), 33, batch=2).full


def test_a_config_of_transformers_is_a_model() -> None:
    config = tiny_model("qwen3").config
    assert plan(config, context=10) == plan(config.to_dict(), context=10)
    assert kvwinnow.plan is plan


# -- by hand ---------------------------------------------------------------------------------------


def test_sliding_layers_stop_at_their_window() -> None:
    token = 2 * 2 * 64 * 2
    assert at(MIXED, 50).full == 4 * 50 * token
    assert at(MIXED, 1000).full == 2 * (1000 + 100) * token
    assert plan(MIXED, context=1).model.bytes_per_token == 4 * token
    assert plan(MIXED, context=1).model.bytes_per_late_token == 2 * token


def test_new_tokens_are_in_the_full_cache() -> None:
    assert at(SMALL, 100, new=28).full == at(SMALL, 128).full


def test_blocks_are_rounded_up_layer_by_layer() -> None:
    token = 2 * 2 * 64 * 2
    assert at(MIXED, 1000).full_blocks == 2 * (1008 + 112) * token
    assert at(MIXED, 1000, block=1).full_blocks == at(MIXED, 1000).full
    assert at(MIXED, 1024, block=1024, batch=3).full_blocks == 3 * 2 * (1024 + 1024) * token


def test_states_do_not_grow() -> None:
    hybrid = find("qwen3-next-80b-a3b")
    # 12 of 48 layers cache 2 KV heads of 256; the others hold 32 matrices of 128 x 128 in float32 and the last four
    # inputs of a convolution over 2 x 16 x 128 + 32 x 128 channels in bfloat16.
    state = 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2)
    assert at(hybrid, 1).full == state + 12 * 2 * 2 * 256 * 2
    assert at(hybrid, 10_000).full == state + 10_000 * 12 * 2 * 2 * 256 * 2


def test_the_peaks_of_prefilling() -> None:
    planned = at("llama-3.1-8b", "128k", policy="snapkv:budget=1024", chunk="4k")
    one_layer = 2 * 8 * 128 * 2
    assert planned.kept is not None
    assert planned.prefill == planned.kept + 4096 * one_layer
    assert planned.prefill_whole == planned.kept + 128 * K * one_layer
    assert planned.prefill_evicting_later == planned.full == 128 * K * 32 * one_layer
    assert planned.budget == 1024


def test_weights_keep_embeddings_at_16_bits_where_checkpoints_do() -> None:
    found = find("llama-3.1-70b")
    assert found.parameters is not None
    embeddings = 2 * 128256 * 8192
    assert found.parameters.embeddings == embeddings
    rest = 70_553_706_496 - embeddings
    assert plan(found, weights_dtype="bf16").weights == 2 * 70_553_706_496
    assert plan(found, weights_dtype="fp32").weights == 4 * 70_553_706_496
    assert plan(found, weights_dtype="fp8").weights == rest + 2 * embeddings
    assert plan(found, weights_dtype="int4").weights == rest * 4.15625 / 8 + 2 * embeddings
    assert plan(found).weights_dtype == "bf16"
    assert plan("gpt-oss-20b").weights_dtype == "mxfp4"
    assert plan("deepseek-v3").weights_dtype == "fp8"


# -- several GPUs ----------------------------------------------------------------------------------


def test_tensor_parallelism_divides_kv_heads_and_repeats_them_when_there_are_more_gpus() -> None:
    one = Attention(32, 8, 128)
    assert one.shard(4) == Attention(8, 2, 128)
    assert one.shard(8) == Attention(4, 1, 128)
    assert one.shard(16) == Attention(2, 1, 128)
    whole = at("llama-3.1-8b", "8k").full
    assert at("llama-3.1-8b", "8k", gpu="H100x4").full == whole
    assert at("llama-3.1-8b", "8k", gpu="H100x16").full == 2 * whole


def test_every_gpu_holds_the_whole_latent() -> None:
    assert Latent(128, 512, 64).shard(8) == Latent(16, 512, 64)
    one = at("deepseek-v3", "8k", gpu="H200x1").full
    eight = at("deepseek-v3", "8k", gpu="H200x8")
    assert eight.full == 8 * one
    assert eight.needed_per_gpu == one


def test_states_are_divided() -> None:
    assert State(32, 1000, 64).shard(2) == State(16, 500, 32)
    assert at("qwen3-next-80b-a3b", 1000, gpu="H100x2").full == at("qwen3-next-80b-a3b", 1000).full


@pytest.mark.parametrize("gpus", [3, 6, 64])
def test_heads_that_cannot_be_shared_evenly_are_refused(gpus: int) -> None:
    with pytest.raises(KvwinnowError, match=f"{gpus} GPUs cannot share"):
        plan("llama-3.1-8b", context=1024, gpu=f"H100x{gpus}")


def test_kvwinnows_cache_is_divided_too() -> None:
    asked = {"policy": "h2o:budget=0.25", "dtype": "int4", "batch": 2}
    one, four = at("llama-3.1-8b", "8k", **asked), at("llama-3.1-8b", "8k", gpu="H100x4", **asked)
    assert four.kept == one.kept
    assert four.needed_per_gpu < one.needed_per_gpu / 2


def test_a_budget_in_bytes_is_one_for_all_gpus() -> None:
    one = at("llama-3.1-8b", "128k", policy="snapkv:budget=1GiB")
    four = at("llama-3.1-8b", "128k", policy="snapkv:budget=1GiB", gpu="H100x4")
    assert one.kept == four.kept
    assert one.budget == four.budget
    assert one.kept is not None
    assert one.kept <= GIB


# -- what fits -------------------------------------------------------------------------------------


def test_what_is_left_of_a_gpu() -> None:
    gpu = plan("llama-3.1-8b", context="8k", gpu="24GB", overhead="2GB").gpu
    assert gpu is not None
    assert (gpu.memory, gpu.overhead, gpu.weights) == (24 * 10**9, 2 * 10**9, 2 * 8_030_261_248)
    assert gpu.free == 22 * 10**9 - 2 * 8_030_261_248
    assert plan("llama-3.1-8b", gpu="24GB").contexts[0].fits is False  # 17.2 GB of cache, 5.5 GB left


def test_weights_that_do_not_fit_leave_less_than_nothing() -> None:
    planned = plan("llama-3.1-70b", gpu="H100", fit=True)
    assert planned.gpu is not None
    assert planned.gpu.free < 0
    assert planned.contexts[0].fits is False
    assert planned.contexts[0].requests == 0
    assert planned.fit is not None
    assert planned.fit.longest_context == 0
    assert planned.fit.contexts[0].options == ()
    assert planned.fit.contexts[0].gpus_for_full == 4


def test_weights_that_do_not_fit_are_told_what_would() -> None:
    gpu = plan("llama-3.1-70b", gpu="H100").gpu
    assert gpu is not None
    assert [found.weights_dtype for found in gpu.lighter] == ["int4", "nvfp4", "fp8", "int8"]
    for found in gpu.lighter:
        again = plan("llama-3.1-70b", gpu="H100", weights_dtype=found.weights_dtype)
        assert again.gpu is not None
        assert (again.weights, again.gpu.free) == (found.weights, found.free)
        assert (again.gpu.lighter, again.gpu.gpus_for_weights) == ((), None)
    assert gpu.gpus_for_weights == 2
    on_two = plan("llama-3.1-70b", gpu="H100x2").gpu
    assert on_two is not None
    assert on_two.free > 0


def test_weights_that_fit_nowhere_are_told_nothing() -> None:
    gpu = plan("llama-3.1-405b", gpu="1GB").gpu
    assert gpu is not None
    assert (gpu.lighter, gpu.gpus_for_weights) == ((), None)


def fits(model: Any, context: int, **asked: Any) -> bool:
    found = at(model, context, **asked).fits
    assert found is not None
    return found


POLICY_TEXTS = (
    None,
    "full",
    "snapkv:budget=0.3",
    "h2o:budget=500",
    "streamingllm:budget=0.1,evict_every=8",
    "pyramidkv:budget=0.2",
)


@settings(max_examples=40)
@given(
    st.sampled_from([SMALL, MIXED, find("llama-3.1-8b"), find("gemma-3-4b"), find("gpt-oss-20b")]),
    st.sampled_from(POLICY_TEXTS),
    st.sampled_from([None, "int8", "int4"]),
    st.integers(1, 3),
    st.integers(0, 300),
    st.sampled_from(["17GB", "24GB", "80GiBx2"]),
)
def test_the_longest_context_fits_and_one_token_more_does_not(
    model: Architecture, policy: str | None, dtype: str | None, batch: int, new: int, gpu: str
) -> None:
    asked = {"policy": policy, "dtype": dtype, "batch": batch, "new": new, "gpu": gpu}
    found = plan(model, context=4096, fit=True, **asked).fit
    assert found is not None
    longest = found.longest_context
    if longest is None:
        assert fits(model, 2**29, **asked)
    else:
        assert longest == 0 or fits(model, longest, **asked)
        assert not fits(model, longest + 1, **asked)


@settings(max_examples=25)
@given(
    st.sampled_from([find("llama-3.1-8b"), find("llama-3.1-70b"), find("gemma-2-9b"), MIXED]),
    st.sampled_from(["snapkv", "h2o", "pyramidkv", "expectedattention", "compose", "knorm:sinks=2"]),
    st.integers(100, 2 * 10**6),
    st.integers(1, 4),
    st.sampled_from(["24GB", "48GiBx2", "H100"]),
)
def test_the_options_fit_and_one_token_more_does_not(
    model: Architecture, policy: str, context: int, batch: int, gpu: str
) -> None:
    asked: dict[str, Any] = {"context": context, "batch": batch, "gpu": gpu, "weights_dtype": "int4"}
    planned = plan(model, policy=policy, fit=True, **asked)
    assert planned.fit is not None
    assert planned.gpu is not None
    for option in planned.fit.contexts[0].options:
        stored = {"k_dtype": option.k_dtype, "v_dtype": option.v_dtype}
        again = plan(model, policy=option.policy, **stored, **asked)
        assert again.contexts[0].fits
        assert again.contexts[0].needed_per_gpu == option.nbytes
        if option.tokens is None:
            assert option.policy == "full"
            assert option.share == 1
        elif not option.policy.startswith("pyramidkv"):  # whose layers' parts are rounded, each in its own way
            assert option.share == option.tokens / context
            more = with_budget(kvwinnow.parse(option.policy), option.tokens + 1)
            assert not plan(model, policy=more, **stored, **asked).contexts[0].fits


@settings(max_examples=40)
@given(
    st.sampled_from([SMALL, MIXED, find("deepseek-v3"), find("qwen3-next-80b-a3b"), find("gemma-3-12b")]),
    st.integers(1, 10**6),
    st.integers(1, 10**5),
    st.integers(1, 16),
)
def test_the_full_cache_grows_with_context_and_rows(model: Architecture, context: int, more: int, batch: int) -> None:
    one, longer = at(model, context, batch=batch), at(model, context + more, batch=batch)
    assert one.full <= longer.full <= one.full + batch * more * model.bytes_per_token
    assert one.full == batch * at(model, context).full
    assert one.full <= one.full_blocks < one.full + batch * 16 * model.bytes_per_token


@settings(max_examples=40)
@given(
    st.sampled_from(POLICY_TEXTS[1:]), st.integers(40, 10**5), st.integers(1, 8), st.sampled_from([None, "int4", "fp8"])
)
def test_kvwinnows_cache_grows_with_context_and_rows(policy: str, context: int, batch: int, dtype: str | None) -> None:
    def kept(tokens: int, rows: int) -> int:
        found = at(MIXED, tokens, policy=policy, dtype=dtype, batch=rows).kept
        assert found is not None
        return found

    assert kept(context, batch) <= kept(context + 1000, batch)
    assert kept(context, batch) == batch * kept(context, 1)


@pytest.mark.parametrize("policy", [None, "snapkv:budget=0.1", "h2o:budget=2048"])
def test_requests_are_as_many_as_fit_one_after_another(policy: str | None) -> None:
    planned = plan("llama-3.1-8b", context="64k", gpu="80GB", policy=policy, new=100)
    one, gpu = planned.contexts[0], planned.gpu
    assert gpu is not None
    assert one.requests is not None
    after = one.full_blocks if policy is None else max(one.kept or 0, one.kept_later or 0)
    assert one.requests > 1
    taken = (one.requests - 1) * after + one.needed_per_gpu
    assert taken <= gpu.free < taken + after


def test_a_policy_that_evicts_while_decoding_may_have_more_than_the_prompt() -> None:
    found = plan(SMALL, context=1000, new=9000, gpu="7MB", overhead="0", policy="h2o", fit=True).fit
    assert found is not None
    option = found.contexts[0].options[0]
    assert option.tokens is not None
    assert 1000 < option.tokens < 10_000
    assert option.share == option.tokens / 10_000


def test_the_gpus_that_the_full_cache_needs() -> None:
    planned = plan("llama-3.1-70b", context=["8k", "1M"], gpu="H100", fit=True)
    assert planned.fit is not None
    needed = {found.context: found.gpus_for_full for found in planned.fit.contexts}
    # Each has 77 GB without overhead. Weights of 141 GB leave 6.4 GB of each of 2, for 1.3 GB of cache, and 59 GB of
    # each of 8, for 43 GB.
    assert needed == {8 * K: 2, K * K: 8}
    for context, gpus in needed.items():
        assert fits("llama-3.1-70b", context, gpu=f"H100x{gpus}")
        assert not fits("llama-3.1-70b", context, gpu=f"H100x{(gpus or 0) // 2}")


# -- as a document ---------------------------------------------------------------------------------


def test_a_plan_is_a_json_document() -> None:
    planned = plan("gemma-3-4b", context=["8k", "128k"], gpu="L4", policy="h2o", dtype="int4", fit=True)
    document = json.loads(json.dumps(planned.to_json()))
    assert document["contexts"][1]["context"] == 131072
    assert document["contexts"][1]["full"] == planned.contexts[1].full
    assert document["model"]["bytes_per_token"] == 139264
    assert document["units"].startswith("1k = 1,024 tokens")
    assert {field.name for field in dataclasses.fields(Plan)} == set(document)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error", "parts"),
    [
        ({"context": 0}, KvwinnowError, ("context 0", "1 or more")),
        ({"context": []}, KvwinnowError, ("no context", "128k")),
        ({"context": 1.5}, KvwinnowError, ("context 1.5", "1 or more")),
        ({"context": b"7"}, KvwinnowError, ("context b'7'",)),
        ({"context": object()}, KvwinnowError, ("context <object",)),
        ({"batch": 0}, KvwinnowError, ("batch=0", "1 or more")),
        ({"batch": -1}, KvwinnowError, ("batch=-1",)),
        ({"batch": 1.5}, KvwinnowError, ("batch=1.5",)),
        ({"block": 0}, KvwinnowError, ("block=0",)),
        ({"chunk": 0}, KvwinnowError, ("0",)),
        ({"new": -1}, KvwinnowError, ("-1",)),
        ({"new": 0.0}, KvwinnowError, ("new tokens 0.0", "0 or more")),
        ({"new": False}, KvwinnowError, ("new tokens False",)),
        ({"gpu": 24}, KvwinnowError, ("a int", "24GiB")),
        ({"gpu": []}, KvwinnowError, ("a list", "24GiB")),
        ({"policy": 7}, PolicyError, ("7", "int", "snapkv")),
        ({"policy": False}, PolicyError, ("False", "bool", "snapkv")),
        ({"dtype": False}, CodecError, ("False", "int4")),
        ({"k_dtype": []}, CodecError, ("[]", "int4")),
        ({"v_dtype": np.array([1, 2])}, CodecError, ("int4",)),
        ({"weights_dtype": ""}, KvwinnowError, ("weights dtype ''", "int4")),
        ({"weights_dtype": ["int4"]}, KvwinnowError, ("weights dtype ['int4']", "nvfp4")),
        ({"overhead": "all"}, KvwinnowError, ("overhead 'all'", "10%")),
        ({"gpu": "24GB", "overhead": None}, KvwinnowError, ("overhead None", "10%")),
        ({"gpu": "H1000"}, KvwinnowError, ("H1000", "H100-80GB")),
        ({"gpu": "24GB", "overhead": "all"}, KvwinnowError, ("overhead 'all'", "10%")),
        ({"weights_dtype": "int5"}, KvwinnowError, ("int5", "int4")),
        ({"weights_dtype": "mxfp4"}, KvwinnowError, ("experts", "int4")),
        ({"parameters": "many"}, KvwinnowError, ("parameters 'many'", "70.6B")),
        ({"fit": True}, KvwinnowError, ("GPU", "--gpu")),
        ({"policy": "snapkw"}, PolicyError, ("snapkw", "snapkv")),
        ({"policy": "snapkv:budget=8"}, PolicyError, ("budget=8", "36")),
        ({"policy": "snapkv:budget=64KiB"}, PolicyError, ("64KiB", "at least 36 tokens")),
        ({"dtype": "int3"}, CodecError, ("int3", "int4")),
        ({"dtype": "int4:group=48"}, CodecError, ("group=48", "128", "64")),
        ({"dtype": "int4", "k_dtype": "int8"}, KvwinnowError, ("int4", "k_dtype")),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(
    asked: dict[str, Any], error: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        plan("llama-3.1-8b", **{"context": 1024, **asked})
    for part in parts:
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("asked", [{"policy": "h2o"}, {"dtype": "int4"}, {"v_dtype": "fp8"}], ids=str)
@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-next-80b-a3b"])
def test_a_policy_for_a_model_that_is_not_served_is_refused(model: str, asked: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"leave the (policy|cache's dtypes) out to plan the full cache"):
        plan(model, context=1024, **asked)  # type: ignore[arg-type]
    assert plan(model, context=1024).model.unserved is not None


def test_a_budget_within_a_policy_follows() -> None:
    policy = kvwinnow.parse("compose:budget=300,prompt=snapkv(window=16),decode=h2o(sinks=2)")
    assert str(with_budget(policy, 500)) == str(policy).replace("budget=300", "budget=500")
    blocks = WholeBlocks(policy, 8)
    assert with_budget(blocks, 500) == WholeBlocks(with_budget(policy, 500), 8)
    assert with_budget(SnapKV(budget=0.5), 99) == SnapKV(budget=99)


def test_numbers_of_numpy_are_planned() -> None:
    by_numpy = plan("llama-3.1-8b", context=np.int64(1024), batch=np.int32(2), new=np.uint8(3))  # type: ignore[arg-type]
    assert by_numpy == plan("llama-3.1-8b", context=1024, batch=2, new=3)
    json.dumps(by_numpy.to_json())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Attention(8, 0, 64),
        lambda: Attention(8, 2, 64.0),  # type: ignore[arg-type]
        lambda: Attention(8, 2, 64, window=0),
        lambda: Latent(8, -1, 64),
        lambda: State(True, 1, 1),
        lambda: State(8, -1, 1),
    ],
)
def test_a_layer_made_by_hand_has_sizes(make: Callable[[], object]) -> None:
    with pytest.raises(KvwinnowError, match=r"of a layer \((Attention|Latent|State)\) must be a whole number"):
        make()


def test_a_budget_without_end_is_refused_at_once() -> None:
    with pytest.raises(PolicyError, match="is no budget"):
        plan("llama-3.1-8b", context=1024, policy="snapkv:budget=" + "9" * 4000 + "GB")


def test_layers_of_different_shapes_are_not_served() -> None:
    uneven = dataclasses.replace(SMALL, layers=(Attention(8, 2, 64), Attention(8, 4, 64)))
    with pytest.raises(UnsupportedModelError, match="different shapes"):
        plan(uneven, context=10, policy="h2o")


def test_unknown_weights_are_said_and_may_be_given() -> None:
    novel = {"model_type": "novel", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    planned = plan(novel, context=1024)
    assert planned.weights is None
    assert planned.parameters is None
    with pytest.raises(KvwinnowError, match="--parameters 70B"):
        plan(novel, context=1024, gpu="24GB")
    assert plan(novel, context=1024, gpu="24GB", parameters="7B").weights == 14 * 10**9
    assert plan(novel, context=1024, parameters="7B", weights_dtype="int4").weights == 7 * 10**9 * 4.15625 / 8
    with pytest.raises(KvwinnowError, match="int5"):
        plan(novel, context=1024, weights_dtype="int5")
    with pytest.raises(KvwinnowError, match="how long a context"):
        plan(novel)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(KvwinnowError, match="the model is a list"):
        plan([1], context=10)  # type: ignore[arg-type]


def test_formats_are_named_as_people_name_them() -> None:
    assert {"fp32", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4"} <= set(FORMATS)
    assert isinstance(SnapKV(budget=100), kvwinnow.Policy)
