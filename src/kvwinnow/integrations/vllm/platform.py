"""The ``vllm.platform_plugins`` entry point: a platform may refuse configurations and requests, and names classes.

It is vLLM's own platform in all else. Without ``kvwinnow`` in ``additional_config`` it changes nothing at all.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kvwinnow.errors import KvwinnowError, PolicyError, UnsupportedSetupError
from kvwinnow.integrations.vllm import metrics, runner
from kvwinnow.integrations.vllm.refusals import check_config, check_request, check_version
from kvwinnow.integrations.vllm.settings import KEY, Settings, read_settings, request_policy

V2 = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that chooses vLLM's model runner; its processes inherit it."""
_HERE = "kvwinnow.integrations.vllm"
_PLATFORMS = {
    "vllm.platforms.cpu.CpuPlatform": f"{_HERE}.platform_cpu.EvictingCpuPlatform",
    "vllm.platforms.cuda.CudaPlatform": f"{_HERE}.platform_cuda.EvictingCudaPlatform",
}
"""vLLM's platforms, and ours in their place."""
_BACKENDS = {
    "CPUAttentionBackend": f"{_HERE}.cpu.EvictingCPUBackend",
    "FlashAttentionBackend": f"{_HERE}.flash_attn.EvictingFlashAttentionBackend",
    "FlashInferBackend": f"{_HERE}.flashinfer.EvictingFlashInferBackend",
    "TritonAttentionBackend": f"{_HERE}.triton_attn.EvictingTritonAttentionBackend",
}
"""vLLM's attention back ends, and ours in their place."""

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


def plugin() -> str | None:
    """The platform that this machine gets, if vLLM would choose one that is served and no other plugin wants it."""
    from importlib.metadata import entry_points

    from vllm.platforms import builtin_platform_plugins

    others = [entry.name for entry in entry_points(group="vllm.platform_plugins") if entry.name != KEY]
    if others:
        return None
    found = [name for detect in builtin_platform_plugins.values() if (name := detect()) is not None]
    return _PLATFORMS.get(found[0]) if len(found) == 1 else None


class EvictingPlatform(_Base):
    """What all our platforms add to vLLM's.

    A mixin: vLLM's platform is the other base class.

    Attributes:
        worker: path of the worker's class.
        settings: of the server that this process belongs to; None: it was started without kvwinnow.
        config: that server's.
    """

    worker: str
    settings: Settings | None = None
    config: Any = None

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what is not served with kvwinnow, and name its classes.

        Raises:
            KvwinnowError: the settings are wrong, or something else in the configuration is not served with them.
        """
        super().check_and_update_config(vllm_config)
        _forget_chosen_backend()
        EvictingPlatform.settings = settings = read_settings(vllm_config.additional_config)
        EvictingPlatform.config = vllm_config
        if settings is None:
            return
        check_version()
        if not runner.serves_v2():
            os.environ.setdefault(V2, "0")  # whoever asks for it is refused
        check_config(vllm_config)
        scheduler = "EvictingAsyncScheduler" if vllm_config.scheduler_config.async_scheduling else "EvictingScheduler"
        vllm_config.scheduler_config.scheduler_cls = f"{_HERE}.scheduler.{scheduler}"
        vllm_config.parallel_config.worker_cls = cls.worker
        metrics.start()

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        """Our back end, where vLLM would choose the one that it is made of."""
        from vllm.config import get_current_vllm_config

        chosen: str = super().get_attn_backend_cls(selected_backend, *args, **kwargs)
        if read_settings(get_current_vllm_config().additional_config) is None:
            return chosen
        return served_backend(chosen)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request whose policy is wrong, before it reaches the engine.

        Raises:
            BadRequestError: the policy is unknown or not served, or the server was started without kvwinnow.
        """
        super().validate_request(processed_inputs, params)
        try:
            _check(processed_inputs, params)
        except KvwinnowError as error:
            from kvwinnow.integrations.vllm.bad_request import BadRequestError

            raise BadRequestError(str(error)) from error


def _check(processed_inputs: Any, params: Any) -> None:
    extra_args, settings = getattr(params, "extra_args", None), EvictingPlatform.settings
    if settings is not None:
        request_policy(extra_args, settings)
        check_request(processed_inputs, params, settings, EvictingPlatform.config)
    elif extra_args and extra_args.get(KEY) is not None:
        raise PolicyError(
            f"{KEY}={extra_args[KEY]!r} is asked for, but the server was started without it; start it with "
            f"--additional-config '{{\"{KEY}\": {{}}}}'"
        )


def _forget_chosen_backend() -> None:
    """Have vLLM choose anew: it remembers a choice by all but the configuration that ours depends on.

    An engine with kvwinnow may follow one without in the same process, and the other way round.
    """
    selector: Any = sys.modules.get("vllm.v1.attention.selector")
    chosen = getattr(selector, "_cached_get_attn_backend", None)
    if chosen is not None:
        chosen.cache_clear()


def served_backend(chosen: str) -> str:
    """The path of our back end in place of vLLM's.

    Raises:
        UnsupportedSetupError: there is none for it.
    """
    name = chosen.rsplit(".", 1)[-1]
    if name not in _BACKENDS:
        raise UnsupportedSetupError(
            f"vLLM chose the attention back end {name}, for which kvwinnow has no reader yet; there are "
            f"{', '.join(_BACKENDS)}; name one by --attention-backend"
        )
    return _BACKENDS[name]
