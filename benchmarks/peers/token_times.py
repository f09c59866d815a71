"""The time of each token, taken alike for the runners that do not use torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from contract import Task

FEWEST = 8
"""Tokens that are decoded whatever time they take."""


@dataclass(frozen=True)
class Timed:
    """What a generation gave.

    Attributes:
        first: seconds until the first token was known.
        rate: the other tokens over the time between the first and the last.
        tokens: all of them.
    """

    first: float
    rate: float
    tokens: list[int]


def timed(task: Task, first: Callable[[], int], following: Callable[[int], int]) -> Timed:
    """Make the task's tokens one by one: ``first`` takes in the prompt, ``following`` the token before."""
    begin = time.perf_counter()
    tokens = [first()]
    start = now = time.perf_counter()
    while len(tokens) < task.new_tokens and (len(tokens) <= FEWEST or now - start < task.most_seconds):
        tokens.append(following(tokens[-1]))
        now = time.perf_counter()
    return Timed(start - begin, (len(tokens) - 1) / (now - start), tokens)
