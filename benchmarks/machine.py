"""What all benchmarks say beside their figures: the machine, the versions, the command, and the same again as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "transformers")
LOAD_AT_START = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
"""Processes that wanted a core in the minute before: anything above 0 means that others computed too."""


_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def whole(text: str) -> int:
    """A number of tokens, threads or rounds from the command line: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _in_a_sentence(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """What kvwinnow refuses is told as its program tells it."""
    from kvwinnow.errors import KvwinnowError

    if isinstance(error, KvwinnowError):
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _in_a_sentence


def pin(threads: int) -> None:
    """Compute on so many threads from here on, and on as many cores where the system pins."""
    if _CORES and threads > len(_CORES):
        raise SystemExit(f"--threads {threads}: there are {len(_CORES)} cores to pin them to; take so many at most")
    if _CORES:
        os.sched_setaffinity(0, _CORES[:threads])
    import torch

    torch.set_num_threads(threads)


def facts() -> dict[str, Any]:
    """The machine, the versions and the command, as far as figures depend on them."""
    import torch

    import kvwinnow

    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvwinnow": kvwinnow.__version__,
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "load_at_start": LOAD_AT_START,
        "command": shlex.join(["python", _shown(sys.argv[0]), *(_shown(word) for word in sys.argv[1:])]),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def _shown(word: str) -> str:
    """A word of the command line without the folders of this machine."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], told: Any) -> None:
    """Print the machine, a table whose first column is text and whose others are figures, and what to know about it."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    console.print(", ".join(f"{name} {value}" for name, value in told.items() if name != "command"))
    console.print(f"$ {told['command']}", soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note)


def add_turn_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options ``--threads`` and ``--rounds`` of kernels that are measured in turns."""
    parser.add_argument(
        "--threads", type=whole, nargs="+", default=[1, 2], help="threads, pinned to as many cores (1 2)"
    )
    parser.add_argument("--rounds", type=whole, default=rounds, help=f"rounds of which the median is taken ({rounds})")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and figures there too")


def write_json(file: Path | None, content: Mapping[str, Any]) -> None:
    """Write ``file`` as a whole or leave it as it was; nothing to do if it is None."""
    if file is None:
        return
    text = json.dumps(content, indent=2) + "\n"
    handle, draft = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(draft, file)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def progress(text: str) -> None:
    """Say on the error stream what runs now."""
    print(text, file=sys.stderr, flush=True)
