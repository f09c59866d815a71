"""``kvwinnow policies``."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from rich.table import Table
from rich.text import Text

from kvwinnow.cli.console import out
from kvwinnow.textform import given_to_nested, show_value


def policies() -> None:
    """List the policies: what each keeps, its parameters with their defaults, its paper."""
    from kvwinnow.policies import POLICIES

    table = Table(show_lines=True)
    for heading in ("policy", "what it keeps", "parameters and defaults", "paper"):
        table.add_column(heading, no_wrap=heading == "policy", ratio=None if heading == "policy" else 1)
    for name, policy in POLICIES.items():
        summary = (inspect.getdoc(policy) or "").partition("\n\n")[0]
        paper = "\n".join(filter(None, (policy.paper, policy.url)))
        table.add_row(
            Text(name, "bold"), Text(" ".join(summary.replace("``", "").split())), _parameters(policy), Text(paper)
        )
    console = out()
    console.print(table)
    console.print(
        "Written as NAME or NAME:PARAMETER=VALUE,... for example snapkv:budget=512,window=64; a policy within "
        "another is written NAME(PARAMETER=VALUE,...). A budget is a number of "
        "tokens per KV head (512), a share of the prompt (0.125) or a size of the whole cache (64MiB).",
        highlight=False,
        markup=False,
    )


def _parameters(policy: Any) -> Text:
    fields = dataclasses.fields(policy)
    given = given_to_nested(policy)
    return Text("\n".join(f"{field.name}={_default(field, given)}" for field in fields) or "none")


def _default(field: dataclasses.Field[Any], given: str | None) -> str:
    return "(required)" if field.default is dataclasses.MISSING else show_value(field.default, but=given)
