"""What is refused, in one sentence each, before anything runs: never an uncompressed run in silence."""

from __future__ import annotations

import inspect
from typing import Any

from packaging.version import Version

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.integrations.vllm.plan import most_held
from kvwinnow.integrations.vllm.settings import Settings, terms_of
from kvwinnow.ops.cpu import level

OLDEST, NEWEST = Version("0.28"), Version("0.32")
"""Versions of vLLM, by their first two numbers, that the tests have run with."""

OWN = "kvwinnow.integrations.vllm."
"""What the platform itself has named: a configuration is checked again in every process that gets it."""

_EXPECTED = (
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.remove_skipped_blocks", "num_prompt_tokens"),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.cache_blocks", "num_tokens"),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.get_num_blocks_to_allocate", "num_tokens"),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager._remove_blocks_in_range", "last_block"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_computed_blocks", "request"),
    ("vllm.v1.attention.backend", "AttentionBackend.customize_spec", "spec"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.build", "common_attn_metadata"),
)
"""What the plugin overrides or calls that is no public interface: module, name, one of its parameters."""


def check_version() -> None:
    """Refuse a vLLM that has not been tested, or whose parts are not what they were.

    Raises:
        UnsupportedSetupError: too old, too new, or a signature has changed.
    """
    import vllm

    found = Version(vllm.__version__)
    if not OLDEST.release[:2] <= found.release[:2] <= NEWEST.release[:2]:
        raise UnsupportedSetupError(
            f"vLLM {vllm.__version__} is not known to kvwinnow, which was tested with {OLDEST} to {NEWEST}; install "
            "one of these, or take the entry kvwinnow out of additional_config to run uncompressed"
        )
    for module, name, parameter in _EXPECTED:
        owner: Any = __import__(module, fromlist=["_"])
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is None or parameter not in inspect.signature(owner).parameters:
            raise UnsupportedSetupError(
                f"vLLM {vllm.__version__} has no {name} with a parameter {parameter}, on which kvwinnow rests; install "
                f"an unmodified vLLM between {OLDEST} and {NEWEST}"
            )


def check_config(config: Any) -> None:
    """Refuse what kvwinnow is not tested with.

    Raises:
        UnsupportedSetupError: the first thing found that is not served.
    """
    level.current()  # nor with instructions that are not there: kernels would refuse in the middle of a prompt
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config if model is not None else None
    types = set(getattr(text, "layer_types", None) or ["full_attention"])
    sliding = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    scheduler = config.scheduler_config.scheduler_cls
    found = (
        (model is None or model.runner_type != "generate", "a model that does not generate", "leave kvwinnow out"),
        (config.speculative_config is not None, "speculative decoding", "leave out --speculative-config"),
        (config.kv_transfer_config is not None, "a KV transfer connector", "leave out --kv-transfer-config"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallel", "set it to 1"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallel", "set it to 1"),
        (model is not None and model.use_mla, "multi-head latent attention", "take a model with K and V per head"),
        (model is not None and model.is_hybrid, "a hybrid of attention and state-space layers", "take another model"),
        (getattr(model, "is_mm_prefix_lm", False), "attention that is not causal in pictures", "take another model"),
        (getattr(parallel, "enable_dbo", False), "dual batch overlap", "leave out --enable-dbo"),
        (model is not None and model.is_encoder_decoder, "an encoder-decoder", "take a decoder"),
        (sliding is not None or types != {"full_attention"}, "sliding-window layers", "take a model without them"),
        (
            config.cache_config.cache_dtype.startswith(("fp8", "int8", "nvfp4", "turboquant")),
            f"--kv-cache-dtype {config.cache_config.cache_dtype}",
            "take auto",
        ),
        (
            scheduler is not None and not str(scheduler).startswith(OWN),
            f"the scheduler {scheduler}",
            "leave out --scheduler-cls",
        ),
        (getattr(config, "use_v2_model_runner", False), "model runner V2", "set VLLM_USE_V2_MODEL_RUNNER=0"),
    )
    for is_so, what, way_out in found:
        if is_so:
            raise UnsupportedSetupError(f"kvwinnow in vLLM is not tested with {what}, so it is refused; {way_out}")


def check_request(inputs: Any, params: Any, settings: Settings, config: Any) -> None:
    """Refuse a request that could never run: with ``prefill_budget`` the pool may be smaller than the longest request.

    Raises:
        UnsupportedSetupError: the request needs more blocks at once than the pool has.
    """
    cache = config.cache_config
    prompt = (inputs.get("prompt_token_ids") if hasattr(inputs, "get") else None) or ()
    if settings.prefill_budget is None or not cache.num_gpu_blocks or not prompt:
        return
    block = cache.block_size
    length = min(
        config.model_config.max_model_len, len(prompt) + (params.max_tokens or config.model_config.max_model_len)
    )
    terms = terms_of(params.extra_args, settings, len(prompt), block)
    chunk = config.scheduler_config.max_num_batched_tokens
    held = length if terms is None else most_held(terms, length, chunk)
    pool = (cache.num_gpu_blocks // max(1, config.parallel_config.data_parallel_size) - 1) * block
    if held > pool:
        raise UnsupportedSetupError(
            f"a prompt of {len(prompt):,} tokens and up to {length - len(prompt):,} new ones hold {held:,} slots at "
            f"once, and the pool has {pool:,}; ask for fewer new tokens, or give a policy that evicts while decoding"
        )
