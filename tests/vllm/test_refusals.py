"""What is not served is refused in one sentence, before anything runs; vLLM without kvwinnow's entry is vLLM."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvwinnow.errors import KvwinnowError, UnsupportedSetupError
from kvwinnow.integrations import default_model
from kvwinnow.integrations.vllm import runner
from kvwinnow.integrations.vllm.platform import V2
from tests.models import tiny_model
from tests.vllm.conftest import TinyEngines
from tests.vllm.engines import OPTIONS, Ask, Engine, Engines

from vllm import EngineArgs  # isort: skip - after tests.vllm.engines has set vLLM's environment


@pytest.fixture
def no_engine(engines: Engines) -> None:
    """None runs during the test: its settings are once a process."""
    engines.close()


def start(**options: Any) -> Any:
    """All that an engine checks before it loads a model."""
    return EngineArgs(**{"model": str(default_model.ensure()), **OPTIONS, **options}).create_engine_config()


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculative_config": NGRAM}, "not tested with speculative decoding, so it is refused"),
        ({"kv_transfer_config": CONNECTOR}, "not tested with a KV transfer connector, so it is refused"),
        ({"kv_cache_dtype": "fp8"}, "not tested with --kv-cache-dtype fp8, so it is refused; take auto"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "not tested with the scheduler vllm.v1"),
        ({"runner": "pooling", "convert": "embed"}, "not tested with a model that does not generate"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_served_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        start(**options)
    assert f"kvwinnow in vLLM is {says}" in str(caught.value)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("kind", ["mistral, sliding", "gemma3"])
def test_a_model_with_sliding_layers_is_refused(tmp_path: Path, kind: str) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not tested with sliding-window layers, so it is refused; take a model"):
        start(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=256)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("version", ["0.27.9", "0.33.0", "1.0"])
def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    says = rf"vLLM {re.escape(version)} is not known to kvwinnow, which was tested with 0\.28 to 0\.32; install one"
    with pytest.raises(ValueError, match=says):
        start()


@pytest.mark.usefixtures("no_engine")
def test_a_vllm_whose_parts_have_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    monkeypatch.setattr(FullAttentionManager, "cache_blocks", lambda self, request, count: None)
    with pytest.raises(ValueError, match=r"has no FullAttentionManager\.cache_blocks with a parameter num_tokens"):
        start()


@pytest.mark.usefixtures("no_engine")
def test_the_runner_is_vllm_s_choice_where_both_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(V2, "")
    monkeypatch.delenv(V2)
    start()
    assert V2 not in os.environ or not runner.serves_v2()
    monkeypatch.setattr(runner, "serves_v2", lambda: False)
    start()
    assert os.environ[V2] == "0"


def test_a_runner_in_which_requests_cannot_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    monkeypatch.setattr(runner, "_rows", None)
    monkeypatch.setattr(runner, "_requests", {})
    for kind in (object, RunnerV1, RunnerV2):
        says = f"runs models by {kind.__module__}.{kind.__qualname__}, in which kvwinnow cannot find a step's requests"
        with pytest.raises(UnsupportedSetupError, match=re.escape(says)):
            runner.remember(object.__new__(kind))


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("snapkv", "is a str; give a table such as"),
        ({"polcy": "snapkv"}, "has no entry 'polcy'; there are policy, prefill_budget"),
        ({"policy": "snapvk"}, "snapvk"),
        ({"policy": "pyramidkv:budget=256"}, "gives layers different budgets"),
        ({"policy": "h2o", "prefill_budget": 0}, "prefill_budget=0 must be a whole number of tokens, 1 or more"),
    ],
)
def test_wrong_settings_are_refused(entry: object, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        start(additional_config={"kvwinnow": entry})


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("snapvk", "snapvk"),
        ("snapkv:budgt=3", "budgt"),
        (7, "kvwinnow=7 is no text; give that of a policy"),
        ("pyramidkv:budget=256", "gives layers different budgets"),
        ("knorm:budget=256", "which is not measured in vLLM; take snapkv"),
        ("blocks:policy=h2o(budget=64)", "vLLM evicts whole blocks anyway; give the policy inside"),
        ("h2o:budget=64MiB", "is a size, and vLLM's pool has its own"),
    ],
)
def test_a_bad_policy_is_refused_and_the_engine_goes_on(
    tiny_engines: TinyEngines, noise: list[int], policy: Any, says: str
) -> None:
    engine = tiny_engines()
    with pytest.raises(KvwinnowError, match=re.escape(says)) as caught:
        engine.add(Ask(noise[:50], policy))
    assert "\n" not in str(caught.value)
    assert not engine.busy()
    assert len(engine.text(Ask(noise[:50], "streamingllm:budget=16", tokens=3))) == 3


def test_with_cuts_between_chunks_what_can_never_fit_is_refused(tiny_engines: TinyEngines, noise: list[int]) -> None:
    engine = tiny_engines(
        additional_config={"kvwinnow": {"prefill_budget": 128}},
        num_gpu_blocks_override=16,
        max_num_batched_tokens=128,
        max_model_len=4096,
    )
    with pytest.raises(KvwinnowError, match="hold 1,040 slots at once, and the pool has 480"):
        engine.add(Ask(noise[:1000], "none"))
    assert not engine.busy()


def test_without_the_entry_a_policy_is_refused_and_all_else_is_as_ever(
    tiny_engines: TinyEngines, noise: list[int]
) -> None:
    ask = Ask(noise[:300])
    text = tiny_engines().text(ask)
    engine: Engine = tiny_engines(additional_config={})
    assert type(engine.scheduler).__module__.startswith("vllm.")
    with pytest.raises(KvwinnowError, match="kvwinnow='h2o' is asked for, but the server was started without it"):
        engine.add(Ask(noise[:50], "h2o"))
    assert engine.text(ask) == text
