"""What the page on vLLM says of settings, policies and metrics is so. None of it needs vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvwinnow.errors import KvwinnowError
from kvwinnow.integrations.vllm import metrics
from kvwinnow.integrations.vllm.refusals import NEWEST, OLDEST
from kvwinnow.integrations.vllm.settings import Settings, read_settings, request_policy, served
from kvwinnow.policies import POLICIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")


def table(heading: str) -> dict[str, str]:
    """The table whose head begins with ``heading``: the second cell of each row by its first."""
    rows = PAGE.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return {cells[1].strip(): cells[2].strip() for cells in (row.split("|") for row in rows)}


@pytest.mark.parametrize("page", ["docs/vllm.md", "README.md"])
def test_commands_give_settings_that_are_read(page: str) -> None:
    texts = re.findall(r"--additional-config '(.*)'", (ROOT / page).read_text(encoding="utf-8"))
    assert texts
    for text in texts:
        settings = read_settings(json.loads(text))
        assert settings is not None
        assert settings.policy == "snapkv:budget=1024"


def test_every_setting_has_its_row() -> None:
    assert set(table("entry")) == {f"`{name}`" for name in Settings.__dataclass_fields__}


def test_requests_of_the_page_are_served() -> None:
    texts = re.findall(r'\{"kvwinnow": "(.*?)"\}', PAGE)
    assert len(texts) == 2
    for text in texts:
        assert request_policy({"kvwinnow": text}, Settings()) == text


def test_every_policy_is_served_or_refused_as_the_table_says() -> None:
    said = {}
    for names, verdict in table("policies").items():
        said |= dict.fromkeys(re.findall(r"`(\w+)`", names), verdict)
    assert set(said) == set(POLICIES) - {"blocks"}
    for name, verdict in said.items():
        if verdict.startswith("refused"):
            with pytest.raises(KvwinnowError):
                served(name)
        else:
            assert (served(name) is None) == (name == "full")


def test_versions_and_metrics_are_those_of_the_code() -> None:
    assert f"older than {OLDEST} or newer than {NEWEST}" in PAGE
    assert set(table("name")) == {f"`{name}_total`" for name, _ in metrics.NAMES}


def test_tests_that_the_page_names_exist() -> None:
    found = {file.name for folder in ("tests/vllm", "tests/integrations/vllm") for file in (ROOT / folder).glob("*.py")}
    assert set(re.findall(r"test_\w+\.py", PAGE)) <= found
