"""The ``vllm.logits_processors`` entry point: does nothing but refuse to run where the platform was left out.

``VLLM_PLUGINS``, ``VLLM_TARGET_DEVICE`` and other platform plugins can keep vLLM from loading kvwinnow's platform, and
then nobody would read kvwinnow's settings. Logits processors are loaded in any case, and see the configuration. This
one is of both of vLLM's interfaces, as V2 loads no class that is not of its own.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor.interface import LogitsProcessor

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2
except ImportError:  # before 0.32 V2 loads no plugins

    class LogitsProcessorV2:  # type: ignore[no-redef]
        """Stands for nothing."""


_KEY = "kvwinnow"
_REASONS = (
    "VLLM_TARGET_DEVICE is set, VLLM_PLUGINS leaves kvwinnow out, another platform plugin is installed, or kvwinnow "
    "serves no platform like this machine's; set that right, or take the entry out to run uncompressed"
)


class PlatformGuard(LogitsProcessor, LogitsProcessorV2):
    """Refuses to be made, or to admit a request, if kvwinnow is asked for and its platform is not there."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        asked = vllm_config.additional_config
        if isinstance(asked, dict) and asked.get(_KEY) is not None:
            check_platform()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request that asks for a policy, where nobody would follow it.

        Raises:
            BadRequestError: kvwinnow's platform is not there.
        """
        policy = (sampling_params.extra_args or {}).get(_KEY)
        if policy is not None and not _platform_is_ours():
            from kvwinnow.integrations.vllm.bad_request import BadRequestError

            raise BadRequestError(f"{_KEY}={policy!r} is asked for, and vLLM runs without kvwinnow's platform plugin")

    def is_argmax_invariant(self) -> bool:
        """V1: nothing is changed, so greedy requests need not pass by."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """V1: there is no state."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: no request is changed."""
        return False

    def apply(self, logits: Any, *_: Any) -> Any:
        """Both: the logits as they are."""
        return logits


def check_platform() -> None:
    """Refuse to go on where nobody reads kvwinnow's settings, which somebody has given.

    Raises:
        UnsupportedSetupError: kvwinnow's platform is not there.
    """
    if not _platform_is_ours():
        from kvwinnow.errors import UnsupportedSetupError

        raise UnsupportedSetupError(
            f"additional_config asks for {_KEY}, and vLLM runs without kvwinnow's platform plugin: {_REASONS}"
        )


def _platform_is_ours() -> bool:
    from vllm.platforms import current_platform

    from kvwinnow.integrations.vllm.platform import EvictingPlatform

    return isinstance(current_platform, EvictingPlatform)
