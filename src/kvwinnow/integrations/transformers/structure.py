"""Which models the cache serves: checked at the door, from the model's structure, in one sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from kvwinnow.errors import KvwinnowError, UnsupportedModelError
from kvwinnow.integrations.transformers.layers import attention_layers

OLDEST_TRANSFORMERS = "5.16"


@dataclass(frozen=True)
class Structure:
    """What the cache needs to know of a model.

    Attributes:
        layers: number of attention layers.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension D.
        trained_length: tokens the model was trained to; None: not stated.
        sliding: for each layer, how many of the latest tokens a token sees, itself included; None: all.
        names: for each layer, where its attention lies in the model.
        direct: whether the layers call torch's ``scaled_dot_product_attention`` themselves.
        learned_positions: whether positions are embeddings, of which there are as many as the trained length.
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    trained_length: int | None
    sliding: tuple[int | None, ...]
    names: tuple[str, ...]
    direct: bool
    learned_positions: bool


def trained_length(config: Any) -> int | None:
    """Positions a model serves: those it was trained to, stretched by its RoPE scaling (linear, dynamic, YaRN).

    Some configurations state the stretched length as max_position_embeddings, others the original one and a factor;
    the longer reading counts. Llama 3's scaling, LongRoPE and families that scale each type of layer by itself (Gemma
    3) state the stretched one. None: not stated.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if stated is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return int(stated)
    original = rope.get("original_max_position_embeddings") or stated
    return max(int(stated), int(original * (rope.get("factor") or 1.0)))


def inspect_model(model: Any) -> Structure:
    """Check that ``model`` is one the cache serves.

    Raises:
        UnsupportedModelError: not a transformers model, or one with a layer that is not served.
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
    decoder = text_decoder(model)
    layers = attention_layers(model, decoder)
    first = layers[0]
    for layer in layers:
        if (layer.heads, layer.kv_heads, layer.dim) != (first.heads, first.kv_heads, first.dim):
            raise UnsupportedModelError(
                f"{layer.name} has {layer.heads} query heads, {layer.kv_heads} key/value heads and head dimension "
                f"{layer.dim}, and {first.name} has {first.heads}, {first.kv_heads} and {first.dim}; CompressedCache "
                "serves models whose layers have the same shapes"
            )
    trained = trained_length(decoder.config)
    return Structure(
        layers=len(layers),
        heads=first.heads,
        kv_heads=first.kv_heads,
        dim=first.dim,
        trained_length=trained,
        # A window as wide as the model's positions hides nothing.
        sliding=tuple(wide(layer.sliding, trained) for layer in layers),
        names=tuple(layer.name for layer in layers),
        direct=first.direct,
        learned_positions=any(
            isinstance(module, nn.Embedding) and re.search(r"wpe|pos", name) for name, module in decoder.named_modules()
        ),
    )


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose layers read and write the cache; of a vision-language model its language model."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    # Some models name their language head "decoder".
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def wide(sliding: int | None, trained: int | None) -> int | None:
    """A layer's window, or None if it reaches over all positions the model was trained to."""
    return None if sliding is None or (trained is not None and sliding >= trained) else sliding
