"""kvwinnow: keep the grain of a KV cache and let the chaff go."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names load on first use, so that `import kvwinnow` and the parts that need no torch stay light.
_HOMES = {
    "CompressedCache": "kvwinnow.integrations.transformers",
    "CacheReport": "kvwinnow.integrations.transformers",
    "KvwinnowError": "kvwinnow.errors",
    **dict.fromkeys(
        (
            "Full",
            "H2O",
            "Hybrid",
            "Policy",
            "SlidingWindow",
            "SnapKV",
            "StreamingLLM",
            "parse",
        ),
        "kvwinnow.policies",
    ),
}

if TYPE_CHECKING:
    from kvwinnow.errors import KvwinnowError
    from kvwinnow.integrations.transformers import CacheReport, CompressedCache
    from kvwinnow.policies import H2O, Full, Hybrid, Policy, SlidingWindow, SnapKV, StreamingLLM, parse

__all__ = [
    "CacheReport",
    "CompressedCache",
    "Full",
    "H2O",
    "Hybrid",
    "KvwinnowError",
    "Policy",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "parse",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvwinnow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
