"""The list of codecs, and their text form: ``int4:group=32``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvwinnow.codecs.base import Codec
from kvwinnow.codecs.fp4 import FP4
from kvwinnow.codecs.fp8 import FP8
from kvwinnow.codecs.int4 import Int4
from kvwinnow.codecs.int8 import Int8
from kvwinnow.codecs.plain import BF16, FP16, FP32
from kvwinnow.errors import CodecError
from kvwinnow.textform import parse_spec

if TYPE_CHECKING:
    import torch

# A new number format is one file beside this one and one entry here.
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (FP32, BF16, FP16, FP8, Int8, Int4, FP4)}

_OF_TORCH = {f"torch.{codec.kind}": codec for codec in (FP32, BF16, FP16)}
"""The unquantised codecs by the dtype they store, as torch writes it."""


def parse_codec(dtype: str | torch.dtype | Codec) -> Codec:
    """A codec from its text form ("int4:group=32"), from a torch dtype, or as it is.

    Raises:
        CodecError: an unknown name, parameter or dtype.
    """
    if isinstance(dtype, Codec):
        return dtype
    name = str(dtype)
    if name.startswith("torch."):
        if name not in _OF_TORCH:
            raise CodecError(f"dtype {dtype} is not one the cache stores; give dtype= one of {', '.join(CODECS)}")
        return _OF_TORCH[name]()
    return parse_spec(cast(str, dtype), CODECS, kind="dtype", error=CodecError)
