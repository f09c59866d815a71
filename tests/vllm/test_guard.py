"""Where vLLM was kept from loading the platform, it must not run uncompressed in silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvwinnow.integrations.vllm.guard import PlatformGuard
from tests.vllm.offline import run_engine


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize(
    "kept_out", [{"VLLM_TARGET_DEVICE": "cpu"}, {"VLLM_PLUGINS": "another"}], ids=lambda env: next(iter(env))
)
def test_without_the_platform_the_engine_does_not_start(kept_out: dict[str, str]) -> None:
    ran = run_engine({**kept_out, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, enforce_eager=True)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert "additional_config asks for kvwinnow, and vLLM runs without kvwinnow's platform plugin" in last


def config(**additional: Any) -> Any:
    return SimpleNamespace(additional_config=additional)


def params(**extra_args: Any) -> Any:
    return SimpleNamespace(extra_args=extra_args or None)


def test_with_the_platform_it_does_nothing() -> None:
    guard = PlatformGuard(config(kvwinnow={}), "cpu", False)
    assert guard.is_argmax_invariant()
    assert guard.add_request(0, params()) is False
    assert guard.apply("logits") == "logits"
    PlatformGuard.validate_params(params(kvwinnow="snapkv:budget=64"))


def test_servers_without_kvwinnow_do_not_care(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms
    from vllm.exceptions import VLLMValidationError
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    PlatformGuard(config(), "cpu", False)
    PlatformGuard(config(other=1), SimpleNamespace())
    PlatformGuard(SimpleNamespace(additional_config=object()), "cpu", False)
    PlatformGuard.validate_params(params())
    with pytest.raises(VLLMValidationError, match="kvwinnow='h2o:budget=64' is asked for, and vLLM runs without"):
        PlatformGuard.validate_params(params(kvwinnow="h2o:budget=64"))


def test_both_of_vllms_runners_load_it() -> None:
    """V2 refuses every class of V1's interface, and so would break whoever has kvwinnow installed."""
    from vllm.v1.sample.logits_processor import _load_logitsprocs_plugins
    from vllm.v1.worker.gpu.sample.logits_processor import loader

    assert PlatformGuard in _load_logitsprocs_plugins()
    if hasattr(loader, "_load_v2_logitsprocs_plugins"):
        assert PlatformGuard in loader._load_v2_logitsprocs_plugins()
