"""What every policy is: a score per cached token, two protected ranges and a moment.

A policy answers WHICH tokens of each KV head stay. It is a pure function of tensors: it knows neither a model
nor a framework, so that every integration calls the same objects.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvwinnow.errors import PolicyError
from kvwinnow.policies.budget import Budget, check_budget
from kvwinnow.statistics import NONE, RUNNING, Kind, Statistics
from kvwinnow.textform import show_spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

LEAST = {"sinks": 0, "recent": 0, "evict_every": 1, "window": 1, "kernel": 1, "beta": 1, "future": 1}
"""Parameters that are whole numbers, in whatever policy, and the least each may be."""


class Phase(enum.Enum):
    """Whether new tokens belong to a prompt (several at once, or declared) or are generated one by one."""

    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(frozen=True)
class Lengths:
    """Where one row stands, in tokens (padding never counts).

    Attributes:
        seen: tokens given to the cache so far, those of this step included.
        kept: tokens each KV head holds before this step's eviction.
        budget: tokens each KV head may hold, as resolved for this row.
    """

    seen: int
    kept: int
    budget: int


@dataclass(frozen=True)
class Queries:
    """How the queries to come are expected to be distributed: times the attention's scale, at future positions.

    Attributes:
        mean: (B, Hq, D) float32, of scale * q.
        covariance: (B, Hq, D, D) float32, of scale * q.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class LayerView:
    """What a policy sees of one layer when it scores.

    In the PROMPT phase the slots come in position order with the empty ones last; in the DECODE phase they come in
    the order of memory.

    Attributes:
        phase: PROMPT or DECODE.
        positions: (B, Hkv, S) int32, the token's index in its row, -1 for an empty slot.
        statistic: (B, Hkv, S) float32, what ``Policy.statistics`` asked for, mean over the GQA group; None for NONE
            and for QUERIES.
        last: (B, 1, 1) int32, the position of each row's newest token.
        since: (B, 1, 1) int32, or one number for all: the position of the first query whose weights MASS holds.
        read_keys: makes what ``keys`` gives; None: the caller cannot.
        read_values: makes what ``values`` gives; None: the caller cannot.
        make_queries: makes what ``queries`` gives; None: not asked for by QUERIES.
    """

    phase: Phase
    positions: Tensor
    statistic: Tensor | None
    last: Tensor
    since: Tensor | int = 0
    read_keys: Callable[[], Tensor] | None = None
    read_values: Callable[[], Tensor] | None = None
    make_queries: Callable[[], Queries] | None = None

    def keys(self) -> Tensor:
        """(B, Hkv, S, D) float32: the keys as the model made them, less what the codec lost; made when asked for."""
        return _given(self.read_keys, "keys")()

    def values(self) -> Tensor:
        """(B, Hkv, S, D) float32: the values as the model made them, less what the codec lost; made when asked for."""
        return _given(self.read_values, "values")()

    def queries(self) -> Queries:
        """The queries to come, as QUERIES asked for."""
        return _given(self.make_queries, "queries (statistics NONE)")()

    def observers(self) -> Tensor:
        """(B, Hkv, S) int32: how many of the queries whose weights MASS holds could see each token."""
        return (self.last - self.positions.clamp(min=self.since) + 1).clamp(min=1)

    def measured(self) -> Tensor:
        """The statistic, or a clear complaint if the caller did not measure it."""
        if self.statistic is None:
            raise PolicyError("this policy scores by attention weights, but the caller measured none (statistics NONE)")
        return self.statistic


@dataclass(frozen=True)
class Policy:
    """Base of all policies; one frozen dataclass per method, whose fields are the method's parameters.

    This class itself keeps everything. A method that picks tokens when a prompt ends derives from ``Budgeted``, one
    that also evicts while decoding from ``Rolling``.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    url: ClassVar[str] = ""

    @property
    def layered(self) -> bool:
        """Whether ``layer_budget`` gives the layers different budgets."""
        return False

    # -- what a method may define ------------------------------------------------------------------

    @property
    def limit(self) -> Budget | None:
        """Tokens per KV head, share of the prompt or bytes of the cache; None: no limit."""
        return None

    def minimum(self) -> int:
        """The smallest budget in tokens that this policy can obey."""
        return 1

    def protected(self, budget: int) -> tuple[int, int]:
        """(sinks, recent): how many first and latest tokens of a row stay whatever their score, at this budget."""
        return 0, 0

    def statistics(self, phase: Phase) -> Statistics:
        """What ops.attention must report in this phase."""
        return NONE

    def layer_budget(self, budget: int, *, layer: int, layers: int, seen: int, least: int = 1) -> int:
        """Tokens each KV head of one layer may hold, when ``budget`` is the mean over the layers.

        Args:
            budget: as resolved for a row, ``least`` and ``minimum()`` at least.
            layer: index of the layer, 0 is the lowest.
            layers: number of layers that share the budget.
            seen: tokens the row has been given: no layer can use more.
            least: no layer may get less than this, nor less than ``minimum()``.
        """
        return budget

    def due(self, phase: Phase, lengths: Lengths) -> int | None:
        """How many tokens each KV head keeps now; None: nothing to do. Pure, so that planners can call it too."""
        return None

    def most_kept(self, budget: int) -> int:
        """Most tokens that a cut to this budget leaves a KV head."""
        return budget

    def capacity(self, budget: int) -> int | None:
        """Most slots a KV head ever needs at this budget, slack included; None: decoding is not bounded."""
        return None

    def score(self, view: LayerView) -> Tensor:
        """(B, Hkv, S) float32: higher = keep. Empty slots and protected ranges are not this method's affair."""
        raise NotImplementedError(f"{type(self).__name__} evicts, so it must define score()")

    # -- what all methods share --------------------------------------------------------------------

    def running(self) -> tuple[Kind, ...]:
        """The statistics that are stored for each slot."""
        kinds = {self.statistics(phase).kind for phase in Phase}
        return tuple(kind for kind in RUNNING if kind in kinds)

    def select(self, view: LayerView, lengths: Sequence[Lengths], keep: Sequence[int]) -> Tensor:
        """Which slots stay.

        Args:
            view: the layer.
            lengths: where each row stands.
            keep: tokens to keep in each row; a row that holds no more than that loses nothing.

        Returns:
            (B, Hkv, S) bool. Padding and empty slots are never kept; equal scores keep the lower position.
        """
        import torch

        device = view.positions.device
        ranges = [self.protected(row.budget) for row in lengths]
        sinks, recent = (_per_row(values, device) for values in zip(*ranges, strict=True))
        protected = (view.positions < sinks) | (view.positions > view.last - recent)
        # Every occupied slot must rank above every empty one, hence the lowest finite number in place of -inf.
        lowest = torch.finfo(torch.float32).min
        scores = self.score(view).float().nan_to_num(nan=lowest, posinf=math.inf, neginf=lowest)
        scores = scores.masked_fill(protected, math.inf)
        dropped = [max(0, row.kept - k) for row, k in zip(lengths, keep, strict=True)]
        if max(dropped) == 1:
            every = min(dropped) == 1
            return all_but_lowest(scores, view.positions, None if every else torch.tensor(dropped, device=device) > 0)
        return highest(scores, view.positions, torch.tensor(keep, device=device))

    def __str__(self) -> str:
        return show_spec(self.name, self)


@dataclass(frozen=True)
class Budgeted(Policy):
    """A policy that cuts a prompt to its budget.

    Attributes:
        budget: tokens per KV head (int), share of the prompt (float in (0, 1]) or size of the whole cache ("64MiB").
    """

    budget: Budget = 1024

    def __post_init__(self) -> None:
        if hasattr(self.budget, "item"):  # a number of numpy's or torch's
            object.__setattr__(self, "budget", self.budget.item())
        check_budget(self.budget)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = LEAST.get(field.name)
            optional = value is None and field.default is None
            if least is not None and not optional and (not _is_int(value) or value < least):
                raise PolicyError(f"{self.name}: {field.name}={value!r} must be a whole number, {least} or more")
        if isinstance(self.budget, int) and self.budget < self.minimum():
            raise PolicyError(
                f"{self.name}: budget={self.budget} is under the {self.minimum()} tokens that this policy cannot do "
                f"without (its sinks and recent tokens); raise the budget to {self.minimum()} or protect fewer tokens"
            )

    @property
    def limit(self) -> Budget | None:
        return self.budget

    def due(self, phase: Phase, lengths: Lengths) -> int | None:
        return lengths.budget if phase is Phase.PROMPT and lengths.kept > lengths.budget else None


@dataclass(frozen=True)
class Rolling(Budgeted):
    """A policy that holds its budget while decoding too.

    Attributes:
        budget: see ``Budgeted``.
        evict_every: decoding runs this many tokens over the budget before it is cut back; the slack is allocated.
    """

    evict_every: int = 1

    def due(self, phase: Phase, lengths: Lengths) -> int | None:
        slack = self.evict_every if phase is Phase.DECODE else 1
        return lengths.budget if lengths.kept >= lengths.budget + slack else None

    def capacity(self, budget: int) -> int | None:
        return budget + self.evict_every


@dataclass(frozen=True)
class Guarded(Rolling):
    """A rolling policy that protects as many first and latest tokens as it is told.

    Attributes:
        budget: sinks, chosen and recent tokens together, see ``Budgeted``.
        evict_every: see ``Rolling``.
        sinks: tokens at the start of each row that are never evicted.
        recent: latest tokens never evicted.
    """

    sinks: int = 0
    recent: int = 0

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, self.recent

    def minimum(self) -> int:
        return max(1, self.sinks + self.recent)


def highest(scores: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """(B, Hkv, S) bool: the ``keep[b]`` occupied slots of the highest scores; of equal scores the lower position stays.

    Args:
        scores: (B, Hkv, S) float32, never -inf or NaN; may hold +inf.
        positions: (B, Hkv, S) int32, -1 = empty.
        keep: (B,) int64.
    """
    import torch

    occupied = positions >= 0
    by_position = torch.argsort(positions, dim=-1, stable=True)
    ranked = scores.masked_fill(~occupied, -math.inf).gather(-1, by_position)
    order = by_position.gather(-1, torch.argsort(ranked, dim=-1, stable=True, descending=True))
    stays = torch.arange(positions.shape[-1], device=positions.device) < keep.view(-1, 1, 1)
    return torch.zeros_like(occupied).scatter_(-1, order, stays.expand_as(order)) & occupied


def all_but_lowest(scores: Tensor, positions: Tensor, evict: Tensor | None = None) -> Tensor:
    """``highest`` where a row loses one token or none, in linear time: what a decode step needs.

    Args:
        scores: (B, Hkv, S) float32, never -inf or NaN.
        positions: (B, Hkv, S) int32, -1 = empty.
        evict: (B,) bool, whether the row loses a token; None: every row does.
    """
    occupied = positions >= 0
    ranked = scores.masked_fill(~occupied, math.inf)
    # Empty slots may be among the lowest where all scores are infinite; their position is below all others.
    victim = positions.masked_fill(ranked > ranked.amin(-1, keepdim=True), -1).argmax(-1, keepdim=True)
    if evict is None:
        return occupied.scatter_(-1, victim, False)
    return occupied.scatter(-1, victim, occupied.gather(-1, victim) & ~evict.view(-1, 1, 1))


def _per_row(values: Sequence[int], device: torch.device) -> Tensor | int:
    """One number for each row, to meet (B, Hkv, S); a plain one where all rows agree, which costs no tensor."""
    import torch

    return values[0] if len(set(values)) == 1 else torch.tensor(values, device=device).view(-1, 1, 1)


def _given(make: Callable[[], T] | None, what: str) -> Callable[[], T]:
    if make is None:
        raise PolicyError(f"this policy scores by {what}, but the caller gave none")
    return make


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
