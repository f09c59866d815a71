"""Runs each row in a process of its own, round after round, and keeps what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contract import Answer, Task, answer_of
from environments import NotInstalledError, python_of
from rows import Peer, Row

MOST_SECONDS = 1500
"""For one process, what it makes once included: compiled code, the model in another form."""
_OURS_ALONE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
Progress = Callable[[str], None]


@dataclass
class Outcome:
    """What came of a row.

    Attributes:
        runs: one answer for each round.
        skipped: why it could not be tried; None: it was.
        failed: what it said when it failed; earlier rounds stay.
    """

    runs: list[Answer] = field(default_factory=list)
    skipped: str | None = None
    failed: str | None = None

    def told(self) -> dict[str, Any]:
        """As JSON."""
        reasons = {"skipped": self.skipped, "failed": self.failed}
        runs: dict[str, Any] = {"runs": [asdict(run) for run in self.runs]}
        return runs | {name: why for name, why in reasons.items() if why is not None}


@dataclass(frozen=True)
class Interpreters:
    """Where each peer's runner runs: an interpreter, or why there is none."""

    paths: Mapping[str, str]
    missing: Mapping[str, str]


def interpreters(peers: Iterable[Peer], progress: Progress) -> Interpreters:
    """Make the environments of ``peers``; those that cannot be made are told once, in one line."""
    paths: dict[str, str] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        if not peer.runner.is_file():
            missing[peer.name] = f"there is no {peer.runner.name}"
        elif peer.environment is None:
            paths[peer.name] = sys.executable
        else:
            try:
                paths[peer.name] = python_of(peer.environment, progress)
            except NotInstalledError as error:
                missing[peer.name] = f"it cannot be installed here: {error}"
        if peer.name in missing:
            progress(f"{peer.name} is skipped: {missing[peer.name]}")
    return Interpreters(paths, missing)


def measure(
    rows: Sequence[Row], task: Task, rounds: int, found: Interpreters, progress: Progress
) -> dict[str, Outcome]:
    """Each row ``rounds`` times, in turns, every other round backwards; a row that failed is not tried again.

    A prompt that has to be computed because the peer's cache cannot be filled is computed once only.

    Args:
        rows: what to run.
        task: for all of them; each gets its own setting.
        rounds: how often.
        found: the peers' interpreters.
        progress: told what runs now, and what failed.
    """
    outcomes = {row.name: Outcome(skipped=found.missing.get(row.peer.name)) for row in rows}
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            outcome = outcomes[row.name]
            if outcome.skipped or outcome.failed or (number and task.filled and not row.peer.fills):
                continue
            progress(f"{len(task.prompt):,} tokens, round {number + 1} of {rounds}: {row.name}")
            asked = {**asdict(task), "setting": row.setting, "filled": task.filled and row.peer.fills}
            try:
                outcome.runs.append(run_once(found.paths[row.peer.name], row.peer, asked))
            except RowFailedError as error:
                outcome.failed = str(error)
                progress(f"{row.name} failed: {error}")
    return outcomes


class RowFailedError(Exception):
    """A runner gave no answer; the message is its own last line."""


def run_once(python: str, peer: Peer, asked: Mapping[str, Any]) -> Answer:
    """One task in a new process.

    Raises:
        RowFailedError: the runner ended without an answer, or took longer than ``MOST_SECONDS``.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        status, out, errors = _finished([python, str(peer.runner), str(file)], _surroundings(peer, asked["threads"]))
    if status:
        raise RowFailedError(_last_line(errors) or _last_line(out) or f"it ended with status {status}")
    try:
        return answer_of(_last_line(out))
    except ValueError as error:
        raise RowFailedError(f"its last line is no answer ({error})") from error


def _surroundings(peer: Peer, threads: int) -> dict[str, str]:
    kept = {key: text for key, text in os.environ.items() if peer.environment is None or key not in _OURS_ALONE}
    count = str(threads)
    return kept | {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _finished(words: Sequence[str], surroundings: Mapping[str, str]) -> tuple[int, str, str]:
    """Status, output and errors of a process; what it started goes with it, however this ends."""
    own = os.name == "posix"
    process = subprocess.Popen(
        words,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=own,
    )
    try:
        out, errors = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RowFailedError(f"it took longer than {MOST_SECONDS} seconds") from error
    finally:
        if process.poll() is None:
            if own:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.communicate()
    status = process.returncode
    if status < 0:
        errors += f"\nit died of signal {-status} ({signal.Signals(-status).name})"
    return status, out, errors


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
