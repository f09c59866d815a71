"""What the pool's manager knows of a layer: full attention whose requests may let go of their first blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.integrations.vllm.manager import EvictingManager
from kvwinnow.integrations.vllm.settings import read_settings

# The built-in kinds are registered when the list is first asked for, but only while it is empty.
KVCacheSpecRegistry._ensure_registered()


@register_kv_cache_spec(manager_class=EvictingManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """A full attention layer of which the manager frees what ``plan`` says is gone."""

    @classmethod
    def of(cls, spec: Any) -> Self:
        """The same layer, under this manager.

        Raises:
            UnsupportedSetupError: the layer is none of full attention.
        """
        if isinstance(spec, cls):
            return spec
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            raise UnsupportedSetupError(
                f"kvwinnow in vLLM serves layers of full attention; this model has a layer of {type(spec).__name__}"
                f"{' with a sliding window' if getattr(spec, 'sliding_window', None) else ''}"
            )
        return cls(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(FullAttentionSpec)})

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes of a request of the greatest length, which need not fit at once if prompts are cut chunk by chunk."""
        whole: int = super().max_memory_usage_bytes(vllm_config)
        settings = read_settings(vllm_config.additional_config)
        if settings is None or settings.prefill_budget is None:
            return whole
        held = settings.prefill_budget + vllm_config.scheduler_config.max_num_batched_tokens + 2 * self.block_size
        pages: int = -(-held // self.block_size) * self.page_size_bytes
        return min(whole, pages)
