"""vLLM's CUDA platform, with kvwinnow."""

from __future__ import annotations

from vllm.platforms.cuda import CudaPlatform

from kvwinnow.integrations.vllm.platform import EvictingPlatform


class EvictingCudaPlatform(EvictingPlatform, CudaPlatform):
    """Chosen by ``platform.plugin``."""

    worker = "kvwinnow.integrations.vllm.worker_gpu.EvictingGPUWorker"
