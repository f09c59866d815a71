"""Counters that any process of a server adds to and that vLLM's own ``/metrics`` shows.

Each process keeps its numbers in a file of its own, in the format and under the names that prometheus_client has for
servers of several processes, and whoever answers ``/metrics`` sums over the files: the numbers of a process that has
ended stay. Where vLLM itself works in that way (several API servers), the files lie in its folder; else in one of ours.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

FOLDER = "KVWINNOW_VLLM_METRICS"
"""Environment variable with the path of our folder, inherited by the processes that a server starts."""
SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The one of prometheus_client, which vLLM sets, and all of whose files it shows, before its configuration is made."""

BLOCKS_FREED, TOKENS_EVICTED, SECONDS = range(3)
NAMES = (
    ("kvwinnow_blocks_freed", "Blocks given back to the pool while their requests went on."),
    ("kvwinnow_tokens_evicted", "Tokens of which each KV head of each layer let go, one or another."),
    ("kvwinnow_compaction_seconds", "Seconds spent choosing and moving tokens, in all workers."),
)
_opened: tuple[str, Any] | None = None
_shown: set[str] = set()


def start() -> None:
    """Name the folder, unless a process before this one has, and have prometheus's registry look into it."""
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    if not os.path.isdir(_folder() or ""):
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="kvwinnow-")
        atexit.register(_remove, folder, os.getpid())
    for number in range(len(NAMES)):  # a counter that has counted nothing is shown as 0
        add(number, 0.0)
    if SHARED not in os.environ and os.environ[FOLDER] not in _shown:
        _shown.add(os.environ[FOLDER])
        MultiProcessCollector(REGISTRY, os.environ[FOLDER])


def add(number: int, amount: float) -> None:
    """Add to one of the counters; nothing happens in a process that belongs to no server."""
    folder = _folder()
    if folder is None:
        return
    try:
        _write(folder, number, amount)
    except OSError:  # no room, or the folder was removed: requests matter more than their count
        return


def _write(folder: str, number: int, amount: float) -> None:
    global _opened  # noqa: PLW0603 - one file a process
    path = str(Path(folder) / f"counter_kvwinnow{os.getpid()}.db")
    if _opened is None or _opened[0] != path:
        from prometheus_client.mmap_dict import MmapedDict

        _opened = path, MmapedDict(path)
    numbers, key = _opened[1], _key(number)
    numbers.write_value(key, numbers.read_value(key)[0] + amount, 0.0)


def _folder() -> str | None:
    return os.environ.get(SHARED) or os.environ.get(FOLDER)


def _key(number: int) -> str:
    from prometheus_client.mmap_dict import mmap_key

    name, text = NAMES[number]
    key: str = mmap_key(name, f"{name}_total", [], [], text)
    return key


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits what is to be done at exit
        shutil.rmtree(folder, ignore_errors=True)
