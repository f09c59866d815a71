"""What a runner is asked and what it answers. Standard library alone: each runner has an environment of its own.

A runner is started as ``python RUNNER.py TASK.json``, and the last line it prints is its answer. If it cannot serve the
task it exits with another status than 0, and the last line on the error stream says why.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

WARM_UP = 128
"""Tokens of the prompt that a runner feeds first, with a few new ones, so that what is done once is not counted."""
WARM_UP_NEW = 4


@dataclass(frozen=True)
class Task:
    """One prompt and one greedy generation, end tokens ignored.

    Attributes:
        model: what ``models.py`` made for the runner: a folder or a file.
        prompt: token ids.
        new_tokens: how many tokens to make, 2 or more.
        setting: which of the runner's caches.
        threads: threads to compute on.
        filled: fill the cache for as many tokens as the prompt has without computing them, where the runner can; the
            time to the first token and the peak of memory are then not known.
        most_seconds: of decoding; when they have passed, the runner may leave the rest of the tokens.
    """

    model: str
    prompt: list[int]
    new_tokens: int
    setting: str
    threads: int
    filled: bool = False
    most_seconds: float = 60.0


@dataclass(frozen=True)
class Answer:
    """What one generation took.

    Attributes:
        first_token_s: seconds from handing over the prompt until its first token was known; None: not known.
        decode_tokens_per_s: the other tokens over the time between the first and the last.
        peak_rss_bytes: the most memory the process had, model and libraries included; None: means nothing here.
        cache_bytes: what the cache held at the end; None: the library does not say.
        tokens: the new token ids.
        version: of the library.
        cache_bytes_from: how ``cache_bytes`` is known.
    """

    first_token_s: float | None
    decode_tokens_per_s: float
    peak_rss_bytes: int | None
    cache_bytes: int | None
    tokens: list[int]
    version: str
    cache_bytes_from: str = ""


def peak_rss() -> int | None:
    """The most memory this process has had at a time, in bytes.

    Linux's ``ru_maxrss`` begins with what the process that started this one had, so it is asked only elsewhere.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def answer_of(text: str) -> Answer:
    """The answer in a runner's last line.

    Raises:
        ValueError: it is none.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("no object")
    names = {field.name for field in fields(Answer)}
    try:
        answer = Answer(**{name: content[name] for name in names & content.keys()})
    except TypeError as error:
        raise ValueError(str(error)) from error
    if not isinstance(answer.decode_tokens_per_s, float | int) or not isinstance(answer.tokens, list):
        raise ValueError("a figure is no number")
    return answer


def serve(run: Callable[[Task], Answer]) -> int:
    """The main function of a runner: reads the task that the command line names, prints the answer."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        answer = run(task)
    except Exception as error:
        # One line, the last on the error stream.
        print(f"{type(error).__name__}: {' '.join(str(error).split())}"[:400], file=sys.stderr, flush=True)
        return 1
    print(flush=True)
    print(json.dumps(asdict(answer)), flush=True)
    return 0
