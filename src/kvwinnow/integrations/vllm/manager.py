"""The scheduler's side: frees the blocks that ``plan`` says are gone, and keeps the prefix cache clean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvwinnow.integrations.vllm import metrics
from kvwinnow.integrations.vllm.plan import Terms, most_held, plan, written_from
from kvwinnow.integrations.vllm.settings import Settings, terms_of


class EvictingManager(FullAttentionManager):
    """Full attention's manager, whose requests hold fewer blocks than they have tokens.

    Attributes:
        requests: the scheduler's own table of requests by id, shared by it when it has been made.
        settings: the server's.
        chunk: the most tokens that one step computes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requests: Mapping[str, Any] = {}
        self.settings = Settings()
        self.chunk = 0

    def terms(self, request_id: str) -> Terms | None:
        """What was agreed for a request; None: it stays uncompressed."""
        request = self.requests[request_id]
        params = request.sampling_params
        if params is None:  # a pooling request reads no cache after its prompt
            return None
        return terms_of(params.extra_args, self.settings, request.num_prompt_tokens, self.block_size)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no later step reads; steps still running do not count as computed."""
        gone = plan(self.terms(request_id), processed_computed_tokens).gone
        if gone and request_id in self.req_to_blocks:
            blocks = self.req_to_blocks[request_id][: gone // self.block_size]
            freed = sum(not block.is_null for block in blocks)
            self._remove_blocks_in_range(request_id, 0, gone // self.block_size)
            metrics.add(metrics.BLOCKS_FREED, freed)
            metrics.add(metrics.TOKENS_EVICTED, freed * self.block_size)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer blocks to other requests, up to the first that a cut writes to."""
        limit = written_from(self.terms(request.request_id))
        super().cache_blocks(request, num_tokens if limit is None else min(num_tokens, limit), *args, **kwargs)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Blocks to allocate; a request to be admitted is asked for no more than it ever holds at once."""
        if kwargs.get("apply_admission_cap"):
            terms = self.terms(request_id)
            if terms is not None:
                num_tokens = most_held(terms, num_tokens, self.chunk)
        needed: int = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        return needed
