"""Which instructions the native kernels use."""

from __future__ import annotations

import functools
import os

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.ops.cpu.library import Absent, load

LEVELS = ("portable", "avx2", "avx512", "amx")
"""From the plainest to the best; a level's number is its place."""
OFF = "off"
VARIABLE = "KVWINNOW_CPU_LEVEL"


def current() -> int | None:
    """The number of the level that kernels are called with, or None: torch serves.

    It is the best one that the library and the processor have, unless the environment variable KVWINNOW_CPU_LEVEL names
    another, or ``off``.

    Raises:
        UnsupportedSetupError: the variable names something that is not there, or KVWINNOW_CPU_LIBRARY does.
    """
    return _resolved(os.environ.get(VARIABLE) or None)


@functools.lru_cache
def _resolved(forced: str | None) -> int | None:
    if forced == OFF:
        return None
    if forced is not None and forced not in LEVELS:
        raise UnsupportedSetupError(f"{VARIABLE}={forced!r} is no level: give one of {', '.join(LEVELS)}, or {OFF}")
    library = load()
    if isinstance(library, Absent):
        if forced is None:
            return None
        raise UnsupportedSetupError(
            f"{VARIABLE}={forced!r} needs the native library, but {library.reason}: {library.remedy}"
        )
    if forced is None:
        return library.best
    number = LEVELS.index(forced)
    best = f"give {LEVELS[library.best]} or less, or unset it"
    if not library.supported >> number & 1:
        raise UnsupportedSetupError(f"{VARIABLE}={forced!r}: this processor has no such instructions; {best}")
    if not library.built >> number & 1:
        raise UnsupportedSetupError(f"{VARIABLE}={forced!r}: {library.path} was built without it; {best}")
    return number
