"""In which dtype each attention layer makes its keys and values, read from its weights before it runs."""

from __future__ import annotations

import torch
from torch import nn

from kvwinnow.codecs import Codec, parse_codec


def codecs_in(
    codecs: tuple[Codec, Codec], follows: tuple[bool, bool], dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Codec, Codec]:
    """How a layer stores its keys and values, those that follow the layer in the dtypes it makes them in."""
    k_codec, v_codec = (
        parse_codec(dtype) if own else codec for codec, own, dtype in zip(codecs, follows, dtypes, strict=True)
    )
    return k_codec, v_codec


def attention_dtype(attention: nn.Module, default: torch.dtype) -> torch.dtype:
    """The dtype of a layer's keys and values: the widest of its own weights.

    Weights of adapters do not count, since PEFT brings their results to the dtype of the layer they sit in, nor do
    weights of fewer than 16 bits or none (quantised ones compute in the model's dtype).

    Args:
        attention: the layer's attention module.
        default: the model's dtype, for a layer that has no such weight.
    """
    names = ((name.replace("base_layer.", ""), weight) for name, weight in attention.named_parameters())
    own = [weight.dtype for name, weight in names if name.count(".") <= 1 and name.endswith("weight")]
    known = [dtype for dtype in own if dtype.is_floating_point and dtype.itemsize > 1]
    widest = known[0] if known else default
    for dtype in known[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
