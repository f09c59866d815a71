"""docs/planning.md shows what the program prints."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

from kvwinnow.cli import main
from kvwinnow.cli.plan import plan as command
from kvwinnow.planning import plan
from tests.docs.test_examples import code_blocks

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
SESSIONS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=lambda text: text[:60])
def test_a_command_prints_what_the_page_shows(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    assert program == "kvwinnow"
    assert main(arguments) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == shown.splitlines()


def test_every_scenario_has_its_commands() -> None:
    assert len(SESSIONS) == 6


def test_the_example_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = code_blocks("docs/planning.md")
    exec(code, {})
    printed = capsys.readouterr().out.split()
    planned = plan("llama-3.1-8b", context="32k", gpu="L4", policy="snapkv:budget=0.25", dtype="int4")
    at = planned.contexts[0]
    assert printed[:6] == [str(x) for x in (32768, at.full, at.kept, at.prefill, at.fits, at.requests)]


def test_every_parameter_of_plan_has_its_option_on_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE.partition("## In Python")[2], flags=re.M)
    named = [name for parameters, _ in rows for name in re.findall(r"`(\w+)`", parameters)]
    assert named == list(inspect.signature(plan).parameters)
    help_text = " ".join(str(inspect.signature(command)).split())
    for option in re.findall(r"`--([a-z-]+)`", " ".join(options for _, options in rows)):
        assert f"{option.replace('-', '_')}: " in help_text


def test_figures_in_the_prose() -> None:
    full = plan("llama-3.1-70b", context="1M", dtype="int4", gpu="H100-80GB", weights_dtype="int4")
    assert full.contexts[0].kept is not None
    assert full.gpu is not None
    assert round(full.contexts[0].kept / 10**9) == 99
    assert round(full.contexts[0].full / full.contexts[0].kept, 1) == 3.5
    assert round(full.gpu.free / 10**9) == 37
    mixed = plan("llama-3.1-8b", context="256k", k_dtype="int8", v_dtype="int4").contexts[0]
    assert mixed.kept is not None
    assert round(mixed.kept / 10**9, 1) == 14.0
    int4 = plan("llama-3.1-8b", context="256k", dtype="int4").contexts[0]
    assert int4.kept is not None
    assert round(int4.kept / 10**9, 1) == 9.9
    assert round(plan("gemma-2-27b", context="1M").contexts[0].full / 2 / 10**9, 1) == 99.2
