"""How a layer's attention differs from softmax(scale q.k) v over everything before a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """The arithmetic of one layer's attention.

    Attributes:
        scale: factor on q.k, usually 1/sqrt(D).
        softcap: logits become softcap * tanh(scale * q.k / softcap), before masks and softmax; None: they stay
            (Gemma 2, arXiv 2408.00118, section 2).
        sliding: a token sees the ``sliding`` latest ones only, itself included (Mistral 7B, arXiv 2310.06825,
            section 2); None: all before it.
        sinks: (Hq,) float, one more logit for each query head in the denominator of the softmax, which takes weight
            and gives no value (gpt-oss); None: there is none. These are learned, and no tokens: not a policy's sinks.
    """

    scale: float
    softcap: float | None = None
    sliding: int | None = None
    sinks: Tensor | None = None

    def with_sinks(self, lse: Tensor) -> Tensor:
        """The log-sum-exp (B, Hq, n) float32 over keys, and over the softmax's sinks too."""
        return lse if self.sinks is None else torch.logaddexp(lse, self.sinks.float().view(1, -1, 1).to(lse.device))


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Soft-capped logits, in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
