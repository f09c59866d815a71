"""One virtual environment for each peer, so that none decides which versions another gets.

They lie in ``.venv-peers/`` of the source tree, or in the folder that KVWINNOW_PEERS names, one folder for each peer,
and are made from ``requirements-PEER.txt``. These lists are complete and pip resolves nothing: what they do not name is
not installed, be it a dependency that breaks what it comes with. A finished one is used again until its list changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
VARIABLE = "KVWINNOW_PEERS"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_STAMP = "kvwinnow-peer.txt"
_PIP = ("-I", "-m", "pip", "--disable-pip-version-check", "--quiet")
"""Isolated, so that nothing on PYTHONPATH counts as installed."""


@dataclass(frozen=True)
class Environment:
    """How a peer's environment is made.

    Attributes:
        name: of its folder and its requirements.
        torch: its version, for what needs torch; the build for CPUs is installed first, since PyPI's own brings
            gigabytes of CUDA.
    """

    name: str
    torch: str | None = None

    @property
    def requirements(self) -> Path:
        return HERE / f"requirements-{self.name}.txt"

    def recipe(self) -> str:
        """All that decides what is installed."""
        return f"torch {self.torch}\n{self.requirements.read_text(encoding='utf-8')}"


class NotInstalledError(Exception):
    """A peer cannot be installed here; the message says why, in one line."""


def folder() -> Path:
    """Where the environments are."""
    return Path(os.environ.get(VARIABLE) or HERE.parents[1] / ".venv-peers").absolute()


def python_of(environment: Environment, progress: Callable[[str], None]) -> str:
    """The interpreter of a peer's environment, which is made first if need be.

    Raises:
        NotInstalledError: pip could not install the peer, or this Python makes no environments.
    """
    home = folder() / environment.name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = home / _STAMP
    try:
        recipe = environment.recipe()
        if stamp.is_file() and python.exists() and stamp.read_text(encoding="utf-8") == recipe:
            return str(python)
        progress(f"installing {environment.name} into {home.parent.name}/{environment.name} (minutes)")
        if not python.exists():
            _create(home)
        _install(str(python), environment)
        stamp.write_text(recipe, encoding="utf-8")  # last: an interrupted installation is taken up again
    except (OSError, ValueError) as error:  # venv raises the latter for a file where it wants a folder
        raise NotInstalledError(f"{home.name}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise NotInstalledError(f"{home.name}: {_reason(error.stderr or error.output)}") from error
    return str(python)


def _create(home: Path) -> None:
    try:
        venv.create(home, with_pip=True)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)  # else it would be taken for one that has pip
        raise


def _install(python: str, environment: Environment) -> None:
    if environment.torch is not None and sys.platform != "darwin":  # where all builds are for CPUs
        build = f"torch=={environment.torch}+cpu"
        try:
            _pip(python, "install", build)
        except subprocess.CalledProcessError:  # PyPI has no such build, unless pip is set up to find one
            _pip(python, "install", "--index-url", TORCH_INDEX, build)
    _pip(python, "install", "--no-deps", "-r", str(environment.requirements))


def _pip(python: str, *words: str) -> None:
    subprocess.run([python, *_PIP, *words], check=True, capture_output=True, text=True, errors="replace")


def _reason(output: str | bytes | None) -> str:
    """The last error in pip's words, on one line."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["the installation failed and said nothing"])[-1][:300]
