"""ExpectedAttention: what the queries to come may be expected to attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import Budgeted, LayerView, Phase
from kvwinnow.statistics import NONE, QUERIES, Statistics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ExpectedAttention(Budgeted):
    """Keeps the tokens that future queries are expected to attend to, chosen once when the prompt ends.

    Future queries are taken to be distributed as the prompt's were before their positions were rotated into them:
    normal, with their mean and covariance, averaged over the rotations of the next ``future`` positions. The expected
    weight of a key k is exp(k.mean/sqrt(d) + k'covariance k/(2d)), normalised over the tokens held, mean over the
    query heads that share a KV head; the score is that weight times the norm of the value. Nothing is evicted while
    decoding.

    Attributes:
        budget: sinks and chosen tokens together, see ``Budgeted``.
        future: how many positions to come are averaged over.
        sinks: tokens at the start of each row that are never evicted, and whose queries do not count.
        epsilon: added to the expected weight before it is multiplied by the value's norm.
        covariance: whether the covariance of the queries counts, or their mean alone.
        values: whether the norms of the values count.
    """

    name: ClassVar[str] = "expectedattention"
    paper: ClassVar[str] = "Expected Attention: KV Cache Compression by Estimating Attention, arXiv 2510.00636"
    url: ClassVar[str] = "https://arxiv.org/abs/2510.00636"

    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    covariance: bool = True
    values: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.epsilon, int | float) and not isinstance(self.epsilon, bool)
        if not number or not 0 <= self.epsilon < float("inf"):
            raise PolicyError(f"{self.name}: epsilon={self.epsilon!r} must be a number, 0 or more, such as 0.02")
        for field in ("covariance", "values"):
            if not isinstance(getattr(self, field), bool):
                raise PolicyError(f"{self.name}: {field}={getattr(self, field)!r} must be true or false")

    def statistics(self, phase: Phase) -> Statistics:
        return QUERIES(self.future, self.sinks) if phase is Phase.PROMPT else NONE

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, 0

    def minimum(self) -> int:
        return self.sinks + 1

    def score(self, view: LayerView) -> Tensor:
        queries, keys = view.queries(), view.keys()
        batch, kv_heads, count, dim = keys.shape
        hidden = view.positions < self.sinks  # empty slots, and sinks, which take no part in the softmax
        mean = queries.mean.view(batch, kv_heads, -1, dim)
        spread = queries.covariance.view(batch, kv_heads, -1, dim, dim)
        expected = keys.new_zeros(batch, kv_heads, count)
        for member in range(mean.shape[2]):  # one query head of each group at a time: no key is repeated
            logits = (keys @ mean[:, :, member].unsqueeze(-1)).squeeze(-1)
            if self.covariance:
                logits += ((keys @ spread[:, :, member]) * keys).sum(-1) / 2
            expected += logits.masked_fill_(hidden, -math.inf).softmax(-1).nan_to_num_(0.0)
        expected /= mean.shape[2]
        return (expected + self.epsilon) * view.values().norm(dim=-1) if self.values else expected
