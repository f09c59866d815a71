"""Numbers as people write them: tokens, parameters, shares."""

from __future__ import annotations

import operator
import re
from decimal import Decimal

from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.policies.budget import parse_size

UNITS = "1k = 1,024 tokens, 1M = 1,048,576 tokens, GB = 10^9 bytes, GiB = 2^30 bytes"
"""What the units mean, for every output."""

_TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_PARAMETERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST = 10**18
"""What is larger is a slip of the hand; nothing that is planned comes near it."""

_LONGEST = 60
"""Characters of a value that a complaint shows."""

_NUMBER = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s*([A-Za-z]?)")


def parse_tokens(text: int | str, what: str = "context", *, least: int = 1) -> int:
    """A number of tokens: 4096, "4096", "128k" (1k = 1,024) or "1M" (1,048,576).

    Args:
        text: the number.
        what: it is, for the complaint.
        least: the smallest that is allowed.

    Raises:
        KvwinnowError: something else, less than ``least``, or more than ``MOST``.
    """
    return _scaled(text, _TOKENS, what, f"a whole number of tokens, {least} or more, such as 4096, 128k or 1M", least)


def parse_parameters(text: int | str) -> int:
    """A number of parameters: 8030261248, "70B" (10^9) or "135M" (10^6).

    Raises:
        KvwinnowError: something else, less than 1, or more than ``MOST``.
    """
    return _scaled(text, _PARAMETERS, "parameters", "a number of 1 or more, such as 135M or 70.6B")


def parse_count(what: str, value: int | str) -> int:
    """A plain number, such as of rows: 8 or "8".

    Raises:
        KvwinnowError: something else, less than 1, or more than ``MOST``.
    """
    return _scaled(value, {"": 1}, what, "a whole number, 1 or more", joint="=")


def parse_overhead(text: float | str, memory: int) -> int:
    """Bytes of one GPU that are kept free: a share of its ``memory`` ("10%", 0.1) or a size ("2GiB").

    Raises:
        KvwinnowError: something else, or all of the memory.
    """
    wrong = KvwinnowError(
        f"overhead {_shown(text)} is no part of a GPU's memory; give a share such as 10% or a size such as 2GiB"
    )
    if isinstance(text, str) and not text.strip().endswith("%"):
        try:
            size = 0 if text.strip() == "0" else parse_size(text)
        except PolicyError:
            raise wrong from None
    else:
        try:
            share = float(text.strip().rstrip("%")) / 100 if isinstance(text, str) else float(text)
        except (TypeError, ValueError, OverflowError):
            raise wrong from None
        if isinstance(text, bool) or not 0 <= share < 1:
            raise wrong
        size = int(memory * share)
    if size >= memory:
        raise KvwinnowError(f"overhead {text!r} is all of a GPU's {memory:,} bytes; give less")
    return size


def show_tokens(tokens: int) -> str:
    """4,000, 128k or 1M, exactly."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size:,}{unit}"
    return f"{tokens:,}"


def _scaled(text: int | str, units: dict[str, int], what: str, wanted: str, least: int = 1, *, joint: str = " ") -> int:
    named = f"{what}{joint}{_shown(text)}"
    wrong = KvwinnowError(f"{named} is none; give {wanted}")
    value: int | Decimal
    if isinstance(text, str):
        match = _NUMBER.fullmatch(text.strip())
        if match is None or match[2].lower() not in units:
            raise wrong
        value = Decimal(re.sub("[,_]", "", match[1])) * units[match[2].lower()]
    else:
        try:
            value = operator.index(text)  # numpy's whole numbers too
        except TypeError:
            raise wrong from None
    if isinstance(text, bool):
        raise wrong
    if value > MOST:
        raise KvwinnowError(f"{named} is more than {MOST:,}, the most that is planned; give less")
    if value != int(value) or value < least:
        raise wrong
    return int(value)


def _shown(value: object) -> str:
    """A value as a complaint names it, short."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "with thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
