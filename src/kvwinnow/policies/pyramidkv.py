"""PyramidKV: SnapKV with more tokens in the lower layers and fewer in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvwinnow.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keeps what the prompt's last queries attend to, as SnapKV, most of it in the lower layers.

    The layers' budgets fall linearly from the first layer to the last, from about 2 * budget to budget / beta, and
    their sum is exactly layers * budget. No layer gets less than its sinks and its window, none of them more than the
    prompt can use, and a prompt at or under the budget is not cut at all.

    Attributes:
        budget: mean over the layers of sinks, chosen tokens and window together, see ``Budgeted``.
        window: queries at the end of the prompt that are observed; their own tokens are always kept.
        kernel: width of the pooling in tokens, odd.
        pool: "max" or "avg".
        sinks: tokens at the start of each row that are never evicted.
        beta: how much less than the mean the last layer gets; 1: every layer gets the same.
    """

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = (
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, 2406.02069"
    )
    url: ClassVar[str] = "https://arxiv.org/abs/2406.02069"

    beta: int = 20

    @property
    def layered(self) -> bool:
        return True

    def layer_budget(self, budget: int, *, layer: int, layers: int, seen: int, least: int = 1) -> int:
        return pyramid(
            budget,
            layer=layer,
            layers=layers,
            least=max(least, self.minimum()),
            most=seen - self.window,
            beta=self.beta,
        )


def pyramid(budget: int, *, layer: int, layers: int, least: int, most: int, beta: int) -> int:
    """Tokens of one layer: on a falling line whose values over all layers add up to layers * budget exactly.

    Args:
        budget: mean over the layers, ``least`` at least.
        layer: index of the layer, 0 is the lowest.
        layers: number of layers.
        least: no layer gets less.
        most: no layer gets more, unless the mean itself is more.
        beta: the last layer gets budget / beta, unless the bounds forbid it.
    """
    most = max(budget, min(most, 2 * budget - least))
    first = min(2 * budget - budget / beta, most)
    mirrored = layers - 1 - layer
    if layer == mirrored:
        return budget
    if layer > mirrored:  # what rounding gives to a layer it takes from the one opposite
        return 2 * budget - pyramid(budget, layer=mirrored, layers=layers, least=least, most=most, beta=beta)
    return round(first - layer * 2 * (first - budget) / (layers - 1))
