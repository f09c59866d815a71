"""Finds the shared library of the native kernels, checks it, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch  # has to be there before the library, whose kernels run on the OpenMP threads that torch brings along

from kvwinnow.errors import UnsupportedSetupError

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
    """There is no library that can be used.

    Attributes:
        reason: why, a sentence without its full stop.
        remedy: what would change that.
    """

    reason: str
    remedy: str


@functools.cache
def load() -> Library | Absent:
    """The library of this very source: the one that is named, that of this tree, or that of what is installed.

    Raises:
        UnsupportedSetupError: the environment variable KVWINNOW_CPU_LIBRARY names one that cannot be used.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = _checked(Path(named).absolute())  # a bare name would be looked for among the system's
        if isinstance(found, Absent):
            raise UnsupportedSetupError(f"{VARIABLE} cannot be followed: {found.reason}; unset it")
        return found
    places = dict.fromkeys(folder / NAME for folder in (_HERE, *_installed_folders()))
    refused: list[Absent] = []
    for path in places:
        if path.exists():
            found = _checked(path)
            if isinstance(found, Library):
                return found
            refused.append(found)
    return refused[0] if refused else _not_built()


def rebuild() -> str:
    """The command that builds the library anew, for people."""
    if sources_digest() is not None:
        return "make native"
    origin = urlsplit(_installed_from().get("url", ""))
    source = shlex.quote(unquote(origin.path)) if origin.scheme == "file" else "kvwinnow"
    # pip keeps wheels that it has built, those without a library too.
    return f"pip install --force-reinstall --no-cache-dir --no-deps {source}"


def threads() -> int:
    """How many threads a kernel is to use: torch's number."""
    return torch.get_num_threads()


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
        return bool(self.code(level, *arguments) == _SERVED)

    @functools.cached_property
    def code(self) -> ctypes._NamedFuncPointer:
        """The function itself, which returns one of the numbers of native/levels.h."""
        library = load()
        assert isinstance(library, Library), library.reason  # a level is only given out with a library
        function = library.handle[self.name]
        function.argtypes = [ctypes.c_int32, *self._arguments]
        function.restype = ctypes.c_int32
        return function


def _installed_folders() -> Iterator[Path]:
    """Where the installed kvwinnow, which need not be the one that runs, has this folder."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield Path(str(importlib.metadata.distribution("kvwinnow").locate_file("kvwinnow/ops/cpu")))
    origin = _installed_from()
    if origin.get("dir_info", {}).get("editable"):
        yield Path(unquote(urlsplit(origin["url"]).path), "src", "kvwinnow", "ops", "cpu")


def _installed_from() -> dict[str, Any]:
    """What pip has noted of a kvwinnow that did not come from an index."""
    try:
        found = json.loads(importlib.metadata.distribution("kvwinnow").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _checked(path: Path) -> Library | Absent:
    try:
        handle = _opened(path)
        abi = int(handle.kvw_abi_version())
        if abi != ABI:
            return Absent(f"{path} has interface {abi}, and this kvwinnow needs {ABI}", rebuild())
        handle.kvw_sources.restype = handle.kvw_build_info.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return Absent(f"{path} cannot be loaded ({error})", rebuild())
    wanted = sources_digest()
    if wanted is not None and handle.kvw_sources().decode() != wanted:
        return Absent(f"{path} was built from other sources than those in {_HERE / 'native'}", rebuild())
    return Library(
        path,
        handle,
        built=int(handle.kvw_levels()),
        supported=int(handle.kvw_supported()),
        best=int(handle.kvw_best_level()),
        info=handle.kvw_build_info().decode(),
    )


def _opened(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as error:
        if "GOMP_" not in str(error):
            raise
        # A torch that brings no such runtime, or hides it.
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(os.fspath(path))


def _not_built() -> Absent:
    for folder in (_HERE, *_installed_folders()):
        with contextlib.suppress(OSError):
            reason = (folder / NOT_BUILT).read_text(encoding="utf-8").strip()
            return Absent(reason, f"with g++ or clang++ there, {rebuild()}")
    where = "in this source tree" if sources_digest() is not None else "in this installation"
    return Absent(f"there is no native library {where}", rebuild())
