"""What ``kvwinnow doctor`` says of the back ends."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.ops.cpu import level
from kvwinnow.ops.cpu.library import Absent, Library, load, rebuild


@dataclass(frozen=True)
class Report:
    """Which back end computes on CPUs.

    Attributes:
        backend: its name.
        why: why it is this one.
        faster: what would be faster.
        refused: whether the environment asks for what is not there, so that nothing will compute.
    """

    backend: str
    why: str
    faster: str
    refused: bool = False


def report() -> Report:
    """The back end that runs on CPUs here, why, and what would be faster; raises nothing."""
    forced = os.environ.get(level.VARIABLE)
    try:
        current = level.current()
        if forced == level.OFF:  # the library is not asked for then
            return Report("torch", f"{level.VARIABLE}={forced}", f"unset {level.VARIABLE}; {_gain(level.OFF)}")
        library = load()
    except UnsupportedSetupError as error:
        return Report("none: what is asked for is refused", str(error), "what that sentence says", refused=True)
    if isinstance(library, Absent):
        return Report("torch", f"no native kernels: {library.reason}", f"{library.remedy}; {_gain(level.OFF)}")
    assert current is not None, "there is a library, and it is not off"
    why = f"{level.VARIABLE}={forced}" if forced else "the best level that this processor and the library have"
    name = f"native, level {level.LEVELS[current]} ({library.info}; {library.path})"
    return Report(name, why, "; ".join(_faster(library, current)) or "nothing that kvwinnow has kernels for")


def _faster(library: Library, current: int) -> list[str]:
    found = []
    if current < library.best:
        found.append(f"unset {level.VARIABLE}: level {level.LEVELS[library.best]}")
    missing = library.supported & ~library.built
    if missing >> (library.best + 1):
        best = level.LEVELS[missing.bit_length() - 1]
        found.append(f"this processor has level {best}, which the compiler did not know: with a newer one, {rebuild()}")
    elif level.LEVELS[library.best] != "amx":
        found.append(f"another processor: {_gain(level.LEVELS[library.best])}")
    if "one thread" in library.info:
        found.append(f"a compiler with OpenMP: the kernels run on one thread now; {rebuild()}")
    return found


def _gain(name: str) -> str:
    return {
        level.OFF: "native kernels read caches several times faster, quantised ones above all",
        "portable": "with AVX2 caches are read faster, with AVX-512 VNNI or AMX several times faster",
        "avx2": "with AVX-512 VNNI or AMX, caches are read faster, int8 and int4 ones above all",
        "avx512": "with AMX, caches are read faster",
    }[name]
