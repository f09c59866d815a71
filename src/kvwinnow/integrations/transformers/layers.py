"""What each layer of a decoder is, read from its module: attention that caches keys and values per head, or not.

No list of model types is kept. A layer is served if its module hands its keys and values to the cache, attends through
transformers' attention interface (or torch's ``scaled_dot_product_attention``) and asks of it nothing but what a
``Variant`` expresses. What only a run can show is checked in each call (``attachment.py``, ``cache.py``).
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from kvwinnow.errors import UnsupportedModelError

_CACHES = re.compile(r"(?:cache|past)\w*\.update\(")
_RECURRENT = re.compile(r"(?:conv|ssm|recurrent|rnn)_states?\b|_linear_attn\b")
_OWN_INDEX = re.compile(r"\.update\([^,]+,[^,]+,\s*self\.layer_idx\s*[,)]")
_CACHES_MORE = re.compile(r"(?:cache|past)\w*\.update_\w+\(")
_DIRECT = "scaled_dot_product_attention("
_CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
_MLA = ("kv_lora_rank", "kv_a_proj_with_mqa", "kv_b_proj")

SERVED_ARGUMENTS = {
    "attention_mask", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "max_length_k", "max_length_q",
    "output_attentions", "position_ids", "s_aux", "scaling", "sliding_window", "softcap",
}  # fmt: skip
"""What a layer may tell the attention interface beside queries, keys and values: each is honoured, changes nothing at
inference, or is refused when it is given."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        name: where its module lies in the model, such as "model.layers.3.self_attn".
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension D.
        sliding: how many of the latest tokens a token sees, itself included; None: all.
        direct: whether it calls torch's ``scaled_dot_product_attention`` and not transformers' attention interface.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    sliding: int | None
    direct: bool


def attention_layers(model: nn.Module, decoder: nn.Module) -> list[AttentionLayer]:
    """The layers of ``decoder``, a part of ``model``, by their index.

    Raises:
        UnsupportedModelError: the first layer that is not served, by its name and what it is.
    """
    config: Any = decoder.config
    names = {id(module): name for name, module in model.named_modules()}
    inside = [module for module in decoder.modules() if module is not decoder]
    if getattr(config, "is_encoder_decoder", False):
        crossing = (m for m in inside if _CROSS.search(names[id(m)]))
        layer = next(crossing, inside[0])
        refuse(names[id(layer)], layer, "cross-attention to an encoder")
    for module in inside:
        if _RECURRENT.search(_source(module)):
            refuse(names[id(module)], module, "a recurrent layer (state-space, linear attention or convolution)")
    caching = [module for module in inside if _CACHES.search(_source(module))]
    for module in caching:
        _check_kind(names[id(module)], module, decoder)
    _check_blocks(decoder, [names[id(module)] for module in caching], names)
    for index, module in enumerate(caching):
        own = getattr(module, "layer_idx", None)
        if own != index or getattr(module, "config", None) is not config:
            refuse(names[id(module)], module, f"layer {own} by its own count and number {index} of the decoder's")
    return [_attention_layer(names[id(module)], module, decoder) for module in caching]


def refuse(name: str, module: nn.Module, what: str) -> NoReturn:
    """Refuse a model for one layer."""
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) is {what}, and CompressedCache serves attention that caches keys and values "
        "per head and no other layer; docs/models.md says which models it serves"
    )


def _check_kind(name: str, module: nn.Module, decoder: nn.Module) -> None:
    """Refuse attention that a ``Variant`` does not express."""
    source = _source(module)
    config: Any = decoder.config
    if any(hasattr(module, attribute) for attribute in _MLA):
        refuse(name, module, "multi-head latent attention (MLA), which caches one latent vector for all heads")
    if getattr(module, "is_cross_attention", False) or _CROSS.search(f"{name} {type(module).__name__}"):
        refuse(name, module, "cross-attention to another input")
    if getattr(module, "is_kv_shared_layer", False):
        refuse(name, module, "attention that shares the keys and values of another layer")
    if _CACHES_MORE.search(source):
        refuse(name, module, "attention that caches more than keys and values")
    if _CACHES.search(source) and not _OWN_INDEX.search(source):
        refuse(name, module, "attention that caches under another index than its own")
    if getattr(config, "alibi", "alibi" in source):
        refuse(name, module, "attention with a bias by distance (ALiBi), which eviction would need to follow")
    if "position_bias" in source:
        refuse(name, module, "attention with a bias by position")
    if getattr(module, "is_causal", True) is False:
        refuse(name, module, "attention in both directions")
    kind, sliding = _window(module, decoder)
    if kind not in ("full_attention", "sliding_attention"):
        refuse(name, module, f"a layer of type {kind!r}")
    if kind == "sliding_attention" and (not isinstance(sliding, int) or sliding < 1):
        refuse(name, module, f"a sliding layer of window {sliding!r}")
    if not ("attention_interface(" in source or _DIRECT in source):
        refuse(name, module, "attention computed in the layer itself and not through transformers' attention interface")
    foreign = _interface_arguments(_source(module)) - SERVED_ARGUMENTS
    if foreign:
        refuse(name, module, f"attention that depends on {', '.join(sorted(foreign))}")


def _attention_layer(name: str, module: nn.Module, decoder: nn.Module) -> AttentionLayer:
    config: Any = decoder.config
    _, sliding = _window(module, decoder)
    heads = _number(config, "num_attention_heads") or 0
    groups = _number(module, "num_key_value_groups")
    kv_heads = _number(module, "num_key_value_heads", "num_kv_heads", "kv_heads")
    kv_heads = kv_heads or (heads // groups if groups else None)
    kv_heads = kv_heads or _number(config, "num_key_value_heads", "num_kv_heads") or heads
    dim = _number(module, "head_dim", "head_size", "attention_head_size") or _number(config, "head_dim")
    dim = dim or (heads and config.hidden_size // heads)
    if not heads or not kv_heads or not dim or heads % kv_heads:
        refuse(name, module, f"attention of {heads} query heads, {kv_heads} key/value heads and head dimension {dim}")
    return AttentionLayer(name, heads, kv_heads, dim, sliding, "attention_interface(" not in _source(module))


def _window(module: nn.Module, decoder: nn.Module) -> tuple[str, int | None]:
    """The layer's type in transformers' words, and its window."""
    config: Any = decoder.config
    own = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        kind: str = kinds[module.layer_idx]
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        # Without types of layers all are alike; a stray window in the configuration of a decoder that never masks by
        # one means nothing.
        kind = "full_attention" if own is None or "sliding" not in _source(decoder) else "sliding_attention"
    return kind, own if kind == "sliding_attention" else None


def _check_blocks(decoder: nn.Module, caching: list[str], names: dict[int, str]) -> None:
    """Every block of the decoder holds one attention layer that caches."""
    lists = [(names[id(m)], m) for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m)]
    holding = [(name, blocks) for name, blocks in lists if any(c.startswith(f"{name}.") for c in caching)]
    if not lists:
        raise UnsupportedModelError(f"the decoder {type(decoder).__name__} has no list of layers; see docs/models.md")
    name, blocks = (holding or lists)[0]
    held = Counter(c.removeprefix(f"{name}.").split(".")[0] for c in caching)
    for index, block in enumerate(blocks):
        if held[str(index)] != 1:
            number = held[str(index)] or "no"
            refuse(f"{name}.{index}", block, f"a layer with {number} attention layers that cache keys and values")


def _number(of: Any, *attributes: str) -> int | None:
    """The first of these attributes that is a number."""
    for attribute in attributes:
        try:
            value = getattr(of, attribute, None)
        except RuntimeError:  # a configuration whose layers differ refuses to tell a number for all
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _source(module: nn.Module) -> str:
    """The text of a module's ``forward``; nothing for torch's own modules, and where there is no text."""
    kind = type(module)
    return "" if kind.__module__.startswith("torch.") else _text(inspect.unwrap(kind.forward))


@functools.cache
def _text(function: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


@functools.cache
def _interface_arguments(source: str) -> set[str]:
    """The keyword arguments that a ``forward`` gives to the attention interface."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {
        keyword.arg
        for call in calls
        if getattr(call.func, "id", None) == "attention_interface"
        for keyword in call.keywords
        if keyword.arg is not None
    }
