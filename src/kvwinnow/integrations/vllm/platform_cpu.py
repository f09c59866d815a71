"""vLLM's CPU platform, with kvwinnow."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

from kvwinnow.integrations.vllm.platform import EvictingPlatform


class EvictingCpuPlatform(EvictingPlatform, CpuPlatform):
    """Chosen by ``platform.plugin``."""

    worker = "kvwinnow.integrations.vllm.worker_cpu.EvictingCPUWorker"
