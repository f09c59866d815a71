"""Finding, checking and loading the native library; its levels and threads."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

import kvwinnow
from kvwinnow.ops.cpu import level, library

BITS = range(len(level.LEVELS))
PROBE = library.Kernel("kvw_probe", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture
def native() -> library.Library:
    found = library.load()
    if isinstance(found, library.Absent):
        # Where there is a compiler its absence is an error, which the first test reports.
        pytest.skip(found.reason)
    return found


def probe(number: int, threads: int) -> tuple[int, int]:
    compiled, running = ctypes.c_int32(-1), ctypes.c_int32(-1)
    assert PROBE(number, threads, ctypes.addressof(compiled), ctypes.addressof(running))
    return compiled.value, running.value


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is here")
def test_where_a_compiler_is_the_library_is() -> None:
    found = library.load()
    assert isinstance(found, library.Library), found


def test_the_package_is_that_of_this_tree() -> None:
    assert Path(kvwinnow.__file__).parent == Path(__file__).parents[3] / "src" / "kvwinnow"


def test_each_level_is_code_compiled_for_it(native: library.Library) -> None:
    usable = native.built & native.supported
    assert usable & 1, "the portable level runs anywhere"
    assert native.best == usable.bit_length() - 1
    for number in BITS:
        if usable >> number & 1:
            assert probe(number, 1)[0] == number


def test_a_level_that_is_not_there_is_not_served(native: library.Library) -> None:
    assert not PROBE(len(level.LEVELS), 1, None, None)
    assert not PROBE(-1, 1, None, None)
