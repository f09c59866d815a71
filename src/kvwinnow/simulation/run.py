"""The loop: a trace is fed to a policy token by token, as ``LayerCache`` would feed it, and the policy decides.

Every decision is the policy's own, by ``due``, ``statistics``, ``layer_budget`` and ``select``. What is here is the
arithmetic of statistics: whence they come, how they add up, and what becomes of attention weights once tokens are gone.
The layers of the trace are the rows of the batch, so that each may have a budget of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvwinnow.cache.memory import GROWTH, LayerShape, PlannedLayer, budget_in_tokens, exact_slots
from kvwinnow.cache.moments import QueryMoments
from kvwinnow.codecs import parse_codec
from kvwinnow.errors import PolicyError, TraceError
from kvwinnow.ops import Rope
from kvwinnow.policies import LayerView, Lengths, Phase, Policy, Queries
from kvwinnow.simulation.trace import Floats, QueryFacts, Trace
from kvwinnow.statistics import Kind

NEVER = np.iinfo(np.int32).max
"""When a token was evicted that is still there in the end."""

Progress = Callable[[int, int], None]
"""Told after each token how many have come, and of how many."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a policy did to a trace.

    Attributes:
        trace: the trace.
        policy: the policy.
        budgets: for each layer of the trace, tokens that each KV head may hold; None: no limit.
        evicted: (L, H, n) int32, how many tokens had come when a token was evicted: after the attention of the latest
            of them. NEVER: it is there in the end.
        scores: (L, H, n) float32, the policy's score of each token when it last had to choose; NaN: it never had to.
            None: not asked for.
    """

    trace: Trace
    policy: Policy
    budgets: tuple[int | None, ...]
    evicted: NDArray[np.int32]
    scores: Floats | None = None

    def held(self, seen: int | None = None) -> NDArray[np.bool_]:
        """(L, H, n) bool: what each KV head holds once ``seen`` tokens have come, or in the end, after evictions."""
        seen = len(self.trace.tokens) if seen is None else seen
        kept: NDArray[np.bool_] = (self.evicted > seen) & (self.trace.positions < seen)
        return kept


def simulate(trace: Trace, policy: Policy, *, scores: bool = False, progress: Progress | None = None) -> Simulation:
    """Replay a trace under a policy.

    The prompt of the trace comes in one piece, the other tokens are decoded one by one; a trace without a prompt is
    decoded from its first token on.

    Args:
        trace: what to replay.
        policy: which tokens stay.
        scores: whether to remember the scores.
        progress: called as tokens come.

    Raises:
        TraceError: the trace does not hold what the policy scores by.
        PolicyError: the policy's budget says nothing for this trace.
    """
    with torch.no_grad():
        run = _Run(trace, policy, scores)
        if trace.prompt:
            run.prompt()
        for seen in range(trace.prompt + 1, len(trace.tokens) + 1):
            run.decode(seen)
            if progress is not None:
                progress(seen, len(trace.tokens))
    remembered = None if run.scores is None else run.scores.numpy()
    return Simulation(trace, policy, tuple(run.budgets), run.evicted.numpy(), remembered)


def planned_layers(trace: Trace, policy: Policy) -> tuple[PlannedLayer, ...]:
    """All layers of the trace's model, those with a window too, as a cache in the model's dtype has them.

    Raises:
        PolicyError: the trace is of no model.
    """
    model = trace.model
    if model is None:
        raise PolicyError("this trace was not recorded from a model, so nothing is known of bytes; count in tokens")
    codec = parse_codec("fp32" if model.itemsize == 4 else "bf16")
    exact = exact_slots(policy)
    shape = LayerShape(model.heads, model.kv_heads, model.dim, exact, model.itemsize)
    return tuple(PlannedLayer(shape, (codec, codec), window) for window in model.windows)


class _Run:
    """The state of a replay: slots as a ``LayerCache`` has them, of positions and statistics alone.

    Attributes:
        positions: (L, H, S) int64, -1 = empty.
        mass: (L, H, S) float32, the attention stored for each slot, if the policy stores it.
        kept: for each layer, tokens that each KV head holds.
        since: the first query whose weights ``mass`` holds.
    """

    def __init__(self, trace: Trace, policy: Policy, scores: bool) -> None:
        self.trace, self.policy = trace, policy
        self.layers, self.heads, self.n = trace.mass.shape[1:]
        self.storing = Kind.MASS in policy.running()
        self.positions = torch.full((self.layers, self.heads, 0), -1, dtype=torch.int64)
        self.mass = torch.zeros(self.layers, self.heads, 0)
        self.kept, self.since = [0] * self.layers, 0
        self.evicted = torch.full((self.layers, self.heads, self.n), NEVER, dtype=torch.int32)
        self.scores = torch.full((self.layers, self.heads, self.n), torch.nan) if scores else None
        self.numbers = torch.from_numpy(trace.mass[0]) if trace.fixed else None
        self.budgets = self._budgets()

    def _budgets(self) -> list[int | None]:
        limit, prompt = self.policy.limit, self.trace.prompt
        if isinstance(limit, float) and not prompt:
            raise PolicyError(
                f"budget={limit} is a share of the prompt, and this trace has none; give the budget in tokens"
            )
        planned = planned_layers(self.trace, self.policy) if isinstance(limit, str) else ()
        budget = budget_in_tokens(self.policy, planned, batch=1, prompt=prompt)
        if budget is None:
            return [None] * self.layers
        return [
            self.policy.layer_budget(budget, layer=layer, layers=self.layers, seen=max(1, prompt))
            for layer in range(self.layers)
        ]

    # -- the prompt --------------------------------------------------------------------------------

    def prompt(self) -> None:
        """Take in the prompt and cut it."""
        prompt = self.trace.prompt
        self.positions = torch.arange(prompt).expand(self.layers, self.heads, prompt).clone()
        self.kept = [prompt] * self.layers
        keep = self._due(Phase.PROMPT, prompt)
        wanted = self.policy.statistics(Phase.PROMPT)
        window = wanted.window if wanted.kind is Kind.WINDOW else None
        measured = None
        if self.storing or (keep is not None and wanted.kind in (Kind.MASS, Kind.WINDOW)):
            measured = self._paid_by_the_prompt(window)
        if self.storing and measured is not None:
            # Where the prompt policy looks at a window, its sums stand for all before.
            self.mass = measured
            self.since = 0 if window is None else prompt - min(window, prompt)
        if keep is not None:
            statistic = self._norms() if wanted.kind is Kind.KEY_NORM else measured
            asked = wanted.kind not in (Kind.NONE, Kind.QUERIES)
            self._cut(Phase.PROMPT, prompt, keep, statistic if asked else None)

    def _paid_by_the_prompt(self, window: int | None) -> Tensor:
        """(L, H, prompt) float32: the attention that each token received from the prompt's last queries."""
        if self.numbers is not None:
            return self._at_slots(self.numbers)
        return torch.from_numpy(self.trace.prompt_mass(window)[:, :, : self.trace.prompt]).clone()

    # -- decoding ----------------------------------------------------------------------------------

    def decode(self, seen: int) -> None:
        """Take in the token after ``seen - 1`` others, let it attend, and evict what is due."""
        if max(self.kept) + 1 > self.positions.shape[2]:
            more = (self.layers, self.heads, GROWTH)
            self.positions = torch.cat([self.positions, torch.full(more, -1)], dim=2)
            if self.storing:
                self.mass = torch.cat([self.mass, torch.zeros(more)], dim=2)
        slot = (self.positions < 0).to(torch.uint8).argmax(-1, keepdim=True)
        self.positions.scatter_(2, slot, seen - 1)
        self.kept = [kept + 1 for kept in self.kept]
        keep = self._due(Phase.DECODE, seen)
        wanted = self.policy.statistics(Phase.DECODE).kind
        newest = None
        if self.storing or (keep is not None and wanted is Kind.WINDOW):
            newest = self._paid_by(seen - 1)
        if self.storing and newest is not None:
            self.mass.scatter_(2, slot, 0.0)
            self.mass = newest if self.numbers is not None else self.mass + newest
        if keep is not None:
            stored = {Kind.MASS: lambda: self.mass, Kind.WINDOW: lambda: newest, Kind.KEY_NORM: self._norms}
            self._cut(Phase.DECODE, seen, keep, stored[wanted]() if wanted in stored else None)

    def _paid_by(self, query: int) -> Tensor:
        """(L, H, S) float32: the attention that one decoded token's query pays to each slot, of what is left of it.

        A softmax over fewer keys gives the same weights, all larger by one factor. The trace's queries are those of the
        full cache, though: in a model without the evicted tokens all layers but the first would ask otherwise.
        """
        if self.numbers is not None:
            return self._at_slots(self.numbers)
        vectors = self.trace.vectors
        if vectors is None:  # the mean of a group is rescaled in place of each of its query heads
            return self._rescaled(torch.from_numpy(self.trace.mass[self.trace.step_of(query)]).unsqueeze(2))
        weights = torch.from_numpy(vectors.head_mass[query - self.trace.prompt])
        return self._rescaled(weights.view(self.layers, self.heads, -1, self.n))

    def _rescaled(self, weights: Tensor) -> Tensor:
        """Mean over G of weights (L, H, G, n), each row at the slots and as large as if nothing else were there."""
        empty = (self.positions < 0).unsqueeze(2)
        places = self.positions.clamp(min=0).unsqueeze(2).expand(-1, -1, weights.shape[2], -1)
        held = weights.gather(3, places).masked_fill(empty, 0.0)
        total, left = weights.sum(3, keepdim=True), held.sum(3, keepdim=True)
        if self.trace.model is not None and self.trace.model.softmax_sinks:
            factor = 1 / (left + (1 - total))  # the softmax's own sinks take their share from what is left, too
        else:
            factor = total / left
        return (held * factor).nan_to_num(nan=0.0, posinf=0.0).mean(2)

    # -- eviction ----------------------------------------------------------------------------------

    def _lengths(self, seen: int) -> list[Lengths]:
        return [
            Lengths(seen, kept, seen if budget is None else budget)
            for kept, budget in zip(self.kept, self.budgets, strict=True)
        ]

    def _due(self, phase: Phase, seen: int) -> list[int] | None:
        """Tokens each layer keeps now, or None if no layer has anything to lose."""
        due = [self.policy.due(phase, lengths) for lengths in self._lengths(seen)]
        if all(keep is None for keep in due):
            return None
        return [kept if keep is None else keep for kept, keep in zip(self.kept, due, strict=True)]

    def _cut(self, phase: Phase, seen: int, keep: list[int], statistic: Tensor | None) -> None:
        """Evict what the policy lets go."""
        positions = self.positions.to(torch.int32)
        view = LayerView(
            phase,
            positions,
            statistic,
            torch.full((self.layers, 1, 1), seen - 1, dtype=torch.int32),
            self.since,
            lambda: self._vectors("keys"),
            lambda: self._vectors("values"),
            self._expected if self.policy.statistics(phase).kind is Kind.QUERIES else None,
        )
        if self.scores is not None:
            self._remember(self.policy.score(view))
        stays = self.policy.select(view, self._lengths(seen), keep)
        layer, head, slot = (~stays & (self.positions >= 0)).nonzero(as_tuple=True)
        self.evicted[layer, head, self.positions[layer, head, slot]] = seen
        self.positions.masked_fill_(~stays, -1)
        self.kept = [min(kept, most) for kept, most in zip(self.kept, keep, strict=True)]
        if self.positions.shape[2] - max(self.kept) >= 2 * GROWTH:
            self._shrink()

    def _remember(self, scores: Tensor) -> None:
        assert self.scores is not None, "asked for"
        layer, head, slot = (self.positions >= 0).nonzero(as_tuple=True)
        self.scores[layer, head, self.positions[layer, head, slot]] = scores[layer, head, slot].float()

    def _shrink(self) -> None:
        """Leave out empty slots: a decode step takes time for each."""
        order = (self.positions < 0).to(torch.uint8).argsort(dim=-1, stable=True)[:, :, : max(self.kept)]
        self.positions = self.positions.gather(2, order)
        if self.storing:
            self.mass = self.mass.gather(2, order)

    # -- what policies look at ---------------------------------------------------------------------

    def _at_slots(self, values: Tensor) -> Tensor:
        """(L, H, n) values of tokens at their slots, 0 where a slot is empty."""
        return values.gather(2, self.positions.clamp(min=0)).masked_fill(self.positions < 0, 0.0)

    def _norms(self) -> Tensor:
        if self.trace.key_norm is None:
            self._refuse("the norms of keys", "kvwinnow record")
        return self._at_slots(torch.from_numpy(self.trace.key_norm))

    def _vectors(self, name: str) -> Tensor:
        vectors = self.trace.vectors
        if vectors is None:
            self._refuse(name, "kvwinnow record --vectors")
        every = torch.from_numpy(getattr(vectors, name))
        places = self.positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, every.shape[3])
        return every.gather(2, places).float()

    def _expected(self) -> Queries:
        facts = None if self.trace.vectors is None else self.trace.vectors.queries
        if facts is None and self.trace.vectors is not None:
            raise TraceError(
                f"how the model rotates its queries could not be found out when this trace was recorded, and "
                f"{self.policy.name} has to know it; take another policy"
            )
        if facts is None:
            self._refuse("the queries to come", "kvwinnow record --vectors")
        wanted = self.policy.statistics(Phase.PROMPT)
        return expected_queries(facts, self.trace.prompt, wanted.future, wanted.skip, self.policy.name)

    def _refuse(self, what: str, command: str) -> NoReturn:
        raise TraceError(
            f"{self.policy.name} scores by {what}, which this trace does not hold; record one that does with {command}"
        )


def expected_queries(facts: QueryFacts, prompt: int, future: int, skip: int, name: str) -> Queries:
    """The queries to come after a prompt, for each layer: (L, Hq, D) and (L, Hq, D, D), as the cache expects them.

    Raises:
        TraceError: more of the future, or of the prompt's start, is asked for than was recorded.
    """
    lead, futures = facts.lead.shape[2], facts.angles[0].shape[1]
    if future > futures:
        raise TraceError(f"{name} asks for {future} positions to come, and the trace holds {futures}; lower future")
    if skip > lead and facts.count:
        raise TraceError(f"{name} leaves the queries of {skip} tokens out, and the trace allows {lead}; lower sinks")
    means, covariances = [], []
    for layer, (table, interleaved) in enumerate(facts.tables):
        mean, products = (torch.from_numpy(x[layer : layer + 1]).clone() for x in (facts.mean, facts.products))
        moments = QueryMoments.of([facts.count], mean, products)
        first = torch.from_numpy(facts.lead[layer, :, skip:])
        if first.shape[1]:
            moments.add(0, first, skip, None)
        rope = _rope(facts.angles[table], prompt, interleaved) if facts.angles[table].shape[2] else None
        queries = moments.expected((prompt,), future, float(facts.scale[layer]), rope)
        means.append(queries.mean)
        covariances.append(queries.covariance)
    return Queries(torch.cat(means), torch.cat(covariances))


def _rope(table: Floats, prompt: int, interleaved: bool) -> Rope:
    cos, sin = torch.from_numpy(table)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        return cos[positions - prompt], sin[positions - prompt]

    return Rope(angles, interleaved)
