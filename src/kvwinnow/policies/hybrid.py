"""Hybrid: attention sinks, heavy hitters and a rolling window in one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import LayerView, Phase, Rolling
from kvwinnow.policies.h2o import check_normalize, mass
from kvwinnow.statistics import MASS, Statistics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Hybrid(Rolling):
    """Keeps sinks, the ``heavy_ratio`` share of the rest as heavy hitters (H2O's score), and a rolling window.

    Attributes:
        budget: sinks, heavy hitters and window together, see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back.
        sinks: tokens at the start of each row that are never evicted.
        heavy_ratio: share of (budget - sinks) given to heavy hitters, in [0, 1], rounded down.
        normalize: None: the raw sum of attention; "age": divided by the number of queries that could see the token.
    """

    name: ClassVar[str] = "hybrid"
    paper: ClassVar[str] = "H2O (arXiv 2306.14048) with the sinks of StreamingLLM (arXiv 2309.17453)"
    url: ClassVar[str] = "https://arxiv.org/abs/2306.14048"

    sinks: int = 4
    heavy_ratio: float = 0.5
    normalize: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.heavy_ratio, bool) or not isinstance(self.heavy_ratio, int | float):
            raise PolicyError(f"hybrid: heavy_ratio={self.heavy_ratio!r} must be a number in [0, 1]")
        if not 0 <= self.heavy_ratio <= 1:
            raise PolicyError(f"hybrid: heavy_ratio={self.heavy_ratio} must lie in [0, 1]")
        super().__post_init__()
        check_normalize(self.name, self.normalize)

    def statistics(self, phase: Phase) -> Statistics:
        return MASS

    def protected(self, budget: int) -> tuple[int, int]:
        rest = max(0, budget - self.sinks)
        return self.sinks, rest - int(rest * self.heavy_ratio)

    def minimum(self) -> int:
        return self.sinks + 1

    def score(self, view: LayerView) -> Tensor:
        return mass(view, self.normalize)
