"""The caches that a plan compares: one that keeps everything, and kvwinnow's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvwinnow.cache.memory import LayerShape, PlannedLayer, budget_in_tokens, exact_slots, layers_nbytes, prefill_nbytes
from kvwinnow.codecs import Codec
from kvwinnow.errors import UnsupportedModelError
from kvwinnow.planning.architecture import Architecture, Attention
from kvwinnow.policies import Policy


@dataclass(frozen=True)
class FullCache:
    """A cache that keeps every token in the model's dtype, on one of several GPUs.

    Attributes:
        architecture: of the whole model.
        gpus: that share its heads.
        block: tokens in a block, to which a paged cache rounds up; 1: it does not.
    """

    architecture: Architecture
    gpus: int = 1
    block: int = 1

    def held(self, context: int, *, batch: int = 1, new: int = 0) -> int:
        """Bytes after a prompt of ``context`` tokens in each row and ``new`` decoded ones."""
        return self.architecture.shard(self.gpus).cache_bytes(context + new, batch=batch, block=self.block)

    def peak(self, context: int, *, batch: int = 1, chunk: int | None = None) -> int:
        """Bytes while the prompt is read: what it leaves, since every layer's keys and values go straight in."""
        return self.held(context, batch=batch)


@dataclass(frozen=True)
class CompressedCachePlan:
    """kvwinnow's cache, on one of several GPUs.

    Attributes:
        architecture: of the whole model, which ``served`` has accepted.
        policy: which tokens stay.
        codecs: how keys and values are stored.
        gpus: that share its heads.
    """

    architecture: Architecture
    policy: Policy
    codecs: tuple[Codec, Codec]
    gpus: int = 1

    def held(self, context: int, *, batch: int = 1, new: int = 0) -> int:
        """Bytes after a prompt of ``context`` tokens in each row and ``new`` decoded ones.

        Raises:
            PolicyError: a budget in bytes that holds too few tokens.
        """
        policy = self._in_tokens(context, batch)
        return sum(layers_nbytes(policy, self._layers(self.gpus), batch=batch, prompt=context, new=new))

    def peak(self, context: int, *, batch: int = 1, chunk: int | None = None) -> int:
        """Bytes while the prompt is read, in chunks of that many tokens: the budgets, and one layer's chunk whole."""
        policy = self._in_tokens(context, batch)
        return prefill_nbytes(policy, self._layers(self.gpus), batch=batch, prompt=context, chunk=chunk)

    def budget(self, context: int, *, batch: int = 1) -> int | None:
        """Tokens per KV head that the policy's budget comes to; None: no limit."""
        return budget_in_tokens(self.policy, self._layers(1), batch=batch, prompt=context)

    @property
    def idle(self) -> bool:
        """Whether every layer keeps its own window, so that the policy has nothing to evict."""
        return all(layer.window is not None for layer in self._layers(1))

    def check(self) -> None:
        """Refuse codecs that do not fit the head dimension.

        Raises:
            CodecError: one does not.
        """
        for layer in self._layers(1):
            for codec in layer.codecs:
                codec.layout(layer.shape.dim)

    def _in_tokens(self, context: int, batch: int) -> Policy:
        """The policy with a budget in bytes, which is one for all GPUs, in tokens."""
        if isinstance(self.policy.limit, str) and self.gpus > 1:
            return with_budget(self.policy, self.budget(context, batch=batch) or 0)
        return self.policy

    def _layers(self, gpus: int) -> list[PlannedLayer]:
        return list(_planned(self.architecture.shard(gpus), self.policy, self.codecs))


Cache = FullCache | CompressedCachePlan


def with_budget(policy: Policy, tokens: int) -> Policy:
    """A policy that has a budget, its own or that of a policy within it, with one of that many tokens for all."""
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    new: dict[str, Any] = {
        name: with_budget(value, tokens) for name, value in values.items() if getattr(value, "limit", None) is not None
    }
    return dataclasses.replace(policy, **new, **({"budget": tokens} if "budget" in values else {}))


def has_default_budget(text: str, policy: Policy) -> bool:
    """Whether the text form of a policy that takes a budget names none."""
    return policy.limit is not None and "budget" not in re.findall(r"(\w+)\s*=", text)


def unserved(architecture: Architecture) -> str | None:
    """Why ``CompressedCache`` does not serve a model; None: nothing is known against it."""
    shapes = {(x.heads, x.kv_heads, x.head_dim) if isinstance(x, Attention) else x for x in architecture.layers}
    return architecture.unserved or ("its layers have different shapes" if len(shapes) > 1 else None)


def check_served(architecture: Architecture, asked: str) -> None:
    """Refuse a policy or a codec for a model that ``CompressedCache`` does not serve.

    Args:
        architecture: of the model.
        asked: the option that asks for it, for the complaint.

    Raises:
        UnsupportedModelError: it does not serve this one.
    """
    why = unserved(architecture)
    if why is not None:
        raise UnsupportedModelError(
            f"{architecture.name} is not served by kvwinnow's cache: {why}; leave {asked} out to plan the full cache"
        )


def _planned(shard: Architecture, policy: Policy, codecs: tuple[Codec, Codec]) -> Iterator[PlannedLayer]:
    for layer in shard.layers:
        if not isinstance(layer, Attention):
            raise UnsupportedModelError(f"{shard.name} has layers that are no attention with keys and values per head")
        shape = LayerShape(layer.heads, layer.kv_heads, layer.head_dim, exact_slots(policy), shard.itemsize)
        yield PlannedLayer(shape, codecs, layer.window)
