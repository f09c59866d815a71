"""Where the commands write: results to stdout, progress and figures to stderr."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BAD_INPUT = 2
"""What commands return for what they cannot do as asked."""

# Wide enough for every table where there is no terminal that knows better.
_WIDTH_OF_A_FILE = 150


def out() -> Console:
    """A console on stdout."""
    return _console(Console(file=sys.stdout))


def err() -> Console:
    """A console on stderr."""
    return _console(Console(file=sys.stderr))


def note(sentence: str | None) -> None:
    """Say on stderr what a result is to be read with, if there is something to say."""
    if sentence is not None:
        err().print(f"Note: {sentence}.", markup=False, highlight=False, soft_wrap=True)


def _console(console: Console) -> Console:
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    return console


@contextmanager
def importing(show: Callable[[str], None], what: str = "torch and transformers") -> Iterator[None]:
    """Around the imports that take seconds: an interrupt waits for their end.

    Libraries that try one another's imports swallow it, or are left half imported.
    """
    show(f"loading {what}")
    if threading.current_thread() is not threading.main_thread():  # signals are not its affair
        yield
        return
    waiting = []
    earlier = signal.signal(signal.SIGINT, lambda *_: waiting.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
    if waiting:
        raise KeyboardInterrupt


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Shows what is being done on stderr: a spinner on a terminal, else one line for each stage."""
    console = err()
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
        return
    shown: set[str] = set()

    def show(stage: str) -> None:
        if stage not in shown:
            shown.add(stage)
            console.print(f"... {stage}", markup=False, highlight=False)

    yield show


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows on a terminal's stderr how much of some long work is done: told (done, total, what is being done)."""
    console = err()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total, now: bar.update(task, completed=done, total=total, description=now)
