"""vLLM's FlashAttention back end, with cuts."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from kvwinnow.integrations.vllm.attention import EvictingBuilder, EvictingImpl
from kvwinnow.integrations.vllm.spec import EvictingSpec


class EvictingFlashAttentionBuilder(EvictingBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, of shifted block tables."""


class EvictingFlashAttentionImpl(EvictingImpl, FlashAttentionImpl):
    """FlashAttention's attention, with cuts."""


class EvictingFlashAttentionBackend(FlashAttentionBackend):
    """Chosen by the platform."""

    @staticmethod
    def get_impl_cls() -> type[EvictingFlashAttentionImpl]:
        return EvictingFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingFlashAttentionBuilder]:
        return EvictingFlashAttentionBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> EvictingSpec:
        return EvictingSpec.of(super().customize_spec(spec))
