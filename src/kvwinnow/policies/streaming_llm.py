"""StreamingLLM: attention sinks and a rolling window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvwinnow.policies.sliding_window import SlidingWindow


@dataclass(frozen=True)
class StreamingLLM(SlidingWindow):
    """Keeps the first ``sinks`` tokens for ever and fills the rest of the budget with the latest tokens.

    Attributes:
        budget: sinks and window together (the paper's 4 + 1020 = 1024), see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back.
        sinks: tokens at the start of each row that are never evicted.
    """

    name: ClassVar[str] = "streamingllm"
    paper: ClassVar[str] = "Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453, section 3.2"
    url: ClassVar[str] = "https://arxiv.org/abs/2309.17453"

    sinks: int = 4

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, 0

    def minimum(self) -> int:
        # A window of no tokens would evict the token just generated before anything could attend to it.
        return self.sinks + 1
