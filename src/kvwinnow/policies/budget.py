"""Budgets: tokens per KV head, a share of the prompt, or bytes for the whole cache."""

from __future__ import annotations

import re
from decimal import Decimal

from kvwinnow.errors import PolicyError

Budget = int | float | str
"""Tokens per KV head (int), share of the prompt (float in (0, 1]) or bytes of the whole cache (str, like "64MiB")."""

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# As many digits as any memory has; numbers without end would be searched without end.
_SIZE = re.compile(r"(\d{1,24}(?:\.\d{1,24})?)\s*([A-Za-z]+)")


def parse_size(text: str) -> int:
    """Bytes in a size such as "64MiB" (2^20 bytes each) or "1.5GB" (10^9 bytes each).

    Raises:
        PolicyError: no number with a known unit, or a size of 0.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match and {u.lower(): u for u in _UNITS}.get(match[2].lower())
    if not match or not unit:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise PolicyError(
            f"budget={shown!r} is no budget; write tokens (1024), a share of the prompt (0.125) or a size: a number "
            f"and one of {', '.join(_UNITS)} (64MiB)"
        )
    size = int(Decimal(match[1]) * _UNITS[unit])
    if size < 1:
        raise PolicyError(f"budget={text!r} is no memory at all; give at least 1B")
    return size


def check_budget(budget: object) -> None:
    """Refuse what is no budget.

    Raises:
        PolicyError: a number of tokens under 1, a share outside (0, 1], an unreadable size, or another type.
    """
    if isinstance(budget, str):
        parse_size(budget)
    elif isinstance(budget, bool) or not isinstance(budget, int | float):
        raise PolicyError(
            f"budget={budget!r} is a {type(budget).__name__}; give tokens (1024), a share of the prompt (0.125) "
            "or a size ('64MiB')"
        )
    elif isinstance(budget, int) and budget < 1:
        raise PolicyError(f"budget={budget} tokens cannot hold a cache; give 1 or more")
    elif isinstance(budget, float) and not 0 < budget <= 1:
        raise PolicyError(
            f"budget={budget} is not a share of the prompt: a float lies in (0, 1]; for tokens write a whole number"
        )
