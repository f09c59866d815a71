"""How much of the attention that the full cache paid is still reachable. Needs no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvwinnow.errors import TraceError
from kvwinnow.simulation.trace import Trace

FEW_QUERIES = 16
"""Under as many, the attention retained says little of other questions."""


def few_queries(trace: Trace) -> str | None:
    """A sentence, without its full stop, on a trace after whose prompt too few tokens came; None: there are enough."""
    count = len(trace.tokens) - trace.prompt
    if not trace.prompt or count >= FEW_QUERIES:
        return None
    if not count:
        said = "no token was decoded after the prompt, so there is no retained attention to measure"
    elif count == 1:
        said = "only 1 token was decoded after the prompt, so retained attention is that of 1 query"
    else:
        said = f"only {count} tokens were decoded after the prompt, so retained attention is that of {count} queries"
    return (
        f"{said}; end the text with a question or an instruction, and let at least {FEW_QUERIES} new tokens be "
        "generated"
    )


def retained_mass(trace: Trace, evicted: NDArray[np.int32]) -> NDArray[np.float64]:
    """The share of the attention of the full cache's later queries that lies on tokens still held when they come.

    Later queries are those after the trace's prompt, or all of them where it has none. 1 means that nothing they looked
    at was gone.

    Args:
        trace: the full cache's attention.
        evicted: (L, H, n) int32, for each token how many tokens had come when it was evicted, as ``Simulation`` has it.

    Returns:
        (L, H) float64, in [0, 1].

    Raises:
        TraceError: no query comes after the prompt.
    """
    n = len(trace.tokens)
    if trace.prompt == n:
        raise TraceError(
            "no query comes after this trace's prompt, so nobody asks for what was kept; record new tokens"
        )
    shape = trace.mass.shape[1:3]
    held, paid = np.zeros(shape), np.zeros(shape)
    for query in range(trace.prompt, n):
        count = query + 1
        weights = trace.mass[0 if trace.fixed else trace.step_of(query), :, :, :count]
        paid += weights.sum(2, dtype=np.float64)
        held += np.where(evicted[:, :, :count] > query, weights, 0).sum(2, dtype=np.float64)
    return np.divide(held, paid, out=np.ones(shape), where=paid > 0)
