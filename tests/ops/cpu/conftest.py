"""The native library, and each level that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvwinnow.ops.cpu import level, library


@pytest.fixture
def native() -> library.Library:
    """The library; where there is a compiler its absence fails test_library.py."""
    found = library.load()
    if isinstance(found, library.Absent):
        pytest.skip(found.reason)
    return found


@pytest.fixture(params=level.LEVELS)
def each_level(request: pytest.FixtureRequest, native: library.Library, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of a level, which is forced."""
    number = level.LEVELS.index(request.param)
    if not native.built & native.supported & 1 << number:
        pytest.skip(f"this machine or its compiler has no {request.param}")
    monkeypatch.setenv(level.VARIABLE, request.param)
    return number


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The library is looked for again, inside the test and after it."""
    monkeypatch.delenv(level.VARIABLE, raising=False)
    library.load.cache_clear()
    level._resolved.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.load.cache_clear()
    level._resolved.cache_clear()
