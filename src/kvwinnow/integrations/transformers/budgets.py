"""From a budget as the user gave it to tokens per KV head, for each row."""

from __future__ import annotations

import dataclasses

import torch

from kvwinnow.cache.memory import GROWTH, LayerShape, layer_nbytes, prompt_nbytes, slots_for
from kvwinnow.codecs import Codec
from kvwinnow.errors import PolicyError
from kvwinnow.integrations.transformers.calls import NewTokens, Seen
from kvwinnow.policies import Phase, Policy
from kvwinnow.policies.budget import parse_size


class Budgets:
    """Resolves a policy's budget when a prompt's length is known.

    Tokens are what they are. A share is taken of all tokens a row has seen when a prompt is complete, so it is
    resolved anew at every turn and never shrinks; it is at least what the policy cannot do without. Bytes are resolved
    once, at the first prompt, since they depend on the number of rows.
    """

    def __init__(self, policy: Policy, codecs: tuple[Codec, Codec], shape: LayerShape, layers: int) -> None:
        self.policy, self.codecs, self.shape, self.layers = policy, codecs, shape, layers
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

    def nbytes(self, tokens: int, batch: int, seen: int | None = None) -> int:
        """Bytes the whole cache takes when every KV head is at its budget, right after the prompt.

        Args:
            tokens: the budget, for policies that divide it among the layers their mean.
            batch: number of rows.
            seen: tokens of the prompt, by which such policies divide; None: not known, which adds what the steps of
                slots may come to at most.
        """
        layers = [tokens] * self.layers
        if self.policy.layered and seen is not None:
            layers = [
                min(seen, self.policy.layer_budget(tokens, layer=layer, layers=self.layers, seen=seen))
                for layer in range(self.layers)
            ]
        total = self.layers * prompt_nbytes(self.policy, self.shape, batch=batch)
        for kept in layers:
            slots = slots_for(kept, self.policy.capacity(kept), self.codecs, self.shape.exact)
            if self.policy.layered and seen is None:
                # However the sum is divided, no layer has more than a step of slots beyond its part.
                slots = kept + GROWTH
            total += layer_nbytes(self.policy, self.codecs, self.shape, batch=batch, slots=slots)
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
