"""What is collected of a prompt under several policies: plain arrays, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEVER = 65535
"""Stands for the step of an eviction that did not come."""

LONGEST_ANSWER = 4096
"""Tokens: steps must fit beside ``NEVER``, and a longer answer is no page to look at."""


@dataclass(frozen=True)
class Run:
    """One policy's cache, from the prompt's end (step 0) to the last decode step.

    Step k takes in the answer's k-th token, whose position is n + k - 1 after a prompt of n tokens. The answer's last
    token is never taken in: nothing was asked after it.

    Attributes:
        policy: its text form.
        label: the same, short: parameters left at their defaults are left out.
        evicted: (L, H, n + K) uint16, the step at which each KV head lost a token: 0 by the end of the prompt, k at
            decode step k, ``NEVER`` if it was there at the end.
        scores: (L, H, n + K) float32, the score at a token's eviction, or the last one it got. +inf: it was in the
            range that the policy protects. NaN: nothing was scored while the token was there.
        budgets: for each layer, tokens that a KV head may hold; None: no limit.
        nbytes: (1 + K,) int64, bytes of the whole cache after each step.
        answer: text of each token of the answer, K + 1 of them.
        text: the answer without special tokens.
        foretold: pairs of tokens and bytes: what the whole cache would take right after a prompt of so many tokens,
            from 1 to the prompt's length, where the bytes are ``nbytes[0]``. A length at which the policy cannot obey
            its budget has no pair.
        notes: sentences on what a reader should know of the budget: that nothing was evicted, or that it was raised.
        retained: (L, H) float32, the share of the attention that the full cache pays while it answers which lies on
            tokens that this cache still holds then; NaN in layers that keep a window of their own. None: not measured.
    """

    policy: str
    label: str
    evicted: NDArray[np.uint16]
    scores: NDArray[np.float32]
    budgets: tuple[int | None, ...]
    nbytes: NDArray[np.int64]
    answer: tuple[str, ...]
    text: str
    foretold: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    retained: NDArray[np.float32] | None = None

    @property
    def steps(self) -> int:
        """K, how many decode steps there were."""
        return len(self.nbytes) - 1

    def kept(self, step: int) -> NDArray[np.bool_]:
        """(L, H, n + K): which tokens each KV head holds after a step; those that come later are not there yet."""
        come = self.evicted.shape[2] - self.steps + step
        there: NDArray[np.bool_] = (self.evicted > step) & (np.arange(self.evicted.shape[2]) < come)
        return there


@dataclass(frozen=True)
class Exploration:
    """One prompt under several policies.

    Attributes:
        model: what the user calls it.
        dtype: in which keys and values are stored, as torch names it.
        tokens: text of each token of the prompt; of a character made of several tokens the last has all, the others
            are empty.
        sliding: for each layer, its own window in tokens, which it keeps whatever the policy; None: it follows the
            policy.
        runs: the full cache first.
    """

    model: str
    dtype: str
    tokens: tuple[str, ...]
    sliding: tuple[int | None, ...]
    runs: tuple[Run, ...]
