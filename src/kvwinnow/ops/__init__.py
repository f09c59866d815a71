"""Attention over slots and its statistics: one interface, one folder or file per back end."""

from kvwinnow.ops.decoding import Decoded, decode
from kvwinnow.ops.latest import causal_sums
from kvwinnow.ops.reference import attention
from kvwinnow.ops.rope import Rope
from kvwinnow.ops.rows import moved, taken
from kvwinnow.ops.slots import Chunk, Observed, Slots, Window
from kvwinnow.ops.variant import Variant
from kvwinnow.ops.writing import write_first, write_some, write_token

__all__ = [
    "Chunk",
    "Decoded",
    "Observed",
    "Rope",
    "Slots",
    "Variant",
    "Window",
    "attention",
    "causal_sums",
    "decode",
    "moved",
    "taken",
    "write_first",
    "write_some",
    "write_token",
]
