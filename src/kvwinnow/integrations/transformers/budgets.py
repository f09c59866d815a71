"""From a budget as the user gave it to tokens per KV head, for each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvwinnow.cache import memory
from kvwinnow.cache.memory import LayerShape, PlannedLayer
from kvwinnow.codecs import Codec
from kvwinnow.errors import PolicyError
from kvwinnow.integrations.transformers.calls import NewTokens, Seen
from kvwinnow.integrations.transformers.dtypes import codecs_in
from kvwinnow.policies import Phase, Policy


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
        self.policy, self.codecs, self.shape = policy, codecs, shape
        self.layers = [PlannedLayer(shape, codecs, window) for window in sliding]
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
            PlannedLayer(
                dataclasses.replace(self.shape, itemsize=dtype.itemsize),
                codecs_in(self.codecs, own, (dtype, dtype)),
                layer.window,
            )
            for layer, dtype in zip(self.layers, dtypes, strict=True)
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
            if self._current is None:
                self._current = (memory.tokens_in(self.policy, self.layers, limit, batch=new.batch),) * new.batch
            return self._current
        if declared is None and seen.columns and not seen.ended:
            raise PolicyError(
                f"budget={limit} is a share of the prompt, and this prompt comes in chunks, so its length is unknown; "
                "feed it inside `with cache.prompt(length=n):`, or give the budget in tokens"
            )
        totals = declared or tuple(old + n for old, n in zip(seen.row_tokens(new.batch), new.tokens, strict=True))
        shares = (memory.share_of(self.policy, limit, total) for total in totals)
        self._current = tuple(
            max(old, share) for old, share in zip(self._current or (0,) * new.batch, shares, strict=True)
        )
        return self._current

    def nbytes(self, tokens: int, batch: int, seen: int | None = None) -> int:
        """See ``memory.budget_nbytes``."""
        return memory.budget_nbytes(self.policy, self.layers, tokens, batch=batch, seen=seen)
