"""Looks on while a cache evicts: what each KV head lost, when, and with which score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvwinnow.policies import Compose, LayerView, Lengths, Phase, Policy, WholeBlocks
from kvwinnow.policies.budget import Budget
from kvwinnow.simulation.explorer.exploration import NEVER
from kvwinnow.statistics import Kind, Statistics

if TYPE_CHECKING:
    from kvwinnow.integrations.transformers import CompressedCache


class Watch:
    """What happens in all layers of one empty cache, which serves one row.

    Attributes:
        step: what a cut belongs to: 0 is the prompt. Whoever runs the model counts it up.
    """

    def __init__(self, cache: CompressedCache, *, tokens: int) -> None:
        """Look on from now.

        Args:
            cache: empty; each of its layers decides as before.
            tokens: how many it will be given at most.
        """
        self.step = 0
        heads = cache.structure.kv_heads
        self._logs = [_Log(self, heads, tokens) for _ in range(len(cache))]
        layers: Any = cache.layers
        for layer, log in zip(layers, self._logs, strict=True):
            layer.policy = _Watched(layer.policy, log)

    def evicted(self, tokens: int) -> NDArray[np.uint16]:
        """(L, H, tokens): the step at which each KV head lost a token, or ``NEVER``."""
        return np.stack([log.evicted[:, :tokens].numpy() for log in self._logs]).astype(np.uint16)

    def scores(self, tokens: int) -> NDArray[np.float32]:
        """(L, H, tokens): see ``Run.scores``."""
        return np.stack([log.scores[:, :tokens].numpy() for log in self._logs])


class _Log:
    """One layer's part. The last column takes what belongs to empty slots."""

    def __init__(self, watch: Watch, heads: int, tokens: int) -> None:
        self._watch = watch
        self.evicted = torch.full((heads, tokens + 1), NEVER, dtype=torch.int32)
        self.scores = torch.full((heads, tokens + 1), torch.nan)

    def note(self, positions: Tensor, scores: Tensor, stays: Tensor) -> None:
        """A cut: (H, S) positions of the slots, -1 = empty, their scores, and which of them stay."""
        places = torch.where(positions < 0, self.scores.shape[1] - 1, positions).long().cpu()
        self.scores.scatter_(1, places, scores.cpu())
        steps = torch.where(stays.cpu(), NEVER, self._watch.step).int()
        self.evicted.scatter_(1, places, steps)


@dataclass(frozen=True, eq=False)
class _Watched(Policy):
    """Decides as ``inner`` does, and tells ``log``."""

    inner: Policy
    log: _Log

    @property
    def layered(self) -> bool:
        return self.inner.layered

    @property
    def limit(self) -> Budget | None:
        return self.inner.limit

    def minimum(self) -> int:
        return self.inner.minimum()

    def protected(self, budget: int) -> tuple[int, int]:
        return self.inner.protected(budget)

    def statistics(self, phase: Phase) -> Statistics:
        return self.inner.statistics(phase)

    def running(self) -> tuple[Kind, ...]:
        return self.inner.running()

    def layer_budget(self, budget: int, *, layer: int, layers: int, seen: int, least: int = 1) -> int:
        return self.inner.layer_budget(budget, layer=layer, layers=layers, seen=seen, least=least)

    def due(self, phase: Phase, lengths: Lengths) -> int | None:
        return self.inner.due(phase, lengths)

    def most_kept(self, budget: int) -> int:
        return self.inner.most_kept(budget)

    def capacity(self, budget: int) -> int | None:
        return self.inner.capacity(budget)

    def score(self, view: LayerView) -> Tensor:
        return self.inner.score(view)

    def select(self, view: LayerView, lengths: Sequence[Lengths], keep: Sequence[int]) -> Tensor:
        stays = self.inner.select(view, lengths, keep)
        self.log.note(view.positions[0], _scores(self.inner, view, lengths)[0], stays[0])
        return stays

    def __str__(self) -> str:
        return str(self.inner)


def _scores(policy: Policy, view: LayerView, lengths: Sequence[Lengths]) -> Tensor:
    """(1, H, S): the scores by which ``select`` went, +inf for what it protected whatever its score."""
    if isinstance(policy, WholeBlocks):
        policy = policy.policy
    if isinstance(policy, Compose):
        policy = policy.prompt if view.phase is Phase.PROMPT else policy.decode
    sinks, recent = policy.protected(lengths[0].budget)
    protected = (view.positions < sinks) | (view.positions > view.last - recent)
    scores = policy.score(view).float()
    # NaN ranks lowest in ``select``, and here it means that there is no score.
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    return scores.masked_fill(protected, torch.inf)
