"""HOW a kept key or value is stored: pure functions of tensors, one file per number format. Imports no torch."""

from kvwinnow.codecs.base import Codec, Part
from kvwinnow.codecs.fp4 import FP4
from kvwinnow.codecs.fp8 import FP8
from kvwinnow.codecs.int4 import Int4
from kvwinnow.codecs.int8 import Int8
from kvwinnow.codecs.plain import BF16, FP16, FP32
from kvwinnow.codecs.registry import CODECS, parse_codec
from kvwinnow.codecs.rotation import rotate

__all__ = [
    "BF16",
    "CODECS",
    "FP4",
    "FP8",
    "FP16",
    "FP32",
    "Codec",
    "Int4",
    "Int8",
    "Part",
    "parse_codec",
    "rotate",
]
