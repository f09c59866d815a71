"""The model's own rotation of queries and keys by their positions: done, undone, and averaged over others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding (arXiv 2104.09864) as one model has it, its frequencies and its scaling included.

    Attributes:
        angles: (n,) int64 positions to the cosines and sines, (n, R) float32 each, one for every element that is
            rotated, the first R of D; a factor that the model puts on them (YaRN's attention scaling) is part of them.
        interleaved: whether the elements 2i and 2i + 1 are a pair, or i and i + R/2.
    """

    angles: Callable[[Tensor], tuple[Tensor, Tensor]]
    interleaved: bool = False

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """(..., n, D) float32 to the same, each vector rotated to its position (n,)."""
        return self.turn(x, *self.angles(positions))

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """The opposite of ``apply``."""
        cos, sin = self.angles(positions)
        length = cos.square() + sin.square()
        return self.turn(x, cos / length, -sin / length)

    def mean(self, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The mean rotation over ``count`` positions from ``first`` on: cosines and sines, (R,) float32 each."""
        cos, sin = self.angles(torch.arange(first, first + count, device=device))
        return cos.mean(0), sin.mean(0)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first R elements of x (..., D) by angles of the given cosines and sines (..., R)."""
        rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if self.interleaved:
            across = torch.stack([-rotated[..., 1::2], rotated[..., ::2]], -1).flatten(-2)
        else:
            first, second = rotated.chunk(2, -1)
            across = torch.cat([-second, first], -1)
        return torch.cat([rotated * cos + across * sin, rest], -1)
