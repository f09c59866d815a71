"""What a model caches and how large its weights are: facts of its architecture, without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvwinnow.errors import KvwinnowError

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element in the dtypes that models compute in."""


@dataclass(frozen=True)
class Attention:
    """A layer that caches keys and values for each KV head: MHA, GQA or MQA.

    Attributes:
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        head_dim: head dimension D.
        window: how many of the latest tokens a token sees, itself included; None: all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)

    def __str__(self) -> str:
        kind = "full attention" if self.window is None else f"sliding attention, window {self.window:,}"
        return f"{kind}, {self.heads} query heads, {self.kv_heads} KV heads of {self.head_dim}"

    def tokens(self, context: int) -> int:
        """Tokens that are cached after ``context``."""
        return context if self.window is None else min(context, self.window)

    def per_token(self, itemsize: int) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.kv_heads * self.head_dim * itemsize

    def fixed(self, itemsize: int) -> int:
        """Bytes whatever the number of tokens."""
        return 0

    def shard(self, gpus: int) -> Attention:
        """The part of one of ``gpus`` GPUs: its query heads, and the KV heads they need, one at least."""
        if self.heads % gpus or (self.kv_heads % gpus and gpus % self.kv_heads):
            raise KvwinnowError(
                f"{gpus} GPUs cannot share a layer of {self.heads} query heads and {self.kv_heads} KV heads evenly; "
                "take a number that divides the query heads and divides the KV heads or is a multiple of them"
            )
        return dataclasses.replace(self, heads=self.heads // gpus, kv_heads=max(1, self.kv_heads // gpus))


@dataclass(frozen=True)
class Latent:
    """A layer of multi-head latent attention (MLA): one vector a token, for all heads.

    Attributes:
        heads: query heads Hq.
        rank: elements of the latent, ``kv_lora_rank``.
        rope_dim: elements of the key's rotated part, ``qk_rope_head_dim``.
    """

    heads: int
    rank: int
    rope_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self)

    def __str__(self) -> str:
        return f"MLA, {self.heads} query heads, one latent of {self.rank} + {self.rope_dim}"

    def tokens(self, context: int) -> int:
        """Tokens that are cached after ``context``."""
        return context

    def per_token(self, itemsize: int) -> int:
        """Bytes of one token's latent."""
        return (self.rank + self.rope_dim) * itemsize

    def fixed(self, itemsize: int) -> int:
        """Bytes whatever the number of tokens."""
        return 0

    def shard(self, gpus: int) -> Latent:
        """The part of one GPU: every head needs the whole latent, so every GPU holds it."""
        if self.heads % gpus:
            raise KvwinnowError(
                f"{gpus} GPUs cannot share a layer of {self.heads} query heads evenly; take a number that divides them"
            )
        return dataclasses.replace(self, heads=self.heads // gpus)


@dataclass(frozen=True)
class State:
    """A layer of linear attention, whose state has a fixed size.

    Attributes:
        heads: value heads, by which the state can be divided among GPUs.
        elements: elements in the model's dtype (of the convolution).
        float32: elements in float32 (of the recurrence).
    """

    heads: int
    elements: int
    float32: int

    def __post_init__(self) -> None:
        _check_sizes(self)

    def __str__(self) -> str:
        return f"linear attention, a state of {self.heads} heads"

    def tokens(self, context: int) -> int:
        """Tokens that are cached after ``context``: none."""
        return 0

    def per_token(self, itemsize: int) -> int:
        """Bytes that one more token takes: none."""
        return 0

    def fixed(self, itemsize: int) -> int:
        """Bytes of a sequence's state."""
        return self.elements * itemsize + self.float32 * 4

    def shard(self, gpus: int) -> State:
        """The part of one of ``gpus`` GPUs."""
        if self.heads % gpus:
            raise KvwinnowError(
                f"{gpus} GPUs cannot share a linear-attention layer of {self.heads} heads evenly; take a number that "
                "divides them"
            )
        return State(self.heads // gpus, self.elements // gpus, self.float32 // gpus)


def _check_sizes(layer: Attention | Latent | State) -> None:
    """Refuse sizes with which nothing can be divided or multiplied."""
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        least = 0 if field.name in ("elements", "float32") else 1
        optional = value is None and field.name == "window"
        if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise KvwinnowError(
                f"{field.name}={value!r} of a layer ({type(layer).__name__}) must be a whole number, {least} or more"
            )


Layer = Attention | Latent | State


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model's weights are.

    Attributes:
        total: all of them.
        embeddings: those of the token embeddings and the language head, which quantised checkpoints leave at 16 bits.
        experts: those of routed experts, which MXFP4 checkpoints quantise alone.
    """

    total: int
    embeddings: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Architecture:
    """A model as the planner sees it.

    Attributes:
        name: what it is called in the output.
        layers: what each layer caches, the lowest first.
        dtype: "fp32", "bf16" or "fp16": what it computes in, and what an uncompressed cache holds.
        hidden: elements of a hidden state; None: not known.
        trained: tokens it was trained to; None: not stated.
        parameters: of its weights; None: not known.
        checkpoint: bytes of the weights as they lie in its folder; None: not known.
        weights: the format its weights are published in, a name of ``weights.FORMATS``.
        unserved: why ``CompressedCache`` does not serve it; None: nothing known against it.
        notes: what a reader of the figures should know.
        source: where the facts are from.
        dtype_assumed: whether ``dtype`` is a guess, since the config does not say it.
    """

    name: str
    layers: tuple[Layer, ...]
    dtype: str = "bf16"
    hidden: int | None = None
    trained: int | None = None
    parameters: Parameters | None = None
    checkpoint: int | None = None
    weights: str | None = "bf16"
    unserved: str | None = None
    notes: tuple[str, ...] = ()
    source: str = ""
    dtype_assumed: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise KvwinnowError(f"dtype={self.dtype!r} of {self.name} is unknown; it is one of {', '.join(ITEMSIZE)}")
        if not self.layers:
            raise KvwinnowError(f"{self.name} has no layer that caches anything; give it one")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the cache when nothing compresses it."""
        return ITEMSIZE[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in an uncompressed cache, while no window is full yet."""
        return sum(layer.per_token(self.itemsize) for layer in self.layers)

    @property
    def bytes_per_late_token(self) -> int:
        """Bytes by which the cache grows with a token once all windows are full."""
        growing = (layer for layer in self.layers if not isinstance(layer, Attention) or layer.window is None)
        return sum(layer.per_token(self.itemsize) for layer in growing)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, whatever its length."""
        return sum(layer.fixed(self.itemsize) for layer in self.layers)

    def cache_bytes(self, context: int, *, batch: int = 1, block: int = 1) -> int:
        """Bytes of an uncompressed cache.

        Args:
            context: tokens in each row.
            batch: number of rows.
            block: tokens in a block of a paged cache; each layer's tokens are rounded up to whole blocks.
        """
        row = 0
        for layer in self.layers:
            tokens = -(-layer.tokens(context) // block) * block
            row += tokens * layer.per_token(self.itemsize) + layer.fixed(self.itemsize)
        return row * batch

    def shard(self, gpus: int) -> Architecture:
        """What one of ``gpus`` GPUs holds of the cache under tensor parallelism; the weights are not divided.

        Raises:
            KvwinnowError: the heads cannot be shared evenly.
        """
        if gpus == 1:
            return self
        parts = {layer: layer.shard(gpus) for layer in dict.fromkeys(self.layers)}  # most layers are alike
        return dataclasses.replace(self, layers=tuple(parts[layer] for layer in self.layers))
