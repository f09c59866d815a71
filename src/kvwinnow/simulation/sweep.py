"""Policies over budgets: how much attention still finds its token, and what that takes in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvwinnow.cache.memory import layers_nbytes
from kvwinnow.errors import KvwinnowError, PolicyError, TraceError
from kvwinnow.policies import POLICIES, Policy, parse
from kvwinnow.simulation.retained import retained_mass
from kvwinnow.simulation.run import planned_layers, simulate
from kvwinnow.simulation.trace import Trace
from kvwinnow.textform import given_to_nested

_STEPS = 24
"""Budgets of one sweep, at most."""

Progress = Callable[[int, int, str], None]
"""Told before each simulation how many are done, of how many, and which comes."""


@dataclass(frozen=True)
class Point:
    """One policy at one budget.

    Attributes:
        name: the policy's text without its budget.
        budget: tokens or share of the prompt; None: the policy has none.
        tokens: that a KV head holds in the end, mean over layers and KV heads.
        nbytes: that the cache of all layers takes in the end, in the model's dtype; None: the trace is of no model.
        retained: share of the later queries' attention that is still reachable, mean over layers and KV heads.
    """

    name: str
    budget: int | float | None
    tokens: float
    nbytes: int | None
    retained: float


@dataclass(frozen=True)
class Sweep:
    """What came of a sweep.

    Attributes:
        budgets: those asked for.
        points: in the order of policies, then budgets.
        left_out: why, for policies that could be simulated at none of the budgets; at single ones they may be missing,
            since a budget can be too small for what a policy protects.
    """

    budgets: tuple[int | float, ...]
    points: list[Point] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "budgets": list(self.budgets),
            "points": [vars(point) for point in self.points],
            "left_out": self.left_out,
        }


def parse_sweep(text: str) -> tuple[int | float, ...]:
    """The budgets in ``budget=64..4096`` (doubling) or ``budget=64,256,0.25``.

    Raises:
        PolicyError: it is neither, or too long.
    """
    name, _, values = (part.strip() for part in text.partition("="))
    if name != "budget" or not values:
        raise PolicyError(f"sweep {text!r} is none; write budget=64..4096, whose steps double, or budget=64,256,0.25")
    match = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", values)
    budgets: list[int | float] = []
    if match:
        first, last = int(match[1]), int(match[2])
        if not 0 < first <= last:
            raise PolicyError(f"sweep {text!r} goes from {first} to {last}; the first is 1 or more, the last not less")
        while first < last:
            budgets.append(first)
            first *= 2
        budgets.append(last)
    else:
        budgets = [_budget(value.strip(), text) for value in values.split(",")]
    if len(set(budgets)) > _STEPS:
        raise PolicyError(f"sweep {text!r} has {len(set(budgets))} budgets, and {_STEPS} are served; take fewer")
    return tuple(dict.fromkeys(budgets))


def _budget(value: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            budget = kind(value)
        except ValueError:
            continue
        if (kind is int and budget >= 1) or (kind is float and 0 < budget <= 1):
            return budget
    if re.fullmatch(r"[\d.]+ ?[kmgt]?i?b", value, flags=re.IGNORECASE):
        raise PolicyError(
            f"sweep {text!r}: {value!r} is a size, and a sweep takes tokens (64) or shares of the prompt (0.25) and no "
            "sizes; its table tells what each takes in memory"
        )
    raise PolicyError(f"sweep {text!r}: {value!r} is no budget; write tokens (64) or a share of the prompt (0.25)")


def with_budget(spec: str, budget: int | float | str) -> Policy:
    """The policy of that text, which names no budget, at a budget; one without budgets as it is.

    Raises:
        PolicyError: the text is no policy, names a budget too, or the policy refuses this one.
    """
    if parse(spec.partition(":")[0]).limit is None:
        return parse(spec)
    if isinstance(budget, str) and not re.fullmatch(r"[^,=()]+", budget):  # it would be read as further parameters
        raise PolicyError(
            f"budget {budget!r} is none; write tokens (64), a share of the prompt (0.25) or a size (64MiB)"
        )
    if given_to_nested(POLICIES[spec.partition(":")[0].strip().lower()]) is not None:
        return parse(f"{spec}{',' if ':' in spec else ':'}budget={budget}")
    # The budget is that of the policy within.
    if re.search(r"\bbudget\s*=", spec):
        raise PolicyError(f"policy {spec!r} names a budget, so it is given twice, there and as {budget}; give it once")
    return parse(spec, budget=parse(f"slidingwindow:budget={budget}").limit)


def sweep(
    trace: Trace,
    budgets: tuple[int | float, ...],
    specs: Sequence[str] = tuple(POLICIES),
    *,
    place: tuple[int | None, int | None] = (None, None),
    progress: Progress | None = None,
) -> Sweep:
    """Simulate policies at budgets.

    Args:
        trace: what to replay; some of its tokens come after its prompt.
        budgets: tokens or shares of the prompt.
        specs: policies in text without a budget; all of them unless told.
        place: index of a layer in the trace, and a KV head, to look at alone; None: the mean over all.
        progress: called before each simulation.

    Raises:
        TraceError: no query of the trace comes after its prompt.
        PolicyError: a text is no policy.
    """
    if trace.prompt == len(trace.tokens):
        raise TraceError("no query comes after this trace's prompt, so nothing is asked of what was kept; record more")
    for spec in specs:
        with_budget(spec, 2**20)
    found = Sweep(budgets)
    layer, head = (slice(None) if index is None else slice(index, index + 1) for index in place)
    every = {spec: (None,) if parse(spec).limit is None else budgets for spec in specs}
    done, total = 0, sum(map(len, every.values()))
    for spec, own in every.items():
        reasons = []
        for budget in own:
            if progress is not None:
                progress(done, total, spec if budget is None else f"{spec}, budget {budget}")
            done += 1
            try:
                policy = parse(spec) if budget is None else with_budget(spec, budget)
                simulation = simulate(trace, policy)
            except PolicyError as error:  # too small a budget; others may do
                reasons.append(str(error))
                continue
            except KvwinnowError as error:  # what the trace lacks, it lacks at every budget where something is cut
                found.left_out[spec] = str(error)
                break
            retained = retained_mass(trace, simulation.evicted)[layer, head]
            held = simulation.held()[layer, head].sum(2)
            found.points.append(
                Point(spec, budget, float(np.mean(held)), nbytes_after(trace, policy), float(np.mean(retained)))
            )
        if len(reasons) == len(own):
            found.left_out[spec] = reasons[-1]  # of the largest budget, which is not too small if any is not
    found.points[:] = [point for point in found.points if point.name not in found.left_out]
    return found


def nbytes_after(trace: Trace, policy: Policy) -> int | None:
    """Bytes that a cache of the trace's model holds after the trace's last token; None: it is of no model."""
    if trace.model is None or not trace.prompt:
        return None
    planned = planned_layers(trace, policy)
    new = len(trace.tokens) - trace.prompt
    return sum(layers_nbytes(policy, planned, batch=1, prompt=trace.prompt, new=new))
