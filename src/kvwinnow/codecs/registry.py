"""The list of codecs, and their text form: ``int4:group=32``."""

from __future__ import annotations

import torch

from kvwinnow.codecs.base import Codec
from kvwinnow.codecs.fp4 import FP4
from kvwinnow.codecs.fp8 import FP8
from kvwinnow.codecs.int4 import Int4
from kvwinnow.codecs.int8 import Int8
from kvwinnow.codecs.plain import BF16, FP16, FP32
from kvwinnow.errors import CodecError
from kvwinnow.textform import parse_spec

# A new number format is one file beside this one and one entry here.
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (FP32, BF16, FP16, FP8, Int8, Int4, FP4)}

_OF_TORCH: dict[torch.dtype, type[Codec]] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def parse_codec(dtype: str | torch.dtype | Codec) -> Codec:
    """A codec from its text form ("int4:group=32"), from a torch dtype, or as it is.

    Raises:
        CodecError: an unknown name, parameter or dtype.
    """
    if isinstance(dtype, Codec):
        return dtype
    if isinstance(dtype, torch.dtype):
        if dtype not in _OF_TORCH:
            raise CodecError(f"dtype {dtype} is not one the cache stores; give dtype= one of {', '.join(CODECS)}")
        return _OF_TORCH[dtype]()
    return parse_spec(dtype, CODECS, kind="dtype", error=CodecError)
