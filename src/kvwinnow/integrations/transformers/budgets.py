"""From a budget as the user gave it to tokens per KV head, for each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvwinnow.cache.memory import GROWTH, LayerShape, layer_nbytes, prompt_nbytes, slots_for
from kvwinnow.codecs import Codec
from kvwinnow.errors import PolicyError
from kvwinnow.integrations.transformers.calls import NewTokens, Seen
from kvwinnow.integrations.transformers.dtypes import codecs_in
from kvwinnow.policies import Phase, Policy, SlidingWindow
from kvwinnow.policies.budget import parse_size


def sliding_budget(window: int) -> int:
    """Tokens a sliding layer keeps: of a window that ends with the next token, all but that token."""
    return max(1, window - 1)


class Budgets:
    """Resolves a policy's budget when a prompt's length is known.

    Tokens are what they are. A share is taken of all tokens a row has seen when a prompt is complete, so it is
    resolved anew at every turn and never shrinks; it is at least what the policy cannot do without. Bytes are resolved
    once, at the first prompt, since they depend on the number of rows. Sliding layers keep their own windows: their
    bytes count, their tokens do not depend on the budget.
    """

    def __init__(
        self, policy: Policy, codecs: tuple[Codec, Codec], shape: LayerShape, sliding: tuple[int | None, ...]
    ) -> None:
        self.policy, self.codecs, self.shape, self.sliding = policy, codecs, shape, sliding
        self.layers = [(codecs, shape)] * len(sliding)
        self.reset()

    def reset(self) -> None:
        """Forget what was resolved."""
        self._current: tuple[int, ...] | None = None

    def select(self, rows: Sequence[int]) -> None:
        """Let row r have the budget of row ``rows[r]``."""
        if self._current is not None:
            self._current = tuple(self._current[row] for row in rows)

    def follow(self, dtypes: Sequence[torch.dtype], own: tuple[bool, bool]) -> None:
        """Have bytes counted in each layer's present dtype.

        Args:
            dtypes: of each layer's keys and values.
            own: whether keys, and values, are stored in that dtype.
        """
        self.layers = [
            (codecs_in(self.codecs, own, (dtype, dtype)), dataclasses.replace(self.shape, dtype=dtype))
            for dtype in dtypes
        ]

    def state(self) -> list[int] | None:
        """What was resolved so far, for a file."""
        return None if self._current is None else list(self._current)

    def set_state(self, state: object, rows: int) -> None:
        """Take over what ``state`` gave for that many rows.

        Raises:
            ValueError: it is nothing that ``state`` gives.
        """
        if state is None:
            self._current = None
        elif isinstance(state, list) and len(state) == rows and all(type(n) is int and 0 < n < 2**31 for n in state):
            self._current = tuple(state)
        else:
            raise ValueError("budgets")

    def resolve(
        self, phase: Phase, seen: Seen, new: NewTokens, declared: tuple[int, ...] | None
    ) -> tuple[int | None, ...]:
        """Tokens per KV head for each row.

        Args:
            phase: of this step.
            seen: what the cache has seen before it.
            new: what this step brings.
            declared: for each row, tokens of all prompts and turns once the prompt being fed is complete; None:
                nothing was declared, this step is the whole prompt.

        Raises:
            PolicyError: a share of a prompt that comes in undeclared chunks, or bytes that hold too few tokens.
        """
        limit = self.policy.limit
        if limit is None or isinstance(limit, int):
            return (limit,) * new.batch
        if phase is Phase.DECODE and self._current is not None:
            return self._current
        if isinstance(limit, str):
            self._current = self._current or (self._tokens_in(limit, new.batch),) * new.batch
            return self._current
        if declared is None and seen.columns and not seen.ended:
            raise PolicyError(
                f"budget={limit} is a share of the prompt, and this prompt comes in chunks, so its length is unknown; "
                "feed it inside `with cache.prompt(length=n):`, or give the budget in tokens"
            )
        totals = declared or tuple(old + n for old, n in zip(seen.row_tokens(new.batch), new.tokens, strict=True))
        least = self.policy.minimum()
        # A hair more, so that 0.29 of 100 is 29 in spite of the float.
        shares = (max(least, int(total * limit + 1e-9)) for total in totals)
        self._current = tuple(
            max(old, share) for old, share in zip(self._current or (0,) * new.batch, shares, strict=True)
        )
        return self._current

    def nbytes(self, tokens: int, batch: int, seen: int | None = None) -> int:
        """Bytes the whole cache takes when every KV head is at its budget, right after the prompt.

        Args:
            tokens: the budget, for policies that divide it among the layers their mean.
            batch: number of rows.
            seen: tokens of the prompt, by which such policies divide; None: not known, which adds what the steps of
                slots may come to at most.
        """
        total, policy, number = 0, self.policy, 0
        sharing = self.sliding.count(None)
        for window, (codecs, shape) in zip(self.sliding, self.layers, strict=True):
            if window is not None:
                total += _sliding_nbytes(window, codecs, shape, batch)
                continue
            kept = tokens
            if policy.layered and seen is not None:
                kept = min(seen, policy.layer_budget(tokens, layer=number, layers=sharing, seen=seen))
            slots = slots_for(kept, policy.capacity(kept), codecs, shape.exact)
            if policy.layered and seen is None:
                # However the sum is divided, no layer has more than a step of slots beyond its part.
                slots = kept + GROWTH
            total += layer_nbytes(policy, codecs, shape, batch=batch, slots=slots)
            total += prompt_nbytes(policy, shape, batch=batch)
            number += 1
        return total

    def _tokens_in(self, size: str, batch: int) -> int:
        """The largest budget in tokens whose cache fits into ``size``."""
        limit, least = parse_size(size), self.policy.minimum()
        needed = self.nbytes(least, batch)
        if needed > limit:
            raise PolicyError(
                f"budget={size!r} ({limit:,} bytes) is too small: {self.policy.name} keeps at least {least} tokens per "
                f"KV head, which take {needed:,} bytes in this model with {batch} row(s), whole steps of slots and "
                "what is held of the prompt's queries included; give at least that"
            )
        low, high = least, least + limit  # no token takes less than a byte
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle, batch) <= limit else (low, middle - 1)
        return low


def _sliding_nbytes(window: int, codecs: tuple[Codec, Codec], shape: LayerShape, batch: int) -> int:
    """Bytes of a layer that keeps its own window, once that is full."""
    budget = sliding_budget(window)
    own = SlidingWindow(budget=budget)
    slots = slots_for(budget, own.capacity(budget), codecs, shape.exact)
    return layer_nbytes(own, codecs, shape, batch=batch, slots=slots)
