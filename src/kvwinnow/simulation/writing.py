"""Traces and pages are written whole or not at all; names are complained about before any work is done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvwinnow.errors import TraceError
from kvwinnow.whole_file import replaced

StrPath = str | os.PathLike[str]


def check_target(path: StrPath) -> Path:
    """Where a file is going to be written; what can be told beforehand to go wrong is refused.

    Raises:
        TraceError: the folder does not exist or may not be written to, or something else than a file is there.
    """
    if "\0" in str(path):
        raise TraceError(f"{str(path)!r} is no path, since no name holds a NUL; name a file")
    try:
        target = Path(path).expanduser()
        folder = target.parent
        if target.is_dir() or (target.exists() and not target.is_file()):
            raise TraceError(f"{str(path)!r} is no file that could be replaced; name a file")
        if not folder.is_dir():
            raise TraceError(f"{str(path)!r} cannot be written, since folder {str(folder)!r} does not exist; make it")
        if not os.access(folder, os.W_OK):
            raise TraceError(f"{str(path)!r} cannot be written: folder {str(folder)!r} is not yours to write to")
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user who does not exist
        raise _unwritable(path, error) from error
    return target


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """A draft beside ``path`` to write to; when the block ends well it takes the place of ``path``, else it goes.

    Raises:
        TraceError: the file cannot be written.
    """
    try:
        with replaced(check_target(path)) as draft:
            yield draft
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: StrPath, error: Exception) -> TraceError:
    said = getattr(error, "strerror", None) or " ".join(str(error).split())
    return TraceError(f"{str(path)!r} cannot be written: {said}; name a file in a folder with room that you may use")
