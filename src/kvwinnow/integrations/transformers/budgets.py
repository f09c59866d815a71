"""From a budget as the user gave it to tokens per KV head, for each row."""

from __future__ import annotations

import dataclasses

import torch

from kvwinnow.cache.memory import LayerShape, layer_nbytes, slots_for
from kvwinnow.codecs import Codec
from kvwinnow.errors import PolicyError
from kvwinnow.integrations.transformers.calls import NewTokens, Seen
from kvwinnow.policies import Phase, Policy, SlidingWindow
from kvwinnow.policies.budget import parse_size
from kvwinnow.statistics import Kind


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
        self.reset()

    def reset(self) -> None:
        """Forget what was resolved."""
        self._current: tuple[int, ...] | None = None

    def model_dtype(self, dtype: torch.dtype) -> None:
        """Have unquantised slots counted in the model's present dtype."""
        self.shape = dataclasses.replace(self.shape, dtype=dtype)

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

    def nbytes(self, tokens: int, batch: int) -> int:
        """Bytes the whole cache takes when every KV head is at a budget of ``tokens``, right after the prompt."""
        statistics = self.policy.statistics(Phase.PROMPT)
        queries = statistics.window if statistics.kind is Kind.WINDOW else 0
        slots = slots_for(tokens, self.policy.capacity(tokens), self.codecs, self.shape.exact)
        full = layer_nbytes(self.policy, self.codecs, self.shape, batch=batch, slots=slots, queries=queries)
        return sum(full if window is None else self._sliding_nbytes(window, batch) for window in self.sliding)

    def _sliding_nbytes(self, window: int, batch: int) -> int:
        """Bytes of a layer that keeps its own window, once that is full."""
        budget = sliding_budget(window)
        own = SlidingWindow(budget=budget)
        slots = slots_for(budget, own.capacity(budget), self.codecs, self.shape.exact)
        return layer_nbytes(own, self.codecs, self.shape, batch=batch, slots=slots)

    def _tokens_in(self, size: str, batch: int) -> int:
        """The largest budget in tokens whose cache fits into ``size``."""
        limit, least = parse_size(size), self.policy.minimum()
        needed = self.nbytes(least, batch)
        if needed > limit:
            raise PolicyError(
                f"budget={size!r} ({limit:,} bytes) is too small: {self.policy.name} keeps at least {least} tokens per "
                f"KV head, which take {needed:,} bytes in this model with {batch} row(s), whole steps of slots and a "
                "window of queries included; give at least that"
            )
        low, high = least, least + limit  # no token takes less than a byte
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle, batch) <= limit else (low, middle - 1)
        return low
