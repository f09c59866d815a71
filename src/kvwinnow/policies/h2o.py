"""H2O: heavy hitters by accumulated attention, beside the latest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import LayerView, Phase, Rolling
from kvwinnow.statistics import MASS, Statistics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class H2O(Rolling):
    """Keeps the tokens that received the most attention so far, and the ``recent`` latest ones.

    The score of a token is the sum of its softmax weight over all queries that came at or after it, in the prompt
    and at every decode step, in float32, mean over the query heads that share its KV head.

    Attributes:
        budget: sinks, heavy hitters and recent tokens together, see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back; 1 is the paper's.
        sinks: tokens at the start of each row that are never evicted; the paper protects none.
        recent: latest tokens never evicted; None: half of what the sinks leave, as in the paper.
        normalize: None, the paper's raw sum, which favours old tokens; "age": divided by the number of queries that
            could see the token.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048, section 4"
    url: ClassVar[str] = "https://arxiv.org/abs/2306.14048"

    sinks: int = 0
    recent: int | None = None
    normalize: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normalize(self.name, self.normalize)

    def statistics(self, phase: Phase) -> Statistics:
        return MASS

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, max(0, budget - self.sinks) // 2 if self.recent is None else self.recent

    def minimum(self) -> int:
        return max(1, self.sinks + (self.recent or 0))

    def score(self, view: LayerView) -> Tensor:
        return mass(view, self.normalize)


def mass(view: LayerView, normalize: str | None) -> Tensor:
    """(B, Hkv, S) float32: the attention each token received, as a sum or as a mean over the queries that saw it."""
    return view.measured() if normalize is None else view.measured() / view.observers()


def check_normalize(policy: str, normalize: object) -> None:
    """Refuse what is no normalisation of an attention mass.

    Raises:
        PolicyError: neither None nor "age".
    """
    if normalize not in (None, "age"):
        raise PolicyError(f"{policy}: normalize={normalize!r} is unknown; take age, or none for the raw sum")
