"""What stands for the cache and its attention while ``torch.compile`` traces a decode step.

The model's own code runs once with a ``StandIn`` for the cache. What a layer gives it, and the attention that the layer
asks for next, become one opaque operator of the graph (``kvwinnow::attend_layer``), which at run time finds the real
cache. So the graph knows neither how many slots there are nor what is evicted, and stays the same while caches grow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class StandIn(Cache):
    """The cache as a traced model sees it: without masks, which the real one sees to.

    Its length is a tensor, so that it differs from step to step in one graph; a model that must know it as a number
    cannot be traced.
    """

    def __init__(self, layers: int, columns: Tensor) -> None:
        # Cache.__init__ wants layers of its own; nothing here is stored.
        self.layers: list[Any] = []
        self.count, self.columns = layers, columns
        self.work: tuple[int, Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.work is not None:
            raise RuntimeError("a layer computes its attention by itself")
        self.work = (layer_idx, key_states, value_states)
        return key_states, value_states

    def __len__(self) -> int:
        return self.count

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.columns

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return 1, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.count


class _Place:
    cache: StandIn | None = None


# Dynamo follows what is written here while it traces and writes it nowhere: other threads always find None.
_place = _Place()


def enter(cache: StandIn | None) -> None:
    """From here on, what is traced uses ``cache``."""
    _place.cache = cache


def tracing() -> bool:
    """Whether a decode step is being traced here."""
    return _place.cache is not None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The operator for what the layer left at the stand-in: query (B, Hq, n, D); output (B, n, Hq, Dv)."""
    cache = _place.cache
    if cache is None or cache.work is None:
        raise RuntimeError("a layer attends to keys that it has not given to the cache")
    layer, k, v = cache.work
    if key is not k or value is not v:
        raise RuntimeError("a layer changes its keys or values after the cache has seen them")
    if attention_mask is not None:
        raise RuntimeError("a layer is given a mask of its own")
    cache.work = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.kvwinnow.attend_layer(query, key, value, sinks, layer, scale, softcap)  # type: ignore[no-any-return]
