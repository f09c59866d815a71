"""What one KV head holds after each arrival, and why: as plain data, for terminals and for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvwinnow.errors import TraceError
from kvwinnow.policies import SlidingWindow, WholeBlocks
from kvwinnow.simulation.run import Simulation
from kvwinnow.simulation.trace import Trace

SINK, HEAVY, WINDOW, KEPT = "sink", "heavy", "window", "kept"


@dataclass(frozen=True)
class State:
    """One KV head once a number of tokens have come, after evictions.

    Attributes:
        seen: how many have come.
        first: position of the first token that came since the state before.
        roles: for each position held, in order: "sink" (protected as one of the first), "window" (among the latest),
            "heavy" (kept for its score); "kept" under a policy without a limit, which scores nothing.
        evicted: positions evicted since the state before.
    """

    seen: int
    first: int
    roles: dict[int, str]
    evicted: tuple[int, ...]

    def count(self, role: str) -> int:
        """How many tokens are held in that role."""
        return sum(own == role for own in self.roles.values())


@dataclass(frozen=True)
class Head:
    """One KV head of a simulation.

    Attributes:
        simulation: it.
        number: the layer's number in the model.
        head: the KV head.
    """

    simulation: Simulation
    number: int
    head: int

    def __post_init__(self) -> None:
        trace = self.trace
        if self.number not in trace.layers:
            raise TraceError(
                f"layer {self.number} is none of the trace's layers {_listed(trace.layers)}; layers with a window of "
                "their own are not recorded"
                if trace.model is not None
                else f"layer {self.number} is not in this trace, which has one layer, 0"
            )
        if not 0 <= self.head < trace.kv_heads:
            raise TraceError(f"head {self.head} is none of the trace's KV heads 0 to {trace.kv_heads - 1}")

    @property
    def trace(self) -> Trace:
        """The trace."""
        return self.simulation.trace

    @property
    def arrivals(self) -> list[int]:
        """How many tokens have come at each moment: the prompt as one, then each token."""
        return list(range(max(1, self.trace.prompt), len(self.trace.tokens) + 1))

    def state(self, seen: int, before: int = 0) -> State:
        """The state once ``seen`` tokens have come, and what was evicted since there were ``before``."""
        row = self.trace.layers.index(self.number)
        budget = self.simulation.budgets[row]
        policy = self.simulation.policy
        sinks, recent = policy.protected(seen if budget is None else budget)
        chooser = policy.policy if isinstance(policy, WholeBlocks) else policy
        if isinstance(chooser, SlidingWindow):  # its score is how recent a token is
            recent = seen
        evicted = self.simulation.evicted[row, self.head]
        held = np.flatnonzero(self.simulation.held(seen)[row, self.head]).tolist()
        roles = {p: SINK if p < sinks else WINDOW if p >= seen - recent else HEAVY for p in held}
        if policy.limit is None:
            roles = dict.fromkeys(held, KEPT)
        gone = np.flatnonzero((evicted > before) & (evicted <= seen)).tolist()
        return State(seen, before, roles, tuple(gone))

    def score(self, position: int) -> float | None:
        """The token's score when the policy last had to choose; None: it never had to, or nothing was remembered."""
        if self.simulation.scores is None:
            return None
        score = float(self.simulation.scores[self.trace.layers.index(self.number), self.head, position])
        return float(f"{score:.6g}") if math.isfinite(score) else None

    def states(self, moments: list[int]) -> Iterator[State]:
        """The states at these moments, each with what was evicted since the one before."""
        for before, seen in zip([0, *moments], moments, strict=False):
            yield self.state(seen, before)

    def as_json(self, *, quiet: bool) -> dict[str, Any]:
        """The whole simulation as plain data: each arrival with its evictions, and the final state."""
        trace = self.trace
        final = self.state(len(trace.tokens))
        told: dict[str, Any] = {
            "policy": str(self.simulation.policy),
            "budget": self.simulation.budgets[trace.layers.index(self.number)],
            "layer": self.number,
            "head": self.head,
            "tokens": list(trace.tokens),
            "prompt": trace.prompt,
            "scores": [self.score(position) for position in range(len(trace.tokens))],
        }
        if not quiet:
            told["arrivals"] = [
                {"seen": state.seen, "held": len(state.roles), "evicted": list(state.evicted)}
                for state in self.states(self.arrivals)
            ]
        return told | {"held": [{"position": p, "role": role} for p, role in final.roles.items()]}


def ranges(positions: list[int]) -> str:
    """Positions in ascending order as text: 0-3, 7, 9-12."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _listed(layers: tuple[int, ...]) -> str:
    return ranges(list(layers))
