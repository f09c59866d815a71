"""Knorm: keys of a small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.policies.base import Guarded, LayerView, Phase
from kvwinnow.statistics import KEY_NORM, Statistics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Knorm(Guarded):
    """Keeps the tokens whose keys have the smallest L2 norm: those tend to receive the most attention.

    The norm is taken of the key as the model made it and stored beside it, so that a codec does not change the choice.
    No attention weight is looked at.

    Attributes:
        budget: sinks, chosen and recent tokens together, see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back.
        sinks: tokens at the start of each row that are never evicted; the paper protects none.
        recent: latest tokens never evicted; the paper protects none.
    """

    name: ClassVar[str] = "knorm"
    paper: ClassVar[str] = "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430"
    url: ClassVar[str] = "https://arxiv.org/abs/2406.11430"

    def statistics(self, phase: Phase) -> Statistics:
        return KEY_NORM

    def score(self, view: LayerView) -> Tensor:
        return -view.measured()
