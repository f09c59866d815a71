"""What all tests share: no network, one hypothesis profile, and the default model, loaded once a test process."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Time says nothing about these tests, whose examples run on machines of any speed. On CI the same examples run each
# time, so that a red run can be repeated.
settings.register_profile(
    "kvwinnow",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvwinnow")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The default model in float32 and its tokenizer. The first process that asks converts it, others wait."""
    from kvwinnow.integrations.loading import load

    return load(device="cpu")
