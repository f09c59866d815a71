"""KeyDiff: keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.policies.base import Guarded, LayerView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyDiff(Guarded):
    """Keeps the tokens whose keys are least like the mean of all normalised keys that are held (cosine similarity).

    No attention weight is looked at; the keys are, at every cut. A quantised key is compared as it is stored.

    Attributes:
        budget: sinks, chosen and recent tokens together, see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back.
        sinks: tokens at the start of each row that are never evicted; the paper protects none.
        recent: latest tokens never evicted; the paper protects none.
    """

    name: ClassVar[str] = "keydiff"
    paper: ClassVar[str] = "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364, section 3"
    url: ClassVar[str] = "https://arxiv.org/abs/2504.15364"

    def score(self, view: LayerView) -> Tensor:
        import torch.nn.functional as F

        keys, held = view.keys(), (view.positions >= 0).unsqueeze(-1)
        # What lies in an empty slot is no key; it may be anything.
        directions = F.normalize(keys, dim=-1).masked_fill(~held, 0.0)
        anchor = directions.sum(2, keepdim=True) / held.sum(2, keepdim=True).clamp(min=1)
        return -F.cosine_similarity(keys, anchor, dim=-1)
