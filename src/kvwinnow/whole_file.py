"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A draft beside ``target`` to write to; when the block ends well it takes the place of ``target``, else it goes.

    Raises:
        OSError: the draft could not be written, or not take its place.
    """
    # Not all of the name, which may be as long as names can be.
    draft = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.draft")
    try:
        yield draft
        with open(draft, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(draft, target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a loss of power, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
