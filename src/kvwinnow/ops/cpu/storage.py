"""How vectors lie in memory, in the words of native/decode.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvwinnow.codecs import Codec

FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kinds of storage whose elements are numbers themselves."""

_CODES = {"int8": 3, "int4": 4, "fp8": 5}
_FP4 = {"nv": 6, "mx": 7}


def kind_of(codec: Codec, dtype: torch.dtype) -> int | None:
    """The kind of storage that a codec's parts are, the first of them of that dtype; None: kernels know none."""
    if not codec.quantises:
        return FLOATS.get(dtype)
    own: Any = codec
    return _FP4.get(own.style) if own.name == "fp4" else _CODES.get(own.name)


def in_rows(part: Tensor) -> bool:
    """Whether the vectors of each head of (B, Hkv, S, width) lie one behind the other."""
    return part.stride(3) == 1 and part.stride(2) == part.shape[3]
