"""vLLM's two schedulers, which tell the manager whose blocks are whose and adopt no shared block that is written to."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvwinnow.integrations.vllm.manager import EvictingManager
from kvwinnow.integrations.vllm.plan import readable_prefix
from kvwinnow.integrations.vllm.settings import KEY, NONE, read_settings

logger = init_logger(__name__)


class _Evicting:
    """What both have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = read_settings(config.additional_config)
        managers = pool.coordinator.single_type_managers
        if settings is None or len(managers) != 1 or not isinstance(managers[0], EvictingManager):
            raise RuntimeError("kvwinnow's scheduler was started without its attention back end; this is a bug of ours")
        manager = managers[0]
        manager.requests = self.requests  # type: ignore[attr-defined]
        manager.settings, manager.chunk = settings, self.max_num_scheduled_tokens  # type: ignore[attr-defined]
        look_up = pool.get_computed_blocks

        def get_computed_blocks(request: Any) -> Any:
            found, tokens, *others = look_up(request)
            limit = readable_prefix(manager.terms(request.request_id))
            if limit is not None and tokens > limit:
                tokens = limit
                found = pool.create_kv_cache_blocks(
                    tuple(group[: limit // manager.block_size] for group in found.blocks)
                )
            return found, tokens, *others

        pool.get_computed_blocks = get_computed_blocks

    def add_request(self, request: Any) -> None:
        """Take in a request; one whose prompt may still grow stays uncompressed, since no cut could be taken back."""
        if (getattr(request, "resumable", False) or request.request_id in self.requests) and request.sampling_params:  # type: ignore[attr-defined]
            params = request.sampling_params
            if (params.extra_args or {}).get(KEY) != NONE:
                logger.warning("kvwinnow evicts nothing from %s: its input comes as a stream", request.request_id)
            params.extra_args = {**(params.extra_args or {}), KEY: NONE}
        super().add_request(request)  # type: ignore[misc]


class EvictingScheduler(_Evicting, Scheduler):
    """For steps that run one after another."""


class EvictingAsyncScheduler(_Evicting, AsyncScheduler):
    """For steps that are scheduled while the one before still runs."""
