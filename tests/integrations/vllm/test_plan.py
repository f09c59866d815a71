"""The contract between vLLM's scheduler and its workers, against every token of a request one after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwinnow.integrations.vllm.plan import Cut, Plan, Terms, cuts, most_held, plan, readable_prefix, written_from
from kvwinnow.policies import Lengths, Phase, WholeBlocks, parse
from kvwinnow.statistics import Kind

POLICIES = (
    "streamingllm:sinks=2,evict_every={every}",
    "slidingwindow:evict_every={every}",
    "h2o:evict_every={every},sinks=1",
    "hybrid:evict_every={every},sinks=1",
    "tova:evict_every={every}",
    "snapkv:window=4,sinks=1,kernel=3",
    "compose:prompt=snapkv(window=3,sinks=0),decode=h2o(evict_every={every})",
    "compose:prompt=full,decode=streamingllm(evict_every={every},sinks=1)",
    "compose:prompt=h2o,decode=tova(evict_every={every})",
)
LONGEST = 160


@st.composite
def agreements(draw: st.DrawFn) -> Terms:
    """Terms small enough that 160 tokens meet many cuts."""
    text = draw(st.sampled_from(POLICIES)).format(every=draw(st.integers(1, 9)))
    budget = 5 + draw(st.integers(0, 30))
    policy = parse(f"{text},budget={budget}")
    between = budget + draw(st.integers(0, 20)) if draw(st.booleans()) else None
    block = draw(st.integers(1, 16))
    return Terms(WholeBlocks(policy, block), budget, draw(st.integers(1, 120)), block, between)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Terms, list[int]]:
    """Terms, and the numbers of tokens computed when the steps of a request end."""
    terms = draw(agreements())
    sizes = draw(st.lists(st.integers(1, draw(st.sampled_from([3, 10, 40]))), min_size=1, max_size=40))
    return terms, [stop for stop in itertools.accumulate(sizes) if stop <= LONGEST]


def steps(stops: list[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise([0, *stops])


def token_by_token(terms: Terms) -> Iterator[tuple[int, int]]:
    """Tokens computed and slots gone, one token a step, by the policy alone."""
    gone = 0
    for computed in range(1, LONGEST + 1):
        phase = Phase.PROMPT if computed <= terms.prompt else Phase.DECODE
        budget: int | None = terms.budget
        if computed < terms.prompt:
            budget = terms.prefill_budget
        if budget is not None:
            keep = terms.policy.due(phase, Lengths(computed, computed - gone, budget))
            gone = gone if keep is None else computed - keep
        yield computed, gone


@given(agreements())
def test_what_is_gone_is_what_the_policy_lets_go_of_token_by_token(terms: Terms) -> None:
    assert plan(terms, 0) == Plan(0, 0)
    for computed, gone in token_by_token(terms):
        assert plan(terms, computed).gone == gone


@given(agreements())
def test_whole_blocks_go_and_none_comes_back(terms: Terms) -> None:
    plans = [plan(terms, computed) for computed in range(LONGEST + 1)]
    for computed, now in enumerate(plans):
        assert now.gone % terms.block == 0
        assert 0 <= now.gone <= now.end <= computed
        assert (now.end == 0) == (now.gone == 0)
    assert all(a.gone <= b.gone and a.end <= b.end for a, b in itertools.pairwise(plans))


@given(histories())
def test_however_tokens_come_in_steps_the_cuts_lead_to_the_plan(history: tuple[Terms, list[int]]) -> None:
    """Chunks of a prompt, one token a step, and all at once where a request begins anew after a preemption."""
    terms, stops = history
    gone = at = 0
    for start, stop in steps(stops):
        assert plan(terms, start).gone == gone
        for cut in cuts(terms, start, stop):
            assert cut.before == gone < cut.after < cut.at
            assert start < cut.at <= stop
            assert at < cut.at
            assert cut.after % terms.block == 0
            assert cut.phase is (Phase.PROMPT if cut.at <= terms.prompt else Phase.DECODE)
            assert cut.budget == (terms.prefill_budget if cut.at < terms.prompt else terms.budget)
            assert cut.budget <= cut.at - cut.after < cut.budget + terms.block
            gone, at = cut.after, cut.at
        assert plan(terms, stop).gone == gone
        assert at <= plan(terms, stop).end or gone == 0


@given(histories())
def test_cuts_while_decoding_are_the_same_in_any_steps(history: tuple[Terms, list[int]]) -> None:
    terms, stops = history

    def made(found: Iterator[Cut]) -> list[tuple[int, int]]:
        return [(cut.at, cut.after) for cut in found if cut.at > terms.prompt]

    parts = [made(cuts(terms, start, stop)) for start, stop in steps(stops)]
    assert list(itertools.chain(*parts)) == made(cuts(terms, 0, stops[-1]))


@given(histories())
def test_no_step_holds_more_than_is_foretold(history: tuple[Terms, list[int]]) -> None:
    terms, stops = history
    chunk = max(stop - start for start, stop in steps(stops))
    for start, stop in steps(stops):
        blocks = math.ceil(stop / terms.block) - plan(terms, start).gone // terms.block
        for tokens in {stop, stops[-1]}:
            assert blocks <= math.ceil(most_held(terms, tokens, chunk) / terms.block)


@given(histories())
def test_no_cut_writes_to_a_block_that_may_be_shared(history: tuple[Terms, list[int]]) -> None:
    terms, stops = history
    first, found = written_from(terms), [cut for step in steps(stops) for cut in cuts(terms, *step)]
    if first is None:
        assert not found
    else:
        assert all(cut.after >= first for cut in found)
    shared = readable_prefix(terms)
    assert (shared is None) or shared % terms.block == 0
    assert first is None or (shared is not None and shared <= first)


@given(agreements())
def test_the_first_block_written_to_is_the_first_cut_s(terms: Terms) -> None:
    found = list(cuts(terms, 0, 10 * LONGEST))
    if terms.prefill_budget is None:
        assert written_from(terms) == (found[0].after if found else None)


@given(agreements())
def test_queries_that_the_policy_measures_are_never_read_from_the_prefix_cache(terms: Terms) -> None:
    shared, measured = readable_prefix(terms), terms.policy.statistics(Phase.PROMPT)
    if Kind.MASS in terms.policy.running():  # the sums lie beside the slots, so nobody else may write them
        assert shared == 0
    cut_at_its_end = any(cut.at == terms.prompt for cut in cuts(terms, 0, terms.prompt))
    if measured.kind is Kind.WINDOW and cut_at_its_end:
        assert shared is not None
        assert shared <= max(0, terms.prompt - measured.window)


def test_without_terms_nothing_goes_and_all_may_be_shared() -> None:
    assert plan(None, 12345) == Plan(0, 0)
    assert written_from(None) is None
    assert readable_prefix(None) is None


@pytest.mark.parametrize(
    ("policy", "prompt", "block", "gone"),
    [
        ("snapkv:budget=256", 1817, 32, 1536),
        ("snapkv:budget=256", 1817, 16, 1552),
        ("snapkv:budget=256", 287, 32, 0),
        ("snapkv:budget=256", 288, 32, 32),
        ("streamingllm:budget=1024", 100_000, 16, 98_976),
    ],
)
def test_a_prompt_keeps_its_budget_and_less_than_a_block_more(policy: str, prompt: int, block: int, gone: int) -> None:
    parsed = parse(policy)
    assert isinstance(parsed.limit, int)
    terms = Terms(WholeBlocks(parsed, block), parsed.limit, prompt, block)
    assert plan(terms, prompt - 1) == Plan(0, 0)
    assert plan(terms, prompt) == Plan(gone, prompt if gone else 0)
    assert [cut.after for cut in cuts(terms, 0, prompt)] == ([gone] if gone else [])
    assert written_from(terms) in (gone, gone or None, 32)


def test_decoding_cuts_each_time_that_its_slack_is_full() -> None:
    terms = Terms(WholeBlocks(parse("h2o:budget=256,evict_every=40"), 32), 256, 1817, 32)
    # 281 tokens stay; the slack of 40 tokens is two blocks, so a head is cut at 320 tokens, back to 256.
    found = list(cuts(terms, 1817, 2000))
    assert [(cut.at, cut.before, cut.after) for cut in found] == [
        (1856, 1536, 1600),
        (1920, 1600, 1664),
        (1984, 1664, 1728),
    ]
    assert plan(terms, 2_000_000).gone == 2_000_000 - 256 - (2_000_000 - 1856) % 64
