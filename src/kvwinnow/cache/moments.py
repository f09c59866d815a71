"""Mean and covariance of a prompt's queries before their rotation, over all its chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow.ops import Rope
from kvwinnow.policies import Queries

BLOCK = 1024
"""Queries taken in at once."""


class QueryMoments:
    """Moments of the queries of each row and head so far, in float32.

    Sums of squares would lose the covariance of queries whose mean is large, so what is kept is the mean and the
    products of deviations from it, merged block by block (Chan, Golub and LeVeque, 1979).

    Attributes:
        counts: for each row, queries so far.
        mean: (B, Hq, D).
        products: (B, Hq, D, D), sum over the queries of (q - mean)(q - mean)'.
    """

    def __init__(self, batch: int, heads: int, dim: int, device: torch.device) -> None:
        self.counts = [0] * batch
        self.mean = torch.zeros(batch, heads, dim, dtype=torch.float32, device=device)
        self.products = torch.zeros(batch, heads, dim, dim, dtype=torch.float32, device=device)

    @classmethod
    def of(cls, counts: list[int], mean: Tensor, products: Tensor) -> QueryMoments:
        """Moments that were taken before."""
        moments = cls.__new__(cls)
        moments.counts, moments.mean, moments.products = counts, mean, products
        return moments

    def select(self, rows: Tensor) -> None:
        """Let row r have the moments of row ``rows[r]``; ``rows`` is (N,) int64 on the moments' device."""
        self.counts = [self.counts[row] for row in rows.tolist()]
        self.mean, self.products = self.mean.index_select(0, rows), self.products.index_select(0, rows)

    def add(self, row: int, q: Tensor, first: int, rope: Rope | None) -> None:
        """Take in queries of one row.

        Args:
            row: the row.
            q: (Hq, n, D), rotated as the model rotates them.
            first: position of the first of them; the others follow.
            rope: the model's rotation, to be undone; None: the model has none.
        """
        for begin in range(0, q.shape[1], BLOCK):
            block = q[:, begin : begin + BLOCK].float()
            count, old = block.shape[1], self.counts[row]
            if rope is not None:
                start = first + begin
                block = rope.undo(block, torch.arange(start, start + count, device=q.device))
            mean = block.mean(1)
            block = block - mean.unsqueeze(1)
            away = mean - self.mean[row]
            self.products[row] += block.mT @ block
            self.products[row] += away.unsqueeze(-1) * away.unsqueeze(-2) * (old * count / (old + count))
            self.mean[row] += away * (count / (old + count))
            self.counts[row] = old + count

    def expected(self, seen: tuple[int, ...], future: int, scale: float, rope: Rope | None) -> Queries:
        """The moments of scale * q, averaged over the rotations of the ``future`` positions after those ``seen``."""
        counts = torch.tensor(self.counts, dtype=torch.float32, device=self.mean.device).clamp(min=1)
        mean, covariance = self.mean * scale, self.products * scale**2 / counts.view(-1, 1, 1, 1)
        if rope is not None:
            for row, tokens in enumerate(seen):
                turned = rope.mean(tokens, future, mean.device)
                mean[row] = rope.turn(mean[row], *turned)
                covariance[row] = rope.turn(rope.turn(covariance[row], *turned).mT, *turned).mT
        return Queries(mean, covariance)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that lies in memory."""
        return self.mean, self.products
