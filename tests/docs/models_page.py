"""Writes the tables of docs/models.md from the tests: ``python -m tests.docs.models_page``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from kvwinnow import CompressedCache
from tests import test_families, test_oracle_models
from tests.integrations.test_structure import REFUSED
from tests.models import KINDS, WINDOW, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- {}: written by tests/docs/models_page.py -->\n", "<!-- end -->\n"

CHECKS = {
    "room": "test_a_budget_for_everything_gives_the_uncompressed_tokens",
    "chunks": "test_a_prompt_in_chunks_gives_the_uncompressed_tokens",
    "evicted": "test_after_eviction_a_family_says_what_it_says_under_masks",
    "padded": "test_a_padded_row_says_what_it_says_alone",
    "codecs": "test_every_codec_works",
    "bytes": "test_bytes_are_those_predicted",
}
IN_ALL_POLICIES = {
    "chunks": "test_a_budget_for_everything_gives_the_uncompressed_tokens_in_chunks",
    "evicted": "test_generation_is_that_of_the_model_under_masks",
}
"""Other names of the same checks in tests/test_oracle_models.py, which takes its families through every policy."""


def kinds_of(module: ModuleType, test: str) -> set[str]:
    """The families that a test is parametrised with."""
    marks: list[Any] = getattr(getattr(module, test, None), "pytestmark", [])
    return {kind for mark in marks if mark.name == "parametrize" and mark.args[0] == "kind" for kind in mark.args[1]}


def checked(check: str) -> set[str]:
    """The families that pass a check."""
    own = CHECKS[check]
    return kinds_of(test_families, own) | kinds_of(test_oracle_models, IN_ALL_POLICIES.get(check, own))


def attention(kind: str) -> str:
    """What the cache reads from a tiny model of the family."""
    structure = CompressedCache(tiny_model(kind, heads=4, kv_heads=2, layers=2), "full").structure
    heads = {4: "MHA", 2: "GQA", 1: "MQA"}[structure.kv_heads]
    sliding = structure.sliding.count(WINDOW)
    layers = {0: "full", 1: "full and sliding", 2: "sliding"}[sliding]
    return f"{heads}, {layers}"


def served() -> str:
    """The table of families."""
    checks = {check: checked(check) for check in CHECKS}
    lines = [
        f"| family | what sets it apart | layers as tested | {' | '.join(CHECKS)} |",
        f"|---|---|---|{'---|' * len(CHECKS)}",
    ]
    for kind, family in KINDS.items():
        ticks = " | ".join("yes" if kind in checks[check] else "no" for check in CHECKS)
        name = f"`{family.model or family.name + 'ForCausalLM'}`"
        lines.append(f"| {name} | {family.features} | {attention(kind)} | {ticks} |")
    return "\n".join(lines) + "\n"


def refused() -> str:
    """The table of refusals."""
    lines = ["| model | layer named | as |", "|---|---|---|"]
    lines += [f"| {name} | `{layer}` | {what} |" for name, (_, layer, what) in REFUSED.items()]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in (("served", served()), ("refused", refused())):
        before, rest = page.split(BEGIN.format(name))
        page = before + BEGIN.format(name) + "\n" + table + "\n" + END + rest.split(END, 1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
