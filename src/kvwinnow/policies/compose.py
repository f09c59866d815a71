"""Compose: one policy for the prompt, another one while decoding, one budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import Budgeted, LayerView, Lengths, Phase, Policy, Rolling
from kvwinnow.policies.h2o import H2O
from kvwinnow.policies.snapkv import SnapKV
from kvwinnow.policies.whole_blocks import WholeBlocks
from kvwinnow.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor

_PROMPT, _DECODE = SnapKV(), H2O(sinks=4)


@dataclass(frozen=True)
class Compose(Budgeted):
    """Cuts prompts by one policy and holds the budget while decoding by another.

    There is one budget, and the two policies get it. The sum of attention that the decode policy goes by starts from
    what the prompt policy measured, for SnapKV the sums over its window before pooling, also where nothing was cut;
    each further prompt starts it anew. A prompt policy that measures no attention leaves the decode policy the sum
    over the whole prompt.

    Attributes:
        budget: of both policies, see ``Budgeted``.
        prompt: what cuts a prompt; ``Full()`` leaves it whole until the first token is decoded.
        decode: what evicts while decoding, a policy that can: H2O, Hybrid, TOVA, ...; ``Full()`` evicts nothing, so
            that the budget holds for prompts alone.
    """

    name: ClassVar[str] = "compose"
    paper: ClassVar[str] = "one policy for the prompt and another for decoding; the papers of the two"
    url: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    prompt: Policy = _PROMPT
    decode: Policy = _DECODE

    def __post_init__(self) -> None:
        for role in ("prompt", "decode"):
            object.__setattr__(self, role, self._inner(role, getattr(self, role)))
        super().__post_init__()

    def _inner(self, role: str, policy: object) -> Policy:
        """One of the two policies, with the common budget."""
        if not isinstance(policy, Policy):
            raise PolicyError(
                f"compose: {role}={policy!r} is a {type(policy).__name__} and no policy; in text write h2o(recent=64)"
            )
        if isinstance(policy, Compose):
            raise PolicyError(f"compose: {role}= is a compose itself; give it one of the policies that one is made of")
        if isinstance(policy, WholeBlocks):
            raise PolicyError(
                f"compose: {role}= evicts in blocks of {policy.multiple_of} for one phase alone; put compose into "
                f"blocks, as in blocks:multiple_of={policy.multiple_of},policy=compose(...)"
            )
        if not isinstance(policy, Budgeted):
            return policy
        if role == "decode" and not isinstance(policy, Rolling):
            raise PolicyError(
                f"compose: decode={policy.name} cuts prompts and evicts nothing while decoding; take one that does, "
                "such as h2o or tova, or full to let the cache grow"
            )
        default = next(field.default for field in dataclasses.fields(policy) if field.name == "budget")
        if policy.budget not in (default, self.budget):
            raise PolicyError(
                f"compose: {role}={policy.name} has budget={policy.budget} and compose has budget={self.budget}; there "
                "is one budget for both, so give it to compose alone"
            )
        return dataclasses.replace(policy, budget=self.budget)

    @property
    def layered(self) -> bool:
        return self.prompt.layered

    def minimum(self) -> int:
        return max(self.prompt.minimum(), self.decode.minimum())

    def protected(self, budget: int) -> tuple[int, int]:
        ranges = (self.prompt.protected(budget), self.decode.protected(budget))
        sinks, recent = (max(sizes) for sizes in zip(*ranges, strict=True))
        return sinks, recent

    def statistics(self, phase: Phase) -> Statistics:
        return self._of(phase).statistics(phase)

    def layer_budget(self, budget: int, *, layer: int, layers: int, seen: int, least: int = 1) -> int:
        least = max(least, self.minimum())
        return self.prompt.layer_budget(budget, layer=layer, layers=layers, seen=seen, least=least)

    def due(self, phase: Phase, lengths: Lengths) -> int | None:
        return self._of(phase).due(phase, lengths)

    def capacity(self, budget: int) -> int | None:
        # A prompt that is not cut takes the slots it takes.
        return None if self.prompt.limit is None else self.decode.capacity(budget)

    def score(self, view: LayerView) -> Tensor:
        return self._of(view.phase).score(view)

    def select(self, view: LayerView, lengths: Sequence[Lengths], keep: Sequence[int]) -> Tensor:
        return self._of(view.phase).select(view, lengths, keep)

    def _of(self, phase: Phase) -> Policy:
        return self.prompt if phase is Phase.PROMPT else self.decode
