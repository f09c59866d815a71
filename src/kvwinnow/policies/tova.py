"""TOVA: what the latest query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.policies.base import Guarded, LayerView, Phase
from kvwinnow.statistics import WINDOW, Statistics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TOVA(Guarded):
    """Keeps the tokens that the latest query attends to most.

    In a prompt its last query decides, while decoding the query of the token at hand; mean over the query heads that
    share a KV head. Nothing is accumulated: a token that the latest query overlooks is gone for good.

    Attributes:
        budget: sinks, chosen and recent tokens together, see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back; 1 is the paper's.
        sinks: tokens at the start of each row that are never evicted; the paper protects none.
        recent: latest tokens never evicted. The paper protects none; with 1 the token at hand stays, as in kvpress.
    """

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "Transformers are Multi-State RNNs, arXiv 2401.06104, section 3.2"
    url: ClassVar[str] = "https://arxiv.org/abs/2401.06104"

    recent: int = 1

    def statistics(self, phase: Phase) -> Statistics:
        return WINDOW(1)

    def score(self, view: LayerView) -> Tensor:
        return view.measured()
