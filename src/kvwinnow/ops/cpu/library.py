"""Finds the shared library of the native kernels, checks it, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch  # before the library, whose kernels run on the OpenMP threads that torch brings along

ABI = 1
"""What ``kvw_abi_version()`` of levels.cpp must be."""
NAME = "libkvwinnow_cpu.so"
NOT_BUILT = "not_built.txt"
"""Beside this file: why the build back end built no library (build_backend/kvwinnow_build.py)."""
VARIABLE = "KVWINNOW_CPU_LIBRARY"

_HERE = Path(__file__).parent
_SERVED = 0


@dataclass(frozen=True)
class Library:
    """The library, loaded.

    Attributes:
        path: where it lies.
        handle: its functions.
        built: a bit for each level that it was built for.
        supported: a bit for each level that this processor can run.
        best: the best level that is both.
        info: the compiler, the threads and the levels, to be read by people.
    """

    path: Path
    handle: ctypes.CDLL
    built: int
    supported: int
    best: int
    info: str


@dataclass(frozen=True)
class Absent:
    """There is no library that can be used; ``reason`` is a sentence without its full stop."""

    reason: str


@functools.cache
def load() -> Library | Absent:
    """The library of this very source: named by an environment variable, of this tree, or of what is installed."""
    refused: list[str] = []
    for path in _candidates():
        found = _checked(path)
        if isinstance(found, Library):
            return found
        refused.append(found.reason)
    return Absent(refused[0] if refused else _why_not_built())


def sources_digest(folder: Path = _HERE / "native") -> str | None:
    """SHA-256 of the kernels' sources, as CMakeLists.txt takes it; None where they are not (in a wheel)."""
    inputs = [path for path in folder.glob("*") if path.suffix in (".cpp", ".h") or path.name == "CMakeLists.txt"]
    if not inputs:
        return None
    inputs.sort(key=lambda path: path.name)
    listing = "".join(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in inputs)
    return hashlib.sha256(listing.encode()).hexdigest()


class Kernel:
    """One exported function ``kvw_...(int32_t level, ...)``, looked up when it is first called."""

    def __init__(self, name: str, *arguments: type[ctypes._SimpleCData]) -> None:  # type: ignore[type-arg]
        self.name = name
        self._arguments = arguments

    def __call__(self, level: int, *arguments: object) -> bool:
        """Call it; False if it does not serve such arguments, and torch has to."""
        return bool(self._function(level, *arguments) == _SERVED)

    @functools.cached_property
    def _function(self) -> ctypes._NamedFuncPointer:
        library = load()
        assert isinstance(library, Library), library.reason  # a level is only given out with a library
        function = library.handle[self.name]
        function.argtypes = [ctypes.c_int32, *self._arguments]
        function.restype = ctypes.c_int32
        return function


def _candidates() -> Iterator[Path]:
    named = os.environ.get(VARIABLE)
    if named:
        yield Path(named)
        return
    places = [_HERE, *_installed_folders()]
    yield from (path for path in dict.fromkeys(place / NAME for place in places) if path.exists())


def _installed_folders() -> Iterator[Path]:
    """Where the installed kvwinnow, which need not be the one that runs, has this folder."""
    try:
        installed = importlib.metadata.distribution("kvwinnow")
        yield Path(str(installed.locate_file("kvwinnow/ops/cpu")))
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        return
    if origin.get("dir_info", {}).get("editable"):
        yield Path(unquote(urlsplit(origin["url"]).path), "src", "kvwinnow", "ops", "cpu")


def _checked(path: Path) -> Library | Absent:
    try:
        handle = _opened(path)
        abi = int(handle.kvw_abi_version())
    except (OSError, AttributeError) as error:
        return Absent(f"{path} cannot be loaded ({error})")
    if abi != ABI:
        return Absent(
            f"{path} has version {abi} of the interface, and this kvwinnow needs {ABI}: install kvwinnow anew"
        )
    handle.kvw_sources.restype = handle.kvw_build_info.restype = ctypes.c_char_p
    wanted = sources_digest()
    if wanted is not None and handle.kvw_sources().decode() != wanted:
        return Absent(f"{path} was built from other sources than those in {_HERE / 'native'}: run make native")
    return Library(
        path,
        handle,
        built=int(handle.kvw_levels()),
        supported=int(handle.kvw_supported()),
        best=int(handle.kvw_best_level()),
        info=handle.kvw_build_info().decode(),
    )


def _opened(path: Path) -> ctypes.CDLL:
    assert torch.get_num_threads() > 0
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as error:
        if "GOMP_" not in str(error):
            raise
        # A torch that brings no such runtime, or hides it.
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(os.fspath(path))


def _why_not_built() -> str:
    for folder in (_HERE, *_installed_folders()):
        try:
            return (folder / NOT_BUILT).read_text(encoding="utf-8").strip()
        except OSError:
            continue
    if sources_digest() is not None:
        return "no library was built in this source tree: run make native, or pip install -e ."
    return "this installation holds no library: install kvwinnow anew"
