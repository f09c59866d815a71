"""vLLM's Triton back end, with cuts."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvwinnow.integrations.vllm.attention import EvictingBuilder, EvictingImpl
from kvwinnow.integrations.vllm.spec import EvictingSpec


class EvictingTritonAttentionBuilder(EvictingBuilder, TritonAttentionMetadataBuilder):
    """Triton's metadata, of shifted block tables."""


class EvictingTritonAttentionImpl(EvictingImpl, TritonAttentionImpl):
    """Triton's attention, with cuts."""


class EvictingTritonAttentionBackend(TritonAttentionBackend):
    """Chosen by the platform."""

    @staticmethod
    def get_impl_cls() -> type[EvictingTritonAttentionImpl]:
        return EvictingTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingTritonAttentionBuilder]:
        return EvictingTritonAttentionBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> EvictingSpec:
        return EvictingSpec.of(super().customize_spec(spec))
