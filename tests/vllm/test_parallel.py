"""Several workers give the tokens of one: each evicts for its own KV heads, or its own layers, by the same plan."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm.offline import run_engine, single_process, tokens_of

pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.usefixtures("smollm2")]


def test_tensor_parallel() -> None:
    """Three workers with one of the three KV heads each."""
    found = tokens_of(run_engine(tensor_parallel_size=3, distributed_executor_backend="mp", enforce_eager=True))
    assert found == single_process()


def test_pipeline_parallel() -> None:
    """Two workers with half of the layers each.

    vLLM 0.32 on the CPU makes the buffer between them when it warms up, which it does not in eager mode; so this runs
    in the cheapest mode that is not eager.
    """
    cheapest = {"mode": 2, "backend": "eager"}
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "compilation_config": cheapest}
    warmed_up = {"VLLM_CPU_CI_ENV": "0"}  # which other tests' engines do without
    assert tokens_of(run_engine(warmed_up, **options)) == single_process()
