"""WHERE the cached tokens lie: slots, positions and statistics of one layer, without any framework.

The arithmetic of its memory, ``cache.memory``, needs no torch, so what does is imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwinnow.cache.layer import LayerCache
    from kvwinnow.cache.step import Step

__all__ = ["LayerCache", "Step"]


def __getattr__(name: str) -> Any:
    if name == "LayerCache":
        from kvwinnow.cache.layer import LayerCache

        return LayerCache
    if name == "Step":
        from kvwinnow.cache.step import Step

        return Step
    raise AttributeError(f"module 'kvwinnow.cache' has no attribute {name!r}")
