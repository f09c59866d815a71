"""What a user may ask vLLM for, and the one sentence about what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvwinnow import H2O, SnapKV, WholeBlocks
from kvwinnow.errors import KvwinnowError, PolicyError, UnsupportedSetupError
from kvwinnow.integrations.vllm.attention import EvictingImpl
from kvwinnow.integrations.vllm.plan import Terms
from kvwinnow.integrations.vllm.platform import served_backend
from kvwinnow.integrations.vllm.refusals import check_config, check_request
from kvwinnow.integrations.vllm.settings import Settings, read_settings, request_policy, served, terms_of


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, "text", {"kvwinnow": None}])
def test_without_an_entry_there_are_no_settings(config: object) -> None:
    assert read_settings(config) is None


def test_settings_are_read_from_their_table() -> None:
    assert read_settings({"kvwinnow": {}}) == Settings("none", None)
    given = {"policy": "snapkv:budget=1024", "prefill_budget": 2048}
    assert read_settings({"kvwinnow": given}) == Settings("snapkv:budget=1024", 2048)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (True, 'additional_config["kvwinnow"]=True is a bool; give a table such as {"policy": "snapkv:budget=1024"}'),
        ({"policies": "h2o"}, "has no entry 'policies'; there are policy, prefill_budget"),
        ({"policy": 3}, 'kvwinnow=3 is no text; give that of a policy, "h2o:budget=512", or "none"'),
        ({"policy": "h3o"}, "h3o"),
        ({"policy": " "}, 'leave it out, or write "none" to stay uncompressed'),
        ({"prefill_budget": 2.5}, "prefill_budget=2.5 must be a whole number of tokens, 1 or more"),
        ({"prefill_budget": True}, "prefill_budget=True must be a whole number"),
        ({"prefill_budget": -1}, "prefill_budget=-1 must be a whole number"),
        (
            {"policy": "snapkv:budget=512", "prefill_budget": 500},
            "prefill_budget=500 is under the 512 tokens that snapkv",
        ),
        ({"policy": "snapkv:budget=0.1,window=32,sinks=4", "prefill_budget": 35}, "is under the 36 tokens that snapkv"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(entry: object, says: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(says)) as caught:
        read_settings({"kvwinnow": entry})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["none", "full"])
def test_a_request_may_stay_uncompressed(text: str) -> None:
    settings = Settings("snapkv:budget=64")
    assert served(text) is None
    assert request_policy({"kvwinnow": text}, settings) == text
    assert terms_of({"kvwinnow": text}, settings, 1000, 16) is None


def test_a_request_s_own_policy_comes_before_the_server_s() -> None:
    settings = Settings("snapkv:budget=64")
    own = {"kvwinnow": "h2o:budget=32", "other": 1}
    assert request_policy(None, settings) == request_policy({"other": 1}, settings) == "snapkv:budget=64"
    assert request_policy(own, settings) == "h2o:budget=32"
    assert terms_of(None, settings, 1000, 16) == Terms(WholeBlocks(SnapKV(64), 16), 64, 1000, 16)
    assert terms_of(own, settings, 1000, 16) == Terms(WholeBlocks(H2O(32), 16), 32, 1000, 16)
    assert terms_of(None, Settings(), 1000, 16) is None


def test_a_share_is_one_of_the_request_s_own_prompt() -> None:
    terms = terms_of({"kvwinnow": "snapkv:budget=0.125,window=32,sinks=4"}, Settings(), 1600, 16)
    assert terms is not None
    assert terms.budget == 200
    short = terms_of({"kvwinnow": "snapkv:budget=0.125,window=32,sinks=4"}, Settings(), 80, 16)
    assert short is not None
    assert short.budget == 36  # what SnapKV cannot do without


def test_between_chunks_no_less_stays_than_at_the_end() -> None:
    settings = Settings("none", 400)
    for text, between in (("h2o:budget=128", 400), ("h2o:budget=401", 401), ("h2o:budget=0.5", 800)):
        terms = terms_of({"kvwinnow": text}, settings, 1600, 16)
        assert terms is not None
        assert terms.prefill_budget == between


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pyramidkv:budget=64", "pyramidkv gives layers different budgets"),
        ("knorm:budget=64", "take snapkv, h2o, hybrid, streamingllm, slidingwindow, tova, keydiff or compose"),
        ("expectedattention:budget=64", "which is not measured in vLLM"),
        ("compose:prompt=expectedattention,decode=h2o,budget=64", "which is not measured in vLLM"),
        ("h2o:budget=64MiB", "budget=64MiB is a size, and vLLM's pool has its own; give tokens (1024) or a share"),
        ("blocks:policy=h2o(budget=64)", "vLLM evicts whole blocks anyway; give the policy inside, h2o"),
    ],
)
def test_policies_that_vllm_cannot_serve_are_refused(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(says)):
        served(text)


def test_a_back_end_without_a_reader_is_refused() -> None:
    with pytest.raises(UnsupportedSetupError, match="back end RocmBackend, for which kvwinnow has no reader"):
        served_backend("vllm.v1.attention.backends.rocm.RocmBackend")


# -- configurations, of which only the fields that are looked at are made ---------------------------


def configuration(**changes: Any) -> SimpleNamespace:
    """A configuration that is served, but for ``changes``, whose names have dots."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            runner_type="generate",
            use_mla=False,
            is_hybrid=False,
            is_encoder_decoder=False,
            max_model_len=2000,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        scheduler_config=SimpleNamespace(scheduler_cls=None, max_num_batched_tokens=100),
        cache_config=SimpleNamespace(cache_dtype="auto", num_gpu_blocks=41, block_size=16),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner: Any = config
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return config


def test_a_plain_configuration_is_served() -> None:
    check_config(configuration())
    check_config(
        configuration(scheduler_config__scheduler_cls="kvwinnow.integrations.vllm.scheduler.EvictingScheduler")
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallel"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallel"),
        ({"model_config__use_mla": True}, "multi-head latent attention"),
        ({"model_config__is_hybrid": True}, "a hybrid of attention and state-space layers"),
        ({"model_config__is_encoder_decoder": True}, "an encoder-decoder"),
        ({"model_config__runner_type": "pooling"}, "a model that does not generate"),
        ({"model_config": None}, "a model that does not generate"),
        ({"model_config__hf_text_config": SimpleNamespace(sliding_window=8)}, "sliding-window layers"),
        ({"model_config__hf_text_config": SimpleNamespace(layer_types=["chunked_attention"])}, "sliding-window layers"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "a KV transfer connector"),
        ({"scheduler_config__scheduler_cls": "mine.Scheduler"}, "the scheduler mine.Scheduler"),
        ({"use_v2_model_runner": True}, "model runner V2"),
        ({"parallel_config__enable_dbo": True}, "dual batch overlap"),
        ({"model_config__is_mm_prefix_lm": True}, "attention that is not causal in pictures"),
    ],
)
def test_what_is_not_tested_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=f"kvwinnow in vLLM is not tested with {re.escape(says)}, so it is"):
        check_config(configuration(**change))


def test_instructions_that_are_no_level_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_config(configuration())
    monkeypatch.setenv("KVWINNOW_CPU_LEVEL", "fast")
    with pytest.raises(UnsupportedSetupError, match="'fast' is no level"):
        check_config(configuration())


@pytest.mark.parametrize(
    ("attribute", "says"),
    [("alibi_slopes", "ALiBi"), ("sinks", "sinks in the softmax"), ("kv_sharing_target_layer_name", "another layer's")],
)
def test_layers_that_add_something_to_attention_are_refused(attribute: str, says: str) -> None:
    class Attention:
        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)

    class Evicting(EvictingImpl, Attention):
        pass

    Evicting(**{attribute: None})
    with pytest.raises(UnsupportedSetupError, match=says):
        Evicting(**{attribute: [0.5]})


def request(prompt: int, policy: str | None, new: int | None, settings: Settings, **changes: Any) -> None:
    params = SimpleNamespace(extra_args={"kvwinnow": policy}, max_tokens=new)
    check_request({"prompt_token_ids": [1] * prompt}, params, settings, configuration(**changes))


def test_a_request_that_could_never_run_is_refused() -> None:
    """The pool has 40 blocks of 16, one being nobody's."""
    settings = Settings("none", 256)
    request(600, "none", 40, settings)
    request(1500, "h2o:budget=256", None, settings)
    request(1500, "snapkv:budget=256", 252, settings)  # 256, a chunk of 100 and two blocks while 252 tokens are added
    with pytest.raises(UnsupportedSetupError, match="600 tokens and up to 41 new ones hold 641 slots at once, and the"):
        request(600, "none", 41, settings)
    with pytest.raises(UnsupportedSetupError, match="give a policy that evicts while decoding"):
        request(1500, "snapkv:budget=256", 253, settings)
    with pytest.raises(KvwinnowError, match="hold 1,500 slots"):
        request(1400, "compose:budget=64,prompt=full,decode=h2o", 100, settings)  # which cuts no prompt
    # Without prefill_budget vLLM itself asks for a pool that holds the longest request.
    request(600, "none", 41, Settings())
