"""Finding, checking and loading the native library; its levels and threads."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.ops.cpu import level, library
from kvwinnow.ops.cpu.report import report

COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is here")

PROBE = library.Kernel("kvw_probe", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


def probe(number: int, threads: int) -> tuple[int, int]:
    """The level that code was compiled for, and the threads it ran on."""
    compiled, running = ctypes.c_int32(-1), ctypes.c_int32(-1)
    assert PROBE(number, threads, ctypes.addressof(compiled), ctypes.addressof(running))
    return compiled.value, running.value


def made(folder: Path, body: str) -> Path:
    """A shared library with some of the functions that ours has."""
    assert COMPILER is not None
    source, made = folder / "other.cpp", folder / "other.so"
    source.write_text(f'extern "C" {{ {body} }}\n')
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", made, source], check=True)
    return made


# -- there, and which level ------------------------------------------------------------------------


@needs_compiler
def test_where_a_compiler_is_the_library_is() -> None:
    found = library.load()
    assert isinstance(found, library.Library), found


def test_each_level_is_code_compiled_for_it(each_level: int) -> None:
    assert level.current() == each_level
    assert probe(each_level, 1)[0] == each_level


def test_the_best_level_is_taken(native: library.Library, afresh: pytest.MonkeyPatch) -> None:
    usable = [number for number in range(len(level.LEVELS)) if native.built & native.supported & 1 << number]
    assert usable[0] == 0, "the portable level runs anywhere"
    assert level.current() == usable[-1]


def test_levels_are_those_of_the_processor(native: library.Library) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.M)
    if flags is None:
        pytest.skip("only Linux on x86 tells what the processor has")
    has = set(flags[1].split())
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert native.supported & 1
    assert bool(native.supported & 2) == (avx2 <= has)
    assert bool(native.supported & 4) == (avx512 <= has)
    # Whatever has the tiles need not be permitted to use them.
    assert not native.supported & 8 or avx512 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"} <= has


def test_a_level_that_is_not_there_is_not_served(native: library.Library) -> None:
    assert not PROBE(len(level.LEVELS), 1, None, None)
    assert not PROBE(-1, 1, None, None)


def test_off_means_torch(afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(level.VARIABLE, "off")
    assert level.current() is None
    assert report().backend == "torch"


def test_doctor_tells_off_from_a_library_that_is_missing(native: library.Library, afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(level.VARIABLE, "off")
    assert report().why == "KVWINNOW_CPU_LEVEL=off"


def test_a_library_that_is_not_asked_for_is_not_looked_at(afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(library.VARIABLE, "/nowhere/library.so")
    assert report().refused
    afresh.setenv(level.VARIABLE, "off")
    assert level.current() is None
    assert report().backend == "torch"
    assert not report().refused


def test_a_word_that_is_no_level_is_refused(afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(level.VARIABLE, "sse")
    with pytest.raises(
        UnsupportedSetupError, match="'sse' is no level: give one of portable, avx2, avx512, amx, or off"
    ):
        level.current()
    assert report().backend == "none: what is asked for is refused"
    assert "'sse'" in report().why


@needs_compiler
def test_a_level_that_the_processor_lacks_is_refused(tmp_path: Path, afresh: pytest.MonkeyPatch) -> None:
    other = made(
        tmp_path,
        f"""int kvw_abi_version() {{ return {library.ABI}; }} int kvw_levels() {{ return 7; }}
        int kvw_supported() {{ return 11; }} int kvw_best_level() {{ return 1; }}
        const char* kvw_build_info() {{ return "test"; }}
        const char* kvw_sources() {{ return "{library.sources_digest()}"; }}""",
    )
    afresh.setenv(library.VARIABLE, str(other))
    assert level.current() == 1
    afresh.setenv(level.VARIABLE, "avx512")
    with pytest.raises(UnsupportedSetupError, match="this processor has no such instructions; give avx2 or less"):
        level.current()
    afresh.setenv(level.VARIABLE, "amx")
    with pytest.raises(UnsupportedSetupError, match="was built without it; give avx2 or less"):
        level.current()
    afresh.setenv(level.VARIABLE, "portable")
    assert level.current() == 0
    assert "unset KVWINNOW_CPU_LEVEL: level avx2" in report().faster
    # What the processor has and the compiler did not know.
    assert "level amx, which the compiler did not know" in report().faster


# -- another library than the one that belongs here ------------------------------------------------


@needs_compiler
def test_another_interface_is_refused(tmp_path: Path, afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(library.VARIABLE, str(made(tmp_path, "int kvw_abi_version() { return 999; }")))
    with pytest.raises(UnsupportedSetupError, match="has interface 999, and this kvwinnow needs"):
        level.current()
    assert "interface 999" in report().why


@needs_compiler
def test_a_library_that_lacks_what_others_have_is_refused(tmp_path: Path, afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(library.VARIABLE, str(made(tmp_path, f"int kvw_abi_version() {{ return {library.ABI}; }}")))
    with pytest.raises(UnsupportedSetupError, match=r"cannot be loaded .*kvw_"):
        level.current()


@needs_compiler
def test_a_library_of_other_sources_is_refused(tmp_path: Path, afresh: pytest.MonkeyPatch) -> None:
    body = f'int kvw_abi_version() {{ return {library.ABI}; }} const char* kvw_sources() {{ return "0"; }}'
    other = made(tmp_path, body + "int kvw_build_info() { return 0; }")
    afresh.setenv(library.VARIABLE, str(other))
    with pytest.raises(UnsupportedSetupError, match="was built from other sources than those in"):
        level.current()


def test_a_file_that_is_no_library_is_refused(tmp_path: Path, afresh: pytest.MonkeyPatch) -> None:
    afresh.setenv(library.VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(UnsupportedSetupError, match=r"KVWINNOW_CPU_LIBRARY cannot be followed: .*cannot be loaded"):
        level.current()


def test_what_does_not_fit_beside_the_module_leaves_the_work_to_torch(
    tmp_path: Path, afresh: pytest.MonkeyPatch
) -> None:
    """In the place of our own library lies a file that is none, and no other is installed."""
    (tmp_path / library.NAME).write_text("no library")
    afresh.delenv(library.VARIABLE, raising=False)
    afresh.setattr(library, "_HERE", tmp_path)
    afresh.setattr(library, "_installed_folders", lambda: iter(()))
    assert level.current() is None
    assert report().backend == "torch"
    assert "cannot be loaded" in report().why
    afresh.setenv(level.VARIABLE, "portable")
    with pytest.raises(UnsupportedSetupError, match=r"'portable' needs the native library, but .*cannot be loaded"):
        level.current()


def test_the_reason_of_a_failed_build_is_told(tmp_path: Path, afresh: pytest.MonkeyPatch) -> None:
    (tmp_path / library.NOT_BUILT).write_text("no C++ compiler was found\n")
    afresh.delenv(library.VARIABLE, raising=False)
    afresh.setattr(library, "_HERE", tmp_path)
    afresh.setattr(library, "_installed_folders", lambda: iter(()))
    assert level.current() is None
    assert report().why == "no native kernels: no C++ compiler was found"
    assert report().faster.startswith("with g++ or clang++ there, ")


def test_of_the_sources_every_file_counts(tmp_path: Path) -> None:
    folder = shutil.copytree(library._HERE / "native", tmp_path / "native")
    first = library.sources_digest(folder)
    assert first == library.sources_digest()
    for name in ("levels.h", "levels.cpp", "CMakeLists.txt"):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write("\n")
        changed = library.sources_digest(folder)
        assert changed != first
        first = changed
    (folder / "new.cpp").write_text("")
    assert library.sources_digest(folder) != first
    assert library.sources_digest(tmp_path / "nothing") is None


# -- what loading does to the process --------------------------------------------------------------

LOADING = """
import ctypes, struct, threading
from kvwinnow.ops.cpu import level, library

def tiny(out):
    x = struct.unpack("<d", struct.pack("<Q", 3))[0]  # 3 times the smallest denormal
    out.append((x * 0.5 != 0, x + 0.0 != 0))

kernel = library.Kernel("kvw_probe", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
before, after, other = [], [], []
tiny(before)
number = level.current()
a, b = ctypes.c_int32(), ctypes.c_int32()
assert kernel(number, 2, ctypes.addressof(a), ctypes.addressof(b))
tiny(after)
thread = threading.Thread(target=tiny, args=(other,)); thread.start(); thread.join()
assert before == after == other == [(True, True)], (before, after, other)

import numpy, torch  # and in the threads that torch computes on
torch.set_num_threads(2)
x = torch.full((1 << 20,), 1e-40, dtype=torch.float32)
assert (x * 0.5).ne(0).all()
import numpy as np
assert (np.full(4, 1e-40, dtype=np.float32) * np.float32(0.5) != 0).all()

from pathlib import Path
maps = Path("/proc/self/maps")
if maps.exists():
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.rpartition("/")[2]}
    assert len(runtimes) <= 1, runtimes
print("threads", b.value)
"""


def test_loading_changes_no_rounding_and_brings_no_second_openmp(native: library.Library) -> None:
    """Denormals stay what they are, in all threads, and torch's threads are the kernels'."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["threads", "1" if "one thread" in native.info else "2"]


def test_a_kernel_runs_on_as_many_threads_as_it_is_told(each_level: int, native: library.Library) -> None:
    for threads in (1, 2, 3):
        assert probe(each_level, threads)[1] == (1 if "one thread" in native.info else threads)
