"""From a model's config.json to its ``Architecture``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvwinnow.errors import KvwinnowError, UnsupportedModelError
from kvwinnow.planning.architecture import Architecture, Attention, Latent, Layer, State
from kvwinnow.planning.parameters import count

Config = Mapping[str, Any]

MOST_LAYERS = 10_000
"""More layers than any model has: what a config says beyond is a mistake."""

# The names by which configs call one thing, in the order in which they are tried.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
_HEAD_DIM = ("head_dim", "attention_head_size", "kv_channels")
_TRAINED = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
_TEXT = ("text_config", "llm_config", "language_config")

# Fields of layers whose memory cannot be told from the fields that are read here.
_FOREIGN = {
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "state_size": "state-space layers",
    "attn_layer_period": "state-space layers",
    "hybrid_override_pattern": "state-space layers",
    "block_types": "recurrent layers",
    "layers_block_type": "recurrent layers",
    "attention_hidden_size": "recurrent layers",
    "conv_L_cache": "convolution layers",
    "cross_attention_layers": "cross-attention layers",
    "global_head_dim": "layers of different head dimensions",
    "block_configs": "layers of different shapes",
}

# Families of which every layer slides where the config gives a window. In others a window without types of layers may
# mean anything, so all layers are counted whole and the plan says so.
_ALL_SLIDE = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2", "qwen3_moe", "qwen2_moe"}
_EVERY_OTHER = {"gemma2": 4096, "gpt_oss": 128}
_PATTERN = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_ALIBI = {"bloom", "mpt"}

# What the config class of a family does not write into config.json because it is its default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {
        "sliding_window": 4096, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 262_208, "max_position_embeddings": 131_072,
    },
    "qwen3_next": {"head_dim": 256},
}  # fmt: skip

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def architecture(config: Config, *, name: str = "", source: str = "") -> Architecture:
    """Read what a model caches from its config.

    Args:
        config: the content of a config.json, or what ``config.to_dict()`` of transformers gives.
        name: of the model; "": its model_type.
        source: where the config lies.

    Raises:
        KvwinnowError: a field that is needed is missing or no number.
        UnsupportedModelError: a kind of layer whose memory cannot be told.
    """
    if not isinstance(config, Mapping):
        raise KvwinnowError(f"the config is a {type(config).__name__}; give the content of a config.json, a mapping")
    notes: list[str] = []
    text = _text_part(config, notes)
    kind = str(text.get("model_type") or "")
    text = {**_DEFAULTS.get(kind, {}), **{key: value for key, value in text.items() if value is not None}}
    called = name or kind or "the model"
    _refuse_foreign(text, config, called)
    number, heads = _needed(text, _LAYERS, called), _needed(text, _HEADS, called)
    if number > MOST_LAYERS:
        raise KvwinnowError(
            f"the config of {called} has {number:,} layers, and none has more than {MOST_LAYERS:,}; correct it"
        )
    hidden = _needed(text, _HIDDEN, called)
    trained = trained_length(text)
    if _number(text, "kv_lora_rank"):
        rope_dim = _needed(text, ("qk_rope_head_dim",), called)
        layers: tuple[Layer, ...] = (Latent(heads, int(text["kv_lora_rank"]), rope_dim),) * number
        unserved: str | None = "its layers cache MLA latents, one vector for all heads"
    else:
        kv_heads, dim = _kv_heads(text, kind, heads), _head_dim(text, heads, hidden, called)
        if kind == "falcon" and text.get("new_decoder_architecture"):
            notes.append(
                "transformers' own cache holds each KV head once for every query head; other engines hold it once"
            )
        if heads % kv_heads:
            raise KvwinnowError(
                f"the config of {called} has {heads} heads and {kv_heads} KV heads, which must divide them"
            )
        full = Attention(heads, kv_heads, dim)
        layers = tuple(_layer(text, full, what, trained, called) for what in _kinds(text, kind, number, called, notes))
        unserved = _unserved(text, kind, layers)
        shared = _number(text, "num_kv_shared_layers", least=0) or 0
        if shared:  # the upper layers read what a lower one cached
            layers, unserved = layers[: number - shared], "its upper layers share the keys and values of lower ones"
    dtype = _dtype(config) or _dtype(text)
    weights = _weights(config.get("quantization_config") or text.get("quantization_config"), dtype or "bf16", notes)
    return Architecture(
        name=called,
        layers=layers,
        dtype=dtype or "bf16",
        hidden=hidden,
        trained=trained,
        parameters=count(text, layers, hidden),
        weights=weights,
        unserved=unserved,
        notes=tuple(notes),
        source=source,
        dtype_assumed=dtype is None,
    )


def trained_length(config: Config) -> int | None:
    """Positions a model serves, stretched by its RoPE scaling (linear, dynamic, YaRN) where that is longer."""
    stated = next((config[key] for key in _TRAINED if _is_number(config.get(key)) and config[key] > 0), None)
    if stated is None or str(config.get("model_type")).startswith("gemma3"):  # they state the stretched length
        return stated
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    lengths = [int(stated)]
    for part in [part for part in rope.values() if isinstance(part, Mapping)] or [rope]:
        factor = part.get("factor")
        if str(part.get("rope_type") or part.get("type")) in ("linear", "dynamic", "yarn"):
            original = _number(part, "original_max_position_embeddings") or stated
            stretch = factor if isinstance(factor, int | float) and math.isfinite(factor) else 1
            lengths.append(int(original * stretch))
    return max(lengths)


def _text_part(config: Config, notes: list[str]) -> Config:
    """The config of the text decoder, which in models of several kinds of input lies inside."""
    for key in _TEXT:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            notes.append("only the text decoder is counted; encoders of images or sound have weights of their own")
            kind = inner.get("model_type") or config.get("model_type")
            # A decoder of the same family as the whole has its own name in some releases.
            kind = {"gemma3": "gemma3_text", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2"}.get(str(kind), kind)
            outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            return {**inner, **outer, "model_type": kind}
    return config


def _refuse_foreign(text: Config, config: Config, called: str) -> None:
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{called} is an encoder and a decoder, and the planner counts decoders alone; name a decoder model"
        )
    for field, what in _FOREIGN.items():
        if text.get(field):
            raise UnsupportedModelError(
                f"{called} has {what} ({field} in its config), whose memory the planner cannot tell; it counts "
                "attention, MLA and gated delta nets"
            )


def _kv_heads(text: Config, kind: str, heads: int) -> int:
    if kind == "falcon":
        # num_kv_heads is said but ignored by the older of its two structures.
        if text.get("new_decoder_architecture"):
            return _number(text, "num_kv_heads", "n_head_kv") or heads
        return 1 if text.get("multi_query", True) else heads
    if kind == "mpt" and isinstance(text.get("attn_config"), Mapping):
        inner = text["attn_config"]
        if inner.get("attn_type") == "multiquery_attention":
            return 1
        return _number(inner, "kv_n_heads") or heads
    if text.get("multi_query") or (kind == "gpt_bigcode" and text.get("multi_query", True)):
        return _number(text, *_KV_HEADS) or 1
    return _number(text, *_KV_HEADS) or heads


def _head_dim(text: Config, heads: int, hidden: int, called: str) -> int:
    given = _number(text, *_HEAD_DIM)
    if given is None and hidden % heads:
        raise KvwinnowError(
            f"the config of {called} gives no head_dim, and its {heads} heads do not divide its hidden size of "
            f"{hidden}; add head_dim"
        )
    return given or hidden // heads


def _kinds(text: Config, kind: str, number: int, called: str, notes: list[str]) -> list[str]:
    """The type of each layer in transformers' words."""
    given = text.get("layer_types")
    if given is not None:
        if not isinstance(given, list | tuple):
            raise KvwinnowError(
                f"layer_types in the config of {called} is a {type(given).__name__} and must be a list that names the "
                "type of each layer; correct it"
            )
        if len(given) != number:
            raise KvwinnowError(
                f"the config of {called} has {number:,} layers but {len(given):,} layer_types, which must name the "
                "type of each; correct it"
            )
        return [str(what) for what in given]
    if text.get("attention_chunk_size") is not None:
        raise UnsupportedModelError(
            f"{called} attends in chunks (attention_chunk_size), and its config does not say which layers do; add "
            "layer_types"
        )
    if kind == "qwen3_next" or "full_attention_interval" in text:
        interval = _number(text, "full_attention_interval") or 4
        return _spread(number, interval, "linear_attention")
    if text.get("use_sliding_window") is False or (_number(text, "sliding_window", least=-1) or 0) < 1:
        return ["full_attention"] * number
    if kind in _EVERY_OTHER:
        return _spread(number, 2, "sliding_attention")
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # such as LLLG
        marks = [pattern[index % len(pattern)] for index in range(number)]
        return ["sliding_attention" if mark == "L" else "full_attention" for mark in marks]
    every = _number(text, "sliding_window_pattern", "_sliding_window_pattern") or _PATTERN.get(kind)
    if every is not None:
        return _spread(number, every, "sliding_attention")
    first = _number(text, "max_window_layers", least=0)
    if first is not None and text.get("use_sliding_window"):
        return ["sliding_attention" if index >= first else "full_attention" for index in range(number)]
    if kind in _ALL_SLIDE:
        return ["sliding_attention"] * number
    notes.append(
        f"the config gives a window of {text['sliding_window']:,} tokens and not which layers slide; all are counted "
        "whole"
    )
    return ["full_attention"] * number


def _spread(number: int, every: int, other: str) -> list[str]:
    """Every so-manieth layer attends to all tokens."""
    return ["full_attention" if (index + 1) % every == 0 else other for index in range(number)]


def _layer(text: Config, full: Attention, what: str, trained: int | None, called: str) -> Layer:
    if what in ("full_attention", "attention"):
        return full
    if what == "linear_attention":
        return _state(text, called)
    field = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(what)
    if field is None:
        raise UnsupportedModelError(
            f"{called} has a layer of type {what!r}, whose memory the planner cannot tell; it counts full, sliding, "
            "chunked and linear attention and MLA"
        )
    window = _number(text, field)
    if window is None:
        raise KvwinnowError(
            f"layer_types in the config of {called} has {what.partition('_')[0]} layers, but {field} is missing; add it"
        )
    # A window as wide as the model's positions hides nothing.
    return full if trained is not None and window >= trained else dataclasses.replace(full, window=window)


def _state(text: Config, called: str) -> State:
    """A gated delta net as transformers caches it: the last inputs of its convolution, and a matrix for each head."""
    fields = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    key_heads, key_dim, heads, dim = (_needed(text, (field,), called) for field in fields)
    kernel = _needed(text, ("linear_conv_kernel_dim",), called)
    return State(heads, (2 * key_heads * key_dim + heads * dim) * kernel, heads * key_dim * dim)


def _unserved(text: Config, kind: str, layers: tuple[Layer, ...]) -> str | None:
    if any(isinstance(layer, State) for layer in layers):
        return "some of its layers hold a state in place of keys and values"
    inner = text.get("attn_config")
    alibi = text.get("alibi", inner.get("alibi", True) if isinstance(inner, Mapping) else kind in _ALIBI)
    if alibi:
        return "its attention has a bias by distance (ALiBi)"
    if "chunked_attention" in text.get("layer_types", ()):
        return "some of its layers attend in chunks"
    return None


def _dtype(config: Config) -> str | None:
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).split(".")[-1])


def _weights(quantised: Any, dtype: str, notes: list[str]) -> str | None:
    """The format a checkpoint is stored in; None: not one that is known here."""
    if not isinstance(quantised, Mapping):
        return dtype
    method = str(quantised.get("quant_method"))
    known = {"fp8": "fp8", "mxfp4": "mxfp4", "awq 4": "int4", "gptq 4": "int4", "gptq 8": "int8"}
    found = known.get(method) or known.get(f"{method} {quantised.get('bits')}")
    if found is not None:
        return found
    notes.append(f"its weights are quantised by {method}, of unknown size; name their format with --weights-dtype")
    return None


def _number(config: Config, *fields: str, least: int = 1) -> int | None:
    """The first of these fields that is given; None: none is.

    Raises:
        KvwinnowError: it is no whole number, or less than ``least``.
    """
    for field in fields:
        value = config.get(field)
        if value is None:
            continue
        if not _is_number(value) or value < least:
            raise KvwinnowError(f"{field}={value!r} in the config must be a whole number, {least} or more; correct it")
        return int(value)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _needed(config: Config, fields: tuple[str, ...], called: str) -> int:
    value = _number(config, *fields)
    if value is None:
        raise KvwinnowError(
            f"the config of {called} does not say {' or '.join(fields[:3])}; is it the config.json of a decoder model?"
        )
    return value
