"""SnapKV: what the end of the prompt attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import Budgeted, LayerView, Phase
from kvwinnow.statistics import NONE, WINDOW, Statistics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SnapKV(Budgeted):
    """Keeps the tokens that the prompt's last queries attend to, chosen once when the prompt ends.

    The softmax weights of the last ``window`` queries are summed, pooled along the positions, and the best tokens
    of each KV head stay beside the sinks and the window itself. Nothing is evicted while decoding.

    Attributes:
        budget: sinks, chosen tokens and window together, see ``Budgeted``.
        window: queries at the end of the prompt that are observed; their own tokens are always kept.
        kernel: width of the pooling in tokens, odd. An answer longer than it may be cut in half.
        pool: "max" or "avg" (the average counts the zeros beyond both ends).
        sinks: tokens at the start of each row that are never evicted (the paper protects none).
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469, section 4"
    url: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    window: int = 32
    kernel: int = 15
    pool: str = "max"
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise PolicyError(
                f"{self.name}: kernel={self.kernel} is even and has no middle; take {self.kernel - 1} or "
                f"{self.kernel + 1}"
            )
        if self.pool not in ("max", "avg"):
            raise PolicyError(f"{self.name}: pool={self.pool!r} is unknown; take max or avg")

    def statistics(self, phase: Phase) -> Statistics:
        return WINDOW(self.window) if phase is Phase.PROMPT else NONE

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, self.window

    def minimum(self) -> int:
        return self.sinks + self.window

    def score(self, view: LayerView) -> Tensor:
        import torch.nn.functional as F

        # The window's own columns take no part in the pooling: a zero in their place equals the 'same' padding of
        # the pooled prefix, since weights are never negative. Empty slots lie behind them and hold zeros too.
        outside = (view.positions < 0) | (view.positions > view.last - self.window)
        sums = view.measured().masked_fill(outside, 0.0)
        # A wider kernel than this spans all columns from anywhere, and would only take its time.
        kernel = min(self.kernel, 2 * sums.shape[-1] + 1)
        if self.pool == "max":
            return F.max_pool1d(sums, kernel, stride=1, padding=kernel // 2)
        return F.avg_pool1d(sums, kernel, stride=1, padding=kernel // 2, count_include_pad=True)
