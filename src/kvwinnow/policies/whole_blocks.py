"""Whole blocks: any policy, held to evict as a cache of fixed blocks can give memory back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import LayerView, Lengths, Phase, Policy
from kvwinnow.policies.budget import Budget
from kvwinnow.policies.snapkv import SnapKV
from kvwinnow.statistics import Kind, Statistics

if TYPE_CHECKING:
    from torch import Tensor

_POLICY = SnapKV()


@dataclass(frozen=True)
class WholeBlocks(Policy):
    """Lets another policy evict whole blocks of tokens only, as a paged cache gives them back.

    The number of tokens that a KV head has lost since its row began is a multiple of m = ``multiple_of``. Let b be the
    budget, s the tokens seen and E(s) those evicted, all of one row. Which tokens go, what is protected and what is
    measured stay the other policy's own, by the unrounded b; only when and how many follow from here.

    - After any call of a prompt that is cut: E(s) = m * max(0, floor((s - b) / m)). It depends on s alone, so chunks
      and turns leave what one piece leaves: every token while s < b + m, else b to b + m - 1 of them.
    - While decoding under a policy that rolls with ``evict_every`` e, after a prompt of p tokens that left E(p):
      E(s) = E(p) + M * max(0, floor((s - E(p) - b) / M)) with M = m * ceil(e / m), the slack in whole blocks. A head is
      cut when it holds b + M tokens, and is left with exactly b.
    - A prompt that Compose leaves whole is cut by the first rule at the first decoded token, if it holds b + M by then.
    - A budget that grows between turns gives nothing back: E never falls.

    Attributes:
        policy: the one that evicts; its budget is what a KV head keeps at least once that many tokens have come.
        multiple_of: tokens in a block; vLLM's usual 16. 1: the other policy as it is.
    """

    name: ClassVar[str] = "blocks"
    paper: ClassVar[str] = "any policy, in the blocks of PagedAttention, arXiv 2309.06180, section 4"
    url: ClassVar[str] = "https://arxiv.org/abs/2309.06180"

    policy: Policy = _POLICY
    multiple_of: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise PolicyError(
                f"blocks: policy={self.policy!r} is a {type(self.policy).__name__} and no policy; in text write "
                "h2o(budget=64)"
            )
        if isinstance(self.policy, WholeBlocks):
            raise PolicyError(
                f"blocks: policy= evicts in blocks of {self.policy.multiple_of} itself; give the policy within it, and "
                "one size of blocks"
            )
        whole = isinstance(self.multiple_of, int) and not isinstance(self.multiple_of, bool)
        if not whole or self.multiple_of < 1:
            raise PolicyError(
                f"blocks: multiple_of={self.multiple_of!r} must be a whole number of tokens, 1 or more, such as 16"
            )

    def due(self, phase: Phase, lengths: Lengths) -> int | None:
        # The other policy is told of whole blocks over its budget only, which rounds its slack up to blocks.
        spare = max(0, lengths.kept - lengths.budget) % self.multiple_of
        target = self.policy.due(phase, dataclasses.replace(lengths, kept=lengths.kept - spare))
        if target is None:
            return None
        keep = lengths.seen - (lengths.seen - target) // self.multiple_of * self.multiple_of
        return keep if keep < lengths.kept else None

    def most_kept(self, budget: int) -> int:
        return self.policy.most_kept(budget) + self.multiple_of - 1

    def capacity(self, budget: int) -> int | None:
        bound = self.policy.capacity(budget)
        # One block at least: that is how far over the budget a prompt may leave a head, and one token more.
        return None if bound is None else budget + -(-max(1, bound - budget) // self.multiple_of) * self.multiple_of

    # -- the other policy's own --------------------------------------------------------------------

    @property
    def layered(self) -> bool:
        return self.policy.layered

    @property
    def limit(self) -> Budget | None:
        return self.policy.limit

    def minimum(self) -> int:
        return self.policy.minimum()

    def protected(self, budget: int) -> tuple[int, int]:
        return self.policy.protected(budget)

    def statistics(self, phase: Phase) -> Statistics:
        return self.policy.statistics(phase)

    def running(self) -> tuple[Kind, ...]:
        return self.policy.running()

    def layer_budget(self, budget: int, *, layer: int, layers: int, seen: int, least: int = 1) -> int:
        return self.policy.layer_budget(budget, layer=layer, layers=layers, seen=seen, least=least)

    def score(self, view: LayerView) -> Tensor:
        return self.policy.score(view)

    def select(self, view: LayerView, lengths: Sequence[Lengths], keep: Sequence[int]) -> Tensor:
        return self.policy.select(view, lengths, keep)
