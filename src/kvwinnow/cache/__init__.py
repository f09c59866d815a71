"""WHERE the cached tokens lie: slots, positions and statistics of one layer, without any framework."""

from kvwinnow.cache.layer import LayerCache
from kvwinnow.cache.step import Step

__all__ = ["LayerCache", "Step"]
