"""What pip is given: a wheel with the native library, and one without it where it cannot be compiled.

The wheels are made of a copy of this tree in which the kernels are missing, since compiling them takes long.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")

ROOT = Path(__file__).parents[2]
LIBRARY = "kvwinnow/ops/cpu/libkvwinnow_cpu.so"
NOTE = "kvwinnow/ops/cpu/not_built.txt"
IN_PLACE = Path("src", "kvwinnow", "ops", "cpu")
KERNELS = ("levels.cpp", "probe.cpp", "probe_levels.cpp")  # those that stay

needs_tools = pytest.mark.skipif(
    not (shutil.which("cmake") and any(map(shutil.which, ("c++", "g++", "clang++")))),
    reason="CMake and a C++ compiler are needed",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what this tree has under version control and a wheel needs, most kernels left out."""
    copy = tmp_path / "tree"
    built = shutil.ignore_patterns("__pycache__", "*.so", "not_built.txt")
    for name in ("src", "build_backend"):
        shutil.copytree(ROOT / name, copy / name, ignore=built)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    for kernel in (copy / IN_PLACE / "native").glob("*.cpp"):
        if kernel.name not in KERNELS:
            kernel.unlink()
    return copy


def call(tree: Path, hook: str, **environment: str) -> Path:
    """What a hook of the build back end makes, as pip would call it."""
    made = tree.parent / hook
    made.mkdir()
    code = f"import sys; sys.path.insert(0, 'build_backend'); import kvwinnow_build as b; b.{hook}({str(made)!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return next(made.iterdir())


def text(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as files:
        return files.read(name).decode()


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as files:
        return set(files.namelist())


def sources(tree: Path) -> set[str]:
    """The package's files, less what is only there to be compiled."""
    files = (path for path in (tree / "src").rglob("*") if path.is_file() and "native" not in path.parts)
    return {path.relative_to(tree / "src").as_posix() for path in files}


def installed(wheel: Path) -> set[str]:
    return {name for name in names(wheel) if ".dist-info/" not in name}


@needs_tools
def test_a_wheel_holds_the_library_and_fits_any_python(tree: Path) -> None:
    # What an editable installation of the same tree has left is no part of a wheel.
    (tree / IN_PLACE / "not_built.txt").write_text("long ago")
    (tree / IN_PLACE / "libkvwinnow_cpu.so").write_text("stale")
    expected = sources(tree) - {NOTE}
    wheel = call(tree, "build_wheel")
    assert wheel.name.startswith("kvwinnow-0.1.0-py3-none-")
    assert not wheel.name.endswith("-any.whl")
    assert installed(wheel) == expected
    assert LIBRARY in expected
    with zipfile.ZipFile(wheel) as files:
        assert files.read(LIBRARY)[1:4] == b"ELF" or sys.platform != "linux"
        assert any(name.endswith("licenses/LICENSE") for name in files.namelist())


@needs_tools
def test_a_compiler_that_fails_is_no_obstacle(tree: Path) -> None:
    wheel = call(tree, "build_wheel", CXX="/bin/false")
    assert wheel.name == "kvwinnow-0.1.0-py3-none-any.whl"
    assert installed(wheel) == sources(tree) | {NOTE}
    assert text(wheel, NOTE).startswith("compiling it with /bin/false failed")
    assert "kvwinnow = kvwinnow.cli:main" in text(wheel, "kvwinnow-0.1.0.dist-info/entry_points.txt")
    metadata = call(tree, "prepare_metadata_for_build_wheel")
    assert (metadata / "METADATA").read_text() == text(wheel, "kvwinnow-0.1.0.dist-info/METADATA")


def test_nor_are_kernels_that_do_not_compile(tree: Path) -> None:
    (tree / IN_PLACE / "native" / "broken.cpp").write_text("this is not C++")
    wheel = call(tree, "build_wheel")
    assert LIBRARY not in names(wheel)
    assert text(wheel, NOTE)


def test_nor_is_a_machine_without_compilers(tree: Path) -> None:
    empty = tree / "empty"
    empty.mkdir()
    wheel = call(tree, "build_wheel", PATH=str(empty), CXX="")
    assert wheel.name == "kvwinnow-0.1.0-py3-none-any.whl"
    assert installed(wheel) == sources(tree) | {NOTE}
    assert text(wheel, NOTE) == "no C++ compiler was found\n"


def test_an_editable_installation_is_a_path_and_a_library_in_place(tree: Path) -> None:
    wheel = call(tree, "build_editable")
    assert installed(wheel) == {"kvwinnow.pth"}
    assert text(wheel, "kvwinnow.pth") == f"{tree / 'src'}\n"
    built, note = tree / IN_PLACE / "libkvwinnow_cpu.so", tree / IN_PLACE / "not_built.txt"
    assert built.exists() != note.exists()
    shutil.rmtree(wheel.parent)

    built.unlink(missing_ok=True)
    call(tree, "build_editable", PATH="", CXX="")
    assert not built.exists()
    assert note.read_text() == "no C++ compiler was found\n"


def test_the_source_distribution_is_complete(tree: Path) -> None:
    for name in ("tests", "docs", "benchmarks"):
        (tree / name).mkdir()
        (tree / name / "some.md").write_text(name)
    (tree / "src" / "kvwinnow" / "__pycache__").mkdir()
    (tree / "src" / "kvwinnow" / "__pycache__" / "old.pyc").write_text("")
    expected = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    (tree / "secret.txt").write_text("not ours to give away")
    (tree / IN_PLACE / "libkvwinnow_cpu.so").write_text("built")
    with tarfile.open(call(tree, "build_sdist")) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held == expected - {"src/kvwinnow/__pycache__/old.pyc"} | {"PKG-INFO"}
    assert "src/kvwinnow/ops/cpu/native/CMakeLists.txt" in held
