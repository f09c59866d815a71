"""Outcomes as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from kvwinnow.evaluation.generation import Answer
from kvwinnow.evaluation.needle_demo import Outcome

_FIGURES = {
    "tokens kept per head": "tokens\nper head",
    "cache bytes": "cache\nbytes",
    "times smaller than full bf16": "times\nsmaller",
    "first token after": "first\ntoken",
    "decode tokens/s": "tokens\nper s",
}
"""What is said about an answer's cost, and how a narrow column is headed that says it."""


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each contender: what it answered, whether that is right, and what it cost.

    It fits a terminal of 80 columns; a wider one leaves more room for the answers.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), leading=1, show_edge=False)
    table.add_column("cache", style="bold", min_width=12)
    table.add_column("answer", min_width=14)
    table.add_column("right?", no_wrap=True)
    for heading in _FIGURES.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        verdict = Text("right", "green") if outcome.right else Text("wrong", "red")
        table.add_row(outcome.contender.label, Text(outcome.answer.text), verdict, *_figures(outcome.answer))
    return table


def answer_table(answer: Answer) -> Table:
    """The figures of one answer, one a line, and how its cache was made."""
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    report = answer.report
    table.add_row("policy", Text(report.policy))
    table.add_row("keys, values", Text(f"{report.k_dtype}, {report.v_dtype}"))
    table.add_row("prompt, new tokens", f"{answer.prompt_tokens:,}, {answer.new_tokens:,}")
    for heading, figure in zip(_FIGURES, _figures(answer), strict=True):
        table.add_row(heading, figure)
    return table


def _figures(answer: Answer) -> tuple[str, ...]:
    report, speed = answer.report, answer.tokens_per_second
    return (
        f"{report.tokens_kept:,}",
        f"{report.nbytes:,}",
        f"{report.ratio:.1f}x",
        f"{answer.first_token_seconds:.2f} s",
        "-" if speed is None else f"{speed:.1f}",
    )
