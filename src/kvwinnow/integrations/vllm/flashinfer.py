"""vLLM's FlashInfer back end, with cuts."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadataBuilder

from kvwinnow.integrations.vllm.attention import EvictingBuilder, EvictingImpl
from kvwinnow.integrations.vllm.spec import EvictingSpec


class EvictingFlashInferBuilder(EvictingBuilder, FlashInferMetadataBuilder):
    """FlashInfer's metadata, of shifted block tables."""


class EvictingFlashInferImpl(EvictingImpl, FlashInferImpl):
    """FlashInfer's attention, with cuts."""


class EvictingFlashInferBackend(FlashInferBackend):
    """Chosen by the platform."""

    @staticmethod
    def get_impl_cls() -> type[EvictingFlashInferImpl]:
        return EvictingFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingFlashInferBuilder]:
        return EvictingFlashInferBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> EvictingSpec:
        return EvictingSpec.of(super().customize_spec(spec))
