"""vLLM's CPU worker, which lets the attention back end know its model runner."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from kvwinnow.integrations.vllm import runner


class EvictingCPUWorker(CPUWorker):
    """Named by the platform; ``--worker-cls`` need not be given."""

    def init_device(self) -> None:
        super().init_device()
        runner.remember(self.model_runner)
