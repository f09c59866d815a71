"""The one contract between scheduler and worker: how many slots of a request are gone after so many tokens.

Slots [0, gone) are given back to the pool in whole blocks, [gone, end) hold the tokens that were kept at the last cut,
and the slots after that hold their tokens as they came. Both sides compute this for themselves from what they know
anyway, so no message passes between them, and a request that is replayed after a preemption meets the same cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from kvwinnow.policies import Lengths, Phase
from kvwinnow.policies.whole_blocks import WholeBlocks
from kvwinnow.statistics import Kind

FAR = 2**31
"""More tokens than any request has."""


@dataclass(frozen=True)
class Terms:
    """What was agreed for one request.

    Attributes:
        policy: evicts whole blocks.
        budget: tokens each KV head holds after a cut, block - 1 more at most.
        prompt: tokens of the prompt.
        block: tokens of a block.
        prefill_budget: tokens each KV head holds between chunks of the prompt; None: no cut before its end.
    """

    policy: WholeBlocks
    budget: int
    prompt: int
    block: int
    prefill_budget: int | None = None


@dataclass(frozen=True)
class Plan:
    """Where a request stands.

    Attributes:
        gone: slots [0, gone) have been given back, whole blocks.
        end: slots [gone, end) hold the tokens kept at the last cut, the slots from ``end`` on one token each in order;
            0 without a cut.
    """

    gone: int = 0
    end: int = 0


@dataclass(frozen=True)
class Cut:
    """One cut.

    Attributes:
        at: tokens computed when it happens.
        before: slots gone before.
        after: slots gone after it.
        phase: which of the policy's two it is.
        budget: tokens that may stay.
    """

    at: int
    before: int
    after: int
    phase: Phase
    budget: int


def plan(terms: Terms | None, computed: int) -> Plan:
    """Where a request stands once ``computed`` tokens have been computed. Pure."""
    if terms is None:
        return Plan()
    if computed < terms.prompt:
        gone = _between(terms, computed)
        return Plan(gone, computed if gone else 0)
    start = _prompt_gone(terms)
    now = Plan(start, terms.prompt if start else 0)
    first = _next_cut(terms, start, terms.prompt)
    if first is None or computed < first.at:
        return now
    second = _next_cut(terms, first.after, first.at)
    assert second is not None, "a policy that evicts while decoding goes on doing so"
    if computed < second.at:
        return Plan(first.after, first.at)
    # From the second cut on each is like the one before.
    period = second.after - first.after
    more = (computed - second.at) // period
    return Plan(second.after + more * period, second.at + more * period)


def cuts(terms: Terms, start: int, stop: int) -> Iterator[Cut]:
    """The cuts that happen while the tokens from ``start`` to ``stop`` are computed in one step, in order."""
    gone = plan(terms, start).gone
    if stop < terms.prompt:
        after = _between(terms, stop)
        if after > gone:
            assert terms.prefill_budget is not None
            yield Cut(stop, gone, after, Phase.PROMPT, terms.prefill_budget)
        return
    if start < terms.prompt:
        after = _prompt_gone(terms)
        if after > gone:
            yield Cut(terms.prompt, gone, after, Phase.PROMPT, terms.budget)
        gone = after
    while (cut := _next_cut(terms, gone, max(start, terms.prompt))) is not None and cut.at <= stop:
        yield cut
        gone = cut.after


def written_from(terms: Terms | None) -> int | None:
    """The first slot that a cut ever writes to, so that blocks before it may be shared; None: none is written to."""
    if terms is None:
        return None
    if terms.prefill_budget is not None:
        return 0
    gone = _prompt_gone(terms)
    if gone:
        return gone
    first = _next_cut(terms, 0, terms.prompt)
    return None if first is None else first.after


def readable_prefix(terms: Terms | None) -> int | None:
    """Tokens at the start of a prompt that may come from the prefix cache, whole blocks; None: any number.

    Blocks that a cut writes to are nobody else's. Nor are those of a policy that sums up attention: the sums lie beside
    the slots, and what no query of this request's own has looked at is not in them. A window is observed by queries
    that are computed.
    """
    if terms is None:
        return None
    if Kind.MASS in terms.policy.running():
        return 0
    limit = written_from(terms)
    if observes(terms):
        seen = max(0, terms.prompt - terms.policy.statistics(Phase.PROMPT).window)
        limit = seen if limit is None else min(limit, seen)
    return None if limit is None else limit // terms.block * terms.block


def observes(terms: Terms) -> bool:
    """Whether the queries at the end of the prompt are looked at: by a cut, or by sums that start from them."""
    if terms.policy.statistics(Phase.PROMPT).kind is not Kind.WINDOW:
        return False
    return terms.prefill_budget is not None or Kind.MASS in terms.policy.running() or _prompt_gone(terms) > 0


def cuts_while_decoding(terms: Terms) -> bool:
    """Whether what one cut leaves will be cut again while tokens are decoded."""
    return _trigger(terms.policy, terms.budget) is not None


def most_held(terms: Terms, tokens: int, chunk: int) -> int:
    """Slots a request of that many tokens ever needs at once, when a step computes ``chunk`` tokens at most."""
    trigger = _trigger(terms.policy, terms.budget)
    decoded = terms.budget + max(0, tokens - terms.prompt) if trigger is None else trigger
    prompt = min(terms.prompt, tokens)
    between = terms.prefill_budget
    if between is not None and terms.policy.due(Phase.PROMPT, Lengths(FAR, FAR, between)) is not None:
        prompt = between
    return min(tokens, max(prompt, decoded) + chunk + 2 * terms.block)


def _between(terms: Terms, computed: int) -> int:
    """Slots gone when a chunk ends before the prompt does."""
    budget = terms.prefill_budget
    if budget is None:
        return 0
    keep = terms.policy.due(Phase.PROMPT, Lengths(computed, computed, budget))
    return 0 if keep is None else computed - keep


def _prompt_gone(terms: Terms) -> int:
    """Slots gone when the prompt ends."""
    keep = terms.policy.due(Phase.PROMPT, Lengths(terms.prompt, terms.prompt, terms.budget))
    return 0 if keep is None else terms.prompt - keep


def _next_cut(terms: Terms, gone: int, computed: int) -> Cut | None:
    """The next cut while decoding; None: there is none."""
    trigger = _trigger(terms.policy, terms.budget)
    if trigger is None:
        return None
    at = max(computed + 1, gone + trigger)
    keep = terms.policy.due(Phase.DECODE, Lengths(at, at - gone, terms.budget))
    assert keep is not None, "due from the trigger on"
    return Cut(at, gone, at - keep, Phase.DECODE, terms.budget)


@functools.lru_cache(maxsize=4096)
def _trigger(policy: WholeBlocks, budget: int) -> int | None:
    """The fewest tokens held at which a decode step cuts; None: none does."""

    def due(kept: int) -> bool:
        return policy.due(Phase.DECODE, Lengths(kept, kept, budget)) is not None

    if not due(FAR):
        return None
    low, high = budget + 1, FAR
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if due(middle) else (middle + 1, high)
    return low
