"""Sliding window: the last tokens and nothing else. The baseline that fails once the first tokens are gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.policies.base import LayerView, Rolling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SlidingWindow(Rolling):
    """Keeps the last ``budget`` tokens.

    Attributes:
        budget: the window, see ``Budgeted``.
        evict_every: decoding runs this many tokens over the window before it is cut back.
    """

    name: ClassVar[str] = "slidingwindow"
    paper: ClassVar[str] = "Longformer: The Long-Document Transformer, arXiv 2004.05150, section 3.1"
    url: ClassVar[str] = "https://arxiv.org/abs/2004.05150"

    def score(self, view: LayerView) -> Tensor:
        # float32 holds whole numbers exactly up to 2^24 = 16.8M; beyond it neighbours would tie and the tie rule
        # would keep the older one. Distances from the newest token stay exact where the cut is made.
        return (view.positions - view.last).float()
