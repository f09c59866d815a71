"""What one forward call means to every layer: host-side facts, made once per call."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvwinnow.policies import Phase


@dataclass(frozen=True)
class Step:
    """One forward call.

    Attributes:
        phase: PROMPT or DECODE.
        positions: (B, n) int32, index of each new token in its row; -1 = padding.
        starts: for each row, the column of its first new token; n: the row has none.
        seen: for each row, tokens seen, the new ones included.
        budgets: for each row, tokens each KV head may hold; None: no limit.
    """

    phase: Phase
    positions: Tensor
    starts: tuple[int, ...]
    seen: tuple[int, ...]
    budgets: tuple[int | None, ...]
    _elsewhere: dict[torch.device, Step] = field(default_factory=dict, compare=False, repr=False)

    def on(self, device: torch.device) -> Step:
        """The same step with its tensors on ``device``, where a layer lies; copied once for each device."""
        if device == self.positions.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = dataclasses.replace(self, positions=self.positions.to(device), _elsewhere={})
        return self._elsewhere[device]

    @functools.cached_property
    def last(self) -> Tensor:
        """(B, 1, 1) int32, position of each row's newest token; made once for all layers."""
        return torch.tensor(self.seen, dtype=torch.int32, device=self.positions.device).sub_(1).view(-1, 1, 1)
