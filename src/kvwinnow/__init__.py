"""kvwinnow: keep the grain of a KV cache and let the chaff go."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names load on first use, so that `import kvwinnow` and the parts that need no torch stay light.
_HOMES = {
    "CompressedCache": "kvwinnow.integrations.transformers",
    "CacheReport": "kvwinnow.integrations.transformers",
    "CompiledDecode": "kvwinnow.integrations.transformers",
    "compile_decode": "kvwinnow.integrations.transformers",
    "KvwinnowError": "kvwinnow.errors",
    **dict.fromkeys(
        (
            "Compose",
            "ExpectedAttention",
            "Full",
            "H2O",
            "Hybrid",
            "KeyDiff",
            "Knorm",
            "Policy",
            "PyramidKV",
            "SlidingWindow",
            "SnapKV",
            "StreamingLLM",
            "TOVA",
            "WholeBlocks",
            "parse",
        ),
        "kvwinnow.policies",
    ),
    "from_press": "kvwinnow.integrations.kvpress",
    "plan": "kvwinnow.planning",
}

if TYPE_CHECKING:
    from kvwinnow.errors import KvwinnowError
    from kvwinnow.integrations.kvpress import from_press
    from kvwinnow.integrations.transformers import CacheReport, CompiledDecode, CompressedCache, compile_decode
    from kvwinnow.planning import plan
    from kvwinnow.policies import (
        H2O,
        TOVA,
        Compose,
        ExpectedAttention,
        Full,
        Hybrid,
        KeyDiff,
        Knorm,
        Policy,
        PyramidKV,
        SlidingWindow,
        SnapKV,
        StreamingLLM,
        WholeBlocks,
        parse,
    )

__all__ = [
    "CacheReport",
    "CompiledDecode",
    "Compose",
    "CompressedCache",
    "ExpectedAttention",
    "Full",
    "H2O",
    "Hybrid",
    "KeyDiff",
    "Knorm",
    "KvwinnowError",
    "Policy",
    "PyramidKV",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "WholeBlocks",
    "compile_decode",
    "from_press",
    "parse",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvwinnow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
