"""How many slots a layer allocates and how many bytes it takes, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvwinnow.cache.moments import moments_nbytes
from kvwinnow.codecs import Codec, vectors_nbytes
from kvwinnow.policies import Phase, Policy
from kvwinnow.statistics import Kind

GROWTH = 32
"""Slots are allocated in steps of this many, up to what the policy may ever need."""


def allocation(tokens: int, bound: int | None) -> int:
    """Slots to allocate for ``tokens`` tokens: room for one more, in steps of ``GROWTH``, never beyond ``bound``."""
    steps = (tokens // GROWTH + 1) * GROWTH
    return steps if bound is None else max(tokens, min(steps, bound))


def slots_for(tokens: int, bound: int | None, codecs: tuple[Codec, Codec], exact: int) -> int:
    """Slots a layer allocates for a prompt that leaves ``tokens`` tokens; the unquantised ones at least."""
    return max(least_slots(codecs, exact), allocation(tokens, bound))


def least_slots(codecs: tuple[Codec, Codec], exact: int) -> int:
    """Slots that a layer always has: the unquantised ones, where a codec quantises the others."""
    return exact if any(codec.quantises for codec in codecs) else 0


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer that decide its bytes.

    Attributes:
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension D.
        exact: slots kept unquantised.
        dtype: the model's dtype, of the unquantised slots and the observing queries.
    """

    heads: int
    kv_heads: int
    dim: int
    exact: int
    dtype: torch.dtype


def layer_nbytes(policy: Policy, codecs: tuple[Codec, Codec], shape: LayerShape, *, batch: int, slots: int) -> int:
    """Bytes a ``LayerCache`` holds with ``slots`` slots per KV head, but for those of ``prompt_nbytes``."""
    sizes = (batch, shape.kv_heads, slots, shape.dim)
    total = sum(
        vectors_nbytes(codec, sizes, exact=shape.exact, centred=is_key, dtype=shape.dtype)
        for codec, is_key in zip(codecs, (True, False), strict=True)
    )
    total += batch * shape.kv_heads * slots * torch.int32.itemsize
    return total + len(policy.running()) * batch * shape.kv_heads * slots * torch.float32.itemsize


def prompt_nbytes(policy: Policy, shape: LayerShape, *, batch: int) -> int:
    """Bytes a ``LayerCache`` holds beside its slots from a prompt to the first decode step, if it fills its window."""
    statistics = policy.statistics(Phase.PROMPT)
    if statistics.kind is Kind.QUERIES:
        return moments_nbytes(batch, shape.heads, shape.dim)
    queries = statistics.window if statistics.kind is Kind.WINDOW else 0
    return batch * shape.heads * queries * shape.dim * shape.dtype.itemsize
