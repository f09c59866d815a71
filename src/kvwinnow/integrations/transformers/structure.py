"""Which models the cache serves: checked at the door, from the model's structure, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from kvwinnow.errors import KvwinnowError, UnsupportedModelError

OLDEST_TRANSFORMERS = "5.16"
TESTED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Structure:
    """What the cache needs to know of a model.

    Attributes:
        layers: number of attention layers.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension D.
        trained_length: tokens the model was trained to; None: not stated.
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    trained_length: int | None


def trained_length(config: Any) -> int | None:
    """Positions a model serves: those it was trained to, stretched by its RoPE scaling (linear, dynamic, YaRN).

    Some configurations state the stretched length as max_position_embeddings, others the original one and a factor;
    the longer reading counts. None: not stated.
    """
    stated = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if stated is None or rope.get("rope_type", "default") == "default":
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(int(stated), int(original * (rope.get("factor") or 1.0)))


def inspect_model(model: Any) -> Structure:
    """Check that ``model`` is one the cache serves.

    Raises:
        UnsupportedModelError: not a transformers model, or a structure that has not been tested.
        KvwinnowError: a transformers too old.
    """
    if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
        raise KvwinnowError(
            f"transformers {transformers.__version__} is installed, and kvwinnow needs {OLDEST_TRANSFORMERS} or newer; "
            f"run: pip install -U 'transformers>={OLDEST_TRANSFORMERS}'"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; CompressedCache takes a transformers model such as "
            "AutoModelForCausalLM.from_pretrained(...) returns"
        )
    if not model.can_generate():
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__} without a language head; give CompressedCache the model that "
            "generates, such as AutoModelForCausalLM.from_pretrained(...) returns"
        )
    config, decoder = model.config, model.base_model
    kind = getattr(config, "model_type", "?")
    if kind not in TESTED:
        raise UnsupportedModelError(
            f"models of type {kind!r} have not been tested with CompressedCache; it serves {', '.join(TESTED)}"
        )
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    trained = trained_length(config)
    if layer_types - {"full_attention"} or (kind == "mistral" and window and window < (trained or window + 1)):
        raise UnsupportedModelError(
            f"this {kind} model has sliding-window layers (window {window}), which CompressedCache does not serve yet; "
            "use a model whose layers all attend to everything"
        )
    attentions = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if not attentions or any(
        getattr(attention, "config", None) is not config or getattr(attention, "layer_idx", None) != index
        for index, attention in enumerate(attentions)
    ):
        raise UnsupportedModelError(
            f"this {type(model).__name__} does not have the layers of a {kind} model (a .layers list whose .self_attn "
            "share the model's config and count their layer_idx from 0); only unmodified structures are served"
        )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Structure(len(attentions), config.num_attention_heads, config.num_key_value_heads, int(dim), trained)
