"""How kvwinnow is built: scikit-build-core, whatever becomes of the native library.

A wheel holds the library if it can be compiled. If not, it is built all the same, with a file that says why, which
``kvwinnow doctor`` shows; torch serves then.

An editable installation runs the sources where they lie, so the library is built in place, as ``make native`` does
(``python build_backend/kvwinnow_build.py``), and all that is installed is a path. scikit-build-core's own editable
installations have a finder that outranks PYTHONPATH, which would hide another checkout that is to be run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
BUILD = ROOT / "build"
PLACE = Path("kvwinnow", "ops", "cpu")
NATIVE = SOURCES / PLACE / "native"
NOT_BUILT = "not_built.txt"  # ops/cpu/library.py reads it

Settings = dict[str, "str | list[str]"]


# -- what pip calls --------------------------------------------------------------------------------


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """CMake and Ninja, unless they are there or of no use."""
    if no_compiler():
        return []
    from scikit_build_core import build

    return build.get_requires_for_build_wheel(config_settings)


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: Settings | None = None) -> list[str]:
    """Nothing."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    """Needs no compiler."""
    from scikit_build_core import build

    settings: Settings = {**(config_settings or {}), "wheel.cmake": "false"}
    return build.prepare_metadata_for_build_wheel(metadata_directory, settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    """The sources."""
    from scikit_build_core import build

    return build.build_sdist(sdist_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """A wheel with the native library, or one without it that says why."""
    from scikit_build_core import build

    settings: Settings = dict(config_settings or {})
    reason = no_compiler()
    if reason is None:
        try:
            return build.build_wheel(wheel_directory, settings)
        except (Exception, SystemExit) as error:  # SystemExit is how scikit-build-core reports what a compiler said
            reason = _failed(error)
    _say(f"kvwinnow is built without its native library, since {reason}.")
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, NOT_BUILT)
        note.write_text(reason + "\n", encoding="utf-8")
        settings |= {"wheel.cmake": "false", f"wheel.force-include.{note}": (PLACE / NOT_BUILT).as_posix()}
        return build.build_wheel(wheel_directory, settings)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """The library beside its sources, or a note why there is none; and a wheel that holds a path."""
    from scikit_build_core import build

    build_in_place()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kvwinnow.pth")
        path.write_text(f"{SOURCES}\n", encoding="utf-8")
        settings: Settings = {**(config_settings or {}), "wheel.cmake": "false", "wheel.packages": []}
        return build.build_wheel(wheel_directory, settings | {f"wheel.force-include.{path}": path.name})


# -- the library in place --------------------------------------------------------------------------


def build_in_place(
    into: Path = SOURCES / PLACE, folder: Path = BUILD / "native", *, tools: Path | None = None, sanitize: bool = False
) -> bool:
    """Compile the library into ``into``, or leave a note there that says why that failed; whether it succeeded.

    ``folder`` is where objects stay for the next time, ``tools`` where CMake and Ninja may be installed if they are
    missing.
    """
    reason = no_compiler()
    if reason is None:
        try:
            with _alone(folder):
                _compile(into, folder, tools, sanitize=sanitize)
        except (Exception, SystemExit) as error:
            reason = _failed(error)
    note = into / NOT_BUILT
    if reason is None:
        note.unlink(missing_ok=True)
        _say(f"The native library lies in {into}.")
        return True
    _say(f"The native library was not built, since {reason}.")
    into.mkdir(parents=True, exist_ok=True)
    note.write_text(reason + "\n", encoding="utf-8")
    return False


def no_compiler() -> str | None:
    """Why there is no use in trying, or None."""
    if sys.platform == "win32":
        return "its kernels are written for g++ and clang++, and are not built on Windows"
    named = os.environ.get("CXX")
    if named:
        return None if shutil.which(named.split()[0]) else f"CXX names {named!r}, which is not there"
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    return "no C++ compiler was found"


def _failed(error: BaseException) -> str:
    said = " ".join(str(error).split())
    said = f" ({type(error).__name__}: {said})" if said and not isinstance(error, SystemExit) else ""
    compiler = os.environ.get("CXX", "c++")
    return f"compiling it with {compiler} failed{said}, of which `pip install -v` or `make native` shows more"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two environments that are set up at once must not compile in one folder at once."""
    import fcntl  # not on Windows, where nothing is compiled

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(into: Path, folder: Path, tools: Path | None, *, sanitize: bool) -> None:
    cmake, ninja = _program("cmake", tools), _program("ninja", tools)
    into.mkdir(parents=True, exist_ok=True)
    # Ninja's place is told each time: that of a build's own environment is gone when the next one comes.
    configure = [cmake, "-S", NATIVE, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    made = folder / "made"
    configure += [f"-DKVWINNOW_INTO={made}", f"-DKVWINNOW_SANITIZE={'ON' if sanitize else 'OFF'}"]
    # CMake sticks to what it was told first, and what another CMake has left may be in the way.
    told, chosen = folder / "told.txt", repr([os.environ.get(name) for name in ("CXX", "CXXFLAGS", "LDFLAGS")])
    known = told.exists() and told.read_text(encoding="utf-8") == chosen
    if not known or _run(configure):
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
        _run(configure, check=True)
        told.write_text(chosen, encoding="utf-8")
    _run([cmake, "--build", folder], check=True)
    # Whole or not at all: a library that is cut off kills the process that loads it.
    for library in made.iterdir():
        part = into / f"{library.name}.part"
        shutil.copy2(library, part)
        part.replace(into / library.name)


def _program(name: str, tools: Path | None) -> str:
    """The path of CMake or Ninja: the one on PATH, or that of its package on PyPI."""
    found = shutil.which(name)
    if found is not None:
        return found
    if tools is None:
        raise FileNotFoundError(f"{name} is not there")
    program = tools / "bin" / name
    if not program.exists():
        _say(f"{name} is not there, so it is installed into {tools}.")
        for command in (["-m", "venv", tools], ["-m", "pip", "install", "--quiet", "cmake", "ninja"]):
            python = sys.executable if command[1] == "venv" else tools / "bin" / "python"
            _run([python, *command], check=True)
    return str(program)


def _run(command: list[str | Path], *, check: bool = False) -> int:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        _say(done.stdout)
        if check:
            raise SystemExit(done.returncode)
    return done.returncode


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["sanitize"]:
        sanitized = BUILD / "sanitize"
        sys.exit(not build_in_place(sanitized, sanitized / "objects", tools=BUILD / "tools", sanitize=True))
    sys.exit(not build_in_place(tools=BUILD / "tools"))
