"""Traces written by hand or by another program: CSV and JSONL of token and attention. Needs no torch.

Each line is a token. Its attention is one number, the token's statistic from its arrival on; or a row of weights, those
that its query gives to the tokens up to itself, oldest first. In CSV a row's weights are separated by spaces.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from typing import Any

from kvwinnow.errors import TraceError
from kvwinnow.simulation.trace import Trace, from_numbers, from_rows

MOST_ROWS = 16_384
"""Tokens of a trace of rows, whose matrix takes 1 GiB then."""

MOST_WEIGHT = 1.01
"""Sum of the weights of one query, at most; what is above 1 comes of rounding."""

Lines = Iterator[tuple[int, str, float | list[float]]]
"""The number of the line, the token, its attention."""


def from_csv(text: str, name: str, prompt: int = 0) -> Trace:
    """A trace from CSV with the columns ``token`` and ``attention``; others are not looked at.

    Raises:
        TraceError: the text is no such table; the sentence names the line.
    """
    return _trace(_csv_lines(text, name), name, prompt)


def from_jsonl(text: str, name: str, prompt: int = 0) -> Trace:
    """A trace from lines such as ``{"token": "The", "attention": 0.7}`` or ``... "attention": [0.2, 0.8]}``.

    Raises:
        TraceError: the text is no such lines; the sentence names the line.
    """
    return _trace(_json_lines(text, name), name, prompt)


def _csv_lines(text: str, name: str) -> Lines:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        written = next(reader, [])
        header = [field.strip().lower() for field in written]
        if "token" not in header or "attention" not in header:
            raise TraceError(
                f"{name}, line 1: the header is {','.join(written)[:80]!r}; a trace's first line names its columns: "
                "token,attention"
            )
        twice = next((name for name in ("token", "attention") if header.count(name) > 1), None)
        if twice is not None:
            raise TraceError(
                f"{name}, line 1: two columns are named {twice}, so which one is meant is not told; rename one"
            )
        token, attention = header.index("token"), header.index("attention")
        for fields in reader:
            line = reader.line_num
            if not fields:
                continue
            if len(fields) != len(header):
                raise TraceError(
                    f"{name}, line {line}: {len(fields)} fields under a header of {len(header)}; put tokens with "
                    "commas or quotes into quotes"
                )
            numbers = fields[attention].split()
            if not numbers:
                raise TraceError(f"{name}, line {line}: no attention; give a number, or weights separated by spaces")
            weights = [_number(number, name, line) for number in numbers]
            yield line, fields[token], weights[0] if len(weights) == 1 else weights
    except csv.Error as error:
        raise TraceError(
            f"{name}, line {reader.line_num}: this is no CSV ({error}); write JSONL if the rows are long"
        ) from error


def _json_lines(text: str, name: str) -> Lines:
    for line, written in enumerate(text.split("\n"), start=1):
        if not written.strip():
            continue
        try:
            entry = json.loads(written)
        except (ValueError, RecursionError) as error:
            said = getattr(error, "msg", None) or (
                "too deep" if isinstance(error, RecursionError) else "too long a number"
            )
            raise TraceError(f"{name}, line {line}: this is no JSON ({said}); write one object a line") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("token"), str) or "attention" not in entry:
            raise TraceError(
                f"{name}, line {line}: {written.strip()[:60]!r} is no token with its attention; write "
                '{"token": "text", "attention": 0.7}, or a list of weights'
            )
        given = entry["attention"]
        if isinstance(given, list):
            if not given:
                raise TraceError(f"{name}, line {line}: attention is an empty list; give weights, or one number")
            yield line, entry["token"], [_number(number, name, line) for number in given]
        else:
            yield line, entry["token"], _number(given, name, line)


def _number(given: Any, name: str, line: int) -> float:
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < 3e38:
        raise TraceError(f"{name}, line {line}: attention {str(given)[:40]!r} is no number of 0 or more")
    return number


def _trace(lines: Lines, name: str, prompt: int) -> Trace:
    tokens, numbers, rows, where = [], list[float](), list[list[float]](), list[int]()
    for line, token, attention in lines:
        # The first row of a matrix has one weight, which may be written as a number.
        alone = isinstance(attention, float)
        if len(rows) > 1 and len(numbers) == len(rows) and not alone:
            raise TraceError(
                f"{name}, line {line}: a row of weights after {len(rows)} lines of one number each; give each token "
                "one number, or each its row"
            )
        tokens.append(token)
        where.append(line)
        rows.append([attention] if isinstance(attention, float) else attention)
        if isinstance(attention, float):
            numbers.append(attention)
    if not tokens:
        raise TraceError(f"{name} has no tokens; give at least one line with a token and its attention")
    if not 0 <= prompt <= len(tokens):
        raise TraceError(f"the prompt is to have {prompt} tokens, and {name} has {len(tokens)}; give 0 to that many")
    if len(numbers) == len(tokens):
        return from_numbers(tuple(tokens), numbers, prompt)
    if len(tokens) > MOST_ROWS:
        raise TraceError(f"{name} has {len(tokens):,} rows of weights, and {MOST_ROWS:,} are served; shorten it")
    for place, (row, line) in enumerate(zip(rows, where, strict=True)):
        _check_row(row, place, len(tokens), f"{name}, line {line}")
    return from_rows(tuple(tokens), [row[: place + 1] for place, row in enumerate(rows)], prompt)


def _check_row(row: list[float], place: int, tokens: int, where: str) -> None:
    """A row has the weights up to its own token; zeros for all tokens to come may follow."""
    if len(row) not in (place + 1, tokens):
        raise TraceError(
            f"{where}: {len(row)} weights for token {place + 1}, whose query sees {place + 1}; give one weight for "
            "each token up to itself"
        )
    if any(row[place + 1 :]):
        raise TraceError(
            f"{where}: token {place + 1} gives weight to a token that comes after it; attention is causal; was the "
            "matrix transposed?"
        )
    if sum(row) > MOST_WEIGHT:
        raise TraceError(
            f"{where}: the weights add up to {sum(row):.4g}, and attention weights of one query sum to 1 at most; was "
            "the matrix transposed?"
        )
    if not any(row):
        raise TraceError(f"{where}: all weights are 0, so the query attends to nothing; its weights add up to 1")
