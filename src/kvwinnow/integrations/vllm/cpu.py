"""vLLM's CPU back end, with cuts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvwinnow.integrations.vllm.attention import EvictingBuilder, EvictingImpl, Step
from kvwinnow.integrations.vllm.order import Order
from kvwinnow.integrations.vllm.spec import EvictingSpec


class PagedCPU:
    """One layer's part of the pool as the CPU back end lays it out.

    A block's keys and values lie behind one another for each KV head, in an order that depends on the instruction set,
    so where each element lies is found out by writing numbers and looking (``_orders``).
    """

    def __init__(self, cache: Tensor, impl: Any, builder: Any) -> None:
        blocks, self.kv_heads, self.block, _ = cache.shape
        pool = cache.view(blocks, self.kv_heads, 2 * self.block, -1)
        self.key_cache, self.value_cache = pool.chunk(2, dim=2)
        self.impl, self.isa, self.builder = impl, builder.isa, builder
        self.orders = _orders(self.isa, pool.dtype, self.kv_heads, self.block, pool.shape[-1])

    def keys(self, blocks: Tensor) -> Tensor:
        return self.orders[0].view(self.key_cache.index_select(0, blocks))

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        values = self.orders[1].view(self.value_cache.index_select(0, blocks))
        return self.keys(blocks).transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(
            keys.transpose(0, 1).contiguous(),
            values.transpose(0, 1).contiguous(),
            self.key_cache,
            self.value_cache,
            slots,
            self.isa,
        )

    def attend(self, query: Tensor, output: Tensor, blocks: Tensor, length: int) -> None:
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        lengths = torch.tensor([length], dtype=torch.int32)
        impl, builder = self.impl, self.builder
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=builder.num_heads,
            num_kv_heads=builder.num_kv_heads,
            head_dim=builder.head_dim,
            seq_lens=lengths,
            dtype=builder.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=False,
        )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=impl.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=blocks.int().unsqueeze(0),
            softcap=impl.logits_soft_cap,
            scheduler_metadata=metadata,
            s_aux=None,
        )


@functools.lru_cache(maxsize=16)
def _orders(isa: str, dtype: torch.dtype, heads: int, block: int, dim: int) -> tuple[Order, Order]:
    """How the keys of a block lie, and its values."""
    count = block * dim
    element = torch.arange(count).view(block, 1, dim)
    numbers = torch.zeros(2, count, dtype=torch.long)
    # Numbers are written digit by digit in base 128, since bfloat16 is exact to 256 only.
    for unit in (1, 128, 128**2, 128**3):
        digit = (element // unit % 128).to(dtype).expand(block, heads, dim).contiguous()
        pool = torch.zeros(2, heads, 2 * block, dim, dtype=dtype)
        keys, values = pool.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digit, digit.clone(), keys, values, torch.arange(block) + block, isa)
        for kind, written in enumerate((keys, values)):
            numbers[kind] += written[1, 0].reshape(-1).long() * unit
    keys_at, values_at = (Order.of(order.argsort().view(block, dim)) for order in numbers)
    return keys_at, values_at


class EvictingCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """The CPU back end's metadata, of shifted block tables."""


class EvictingCPUImpl(EvictingImpl, CPUAttentionBackendImpl):
    """The CPU back end's attention, with cuts."""

    def paged(self, layer: Any, cache: Tensor, step: Step) -> PagedCPU:
        return PagedCPU(cache, self, step.builder)


class EvictingCPUBackend(CPUAttentionBackend):
    """Chosen by the platform."""

    @staticmethod
    def get_impl_cls() -> type[EvictingCPUImpl]:
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingCPUBuilder]:
        return EvictingCPUBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> EvictingSpec:
        return EvictingSpec.of(spec)
