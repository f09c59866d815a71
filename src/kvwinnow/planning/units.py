"""Numbers as people write them: tokens, parameters, shares."""

from __future__ import annotations

import re
from decimal import Decimal

from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.policies.budget import parse_size

UNITS = "1k = 1,024 tokens, 1M = 1,048,576 tokens, GB = 10^9 bytes, GiB = 2^30 bytes"
"""What the units mean, for every output."""

_TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_PARAMETERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s*([A-Za-z]?)")


def parse_tokens(text: int | str, what: str = "context") -> int:
    """A number of tokens: 4096, "4096", "128k" (1k = 1,024) or "1M" (1,048,576).

    Args:
        text: the number.
        what: it is, for the complaint.

    Raises:
        KvwinnowError: something else, or less than 1.
    """
    return _scaled(text, _TOKENS, what, "a whole number of tokens, 1 or more, such as 4096, 128k or 1M")


def parse_parameters(text: int | str) -> int:
    """A number of parameters: 8030261248, "70B" (10^9) or "135M" (10^6).

    Raises:
        KvwinnowError: something else, or less than 1.
    """
    return _scaled(text, _PARAMETERS, "parameters", "a number of 1 or more, such as 135M or 70.6B")


def parse_overhead(text: float | str, memory: int) -> int:
    """Bytes of one GPU that are kept free: a share of its ``memory`` ("10%", 0.1) or a size ("2GiB").

    Raises:
        KvwinnowError: something else, or all of the memory.
    """
    wrong = KvwinnowError(
        f"overhead {text!r} is no part of a GPU's memory; give a share such as 10% or a size such as 2GiB"
    )
    if isinstance(text, str) and not text.strip().endswith("%"):
        try:
            size = 0 if text.strip() == "0" else parse_size(text)
        except PolicyError:
            raise wrong from None
    else:
        try:
            share = float(text.strip().rstrip("%")) / 100 if isinstance(text, str) else float(text)
        except ValueError:
            raise wrong from None
        if not 0 <= share < 1:
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


def _scaled(text: int | str, units: dict[str, int], what: str, wanted: str) -> int:
    wrong = KvwinnowError(f"{what} {text!r} is none; give {wanted}")
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise wrong
    match = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    if isinstance(text, str) and (match is None or match[2].lower() not in units):
        raise wrong
    value = text if match is None else Decimal(re.sub("[,_]", "", match[1])) * units[match[2].lower()]
    if value != int(value) or value < 1:
        raise wrong
    return int(value)
