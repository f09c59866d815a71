"""A replay keeps exactly what a real cache keeps, and what the definitions say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwinnow import CompressedCache
from kvwinnow.errors import KvwinnowError, PolicyError, TraceError
from kvwinnow.policies import POLICIES, parse
from kvwinnow.simulation.record import record
from kvwinnow.simulation.retained import retained_mass
from kvwinnow.simulation.run import NEVER, Simulation, simulate
from kvwinnow.simulation.trace import Trace, demo, demo_rows, from_numbers, from_rows
from tests.models import KINDS as EVERY_KIND
from tests.models import shown, tiny_model, tiny_tokens
from tests.running import FULL_WIDTH, IN_BLOCKS, held, logits

PROMPT, NEW = 60, 12

REPLAYED = {
    **FULL_WIDTH,
    "pyramid": "pyramidkv:budget=24,window=8,kernel=3,beta=4",
    "tova-slack": "tova:budget=24,sinks=2,evict_every=5",
    "h2o-age": "h2o:budget=24,normalize=age",
    "share": "h2o:budget=0.3",
    "expected-bare": "expectedattention:budget=24,sinks=0,future=16,covariance=false",
    "whole-prompt": "compose:budget=24,prompt=full,decode=hybrid",
    "compose-knorm": "compose:budget=24,prompt=knorm,decode=h2o",
    "compose-expected": "compose:budget=24,prompt=expectedattention(future=16),decode=tova",
    "compose-pyramid": "compose:budget=24,prompt=pyramidkv(window=4,kernel=3),decode=h2o",
    **IN_BLOCKS,
    "blocks-pyramid": "blocks:policy=pyramidkv(budget=24,window=8,kernel=3,beta=4),multiple_of=8",
    "compose-tova": "compose:budget=24,prompt=tova,decode=hybrid(normalize=age)",
}

KINDS = {
    "llama": {},  # groups of two query heads
    "gpt2": {},  # no rotation
    "gpt_neox": {},  # a part of each head is rotated
    "falcon": {},  # one KV head
    "gemma2": {"layers": 4},  # soft-capped; layers 0 and 2 have a window
    "gpt_oss": {"layers": 4},  # sinks in the softmax; layers 0 and 2 have a window
}

_recorded: dict[tuple[str, int], tuple[Any, Trace]] = {}


def recorded(kind: str, prompt: int = PROMPT, new: int = NEW) -> tuple[Any, Trace]:
    """A model and its trace of a random prompt."""
    if (kind, prompt) not in _recorded:
        model = tiny_model(kind, **KINDS.get(kind, {}))
        trace = record(model, tiny_tokens(prompt, seed=prompt)[0], new_tokens=new, vectors=True)
        _recorded[kind, prompt] = model, trace
    return _recorded[kind, prompt]


def kept(simulation: Simulation, seen: int, layer: int, head: int) -> list[int]:
    return np.flatnonzero(simulation.held(seen)[layer, head]).tolist()


def test_every_policy_is_replayed() -> None:
    assert {parse(text).name for text in REPLAYED.values()} == set(POLICIES)


@pytest.mark.parametrize("kind", KINDS, ids=shown)
@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_keeps_what_a_real_cache_keeps(kind: str, name: str) -> None:
    check_replay(*recorded(kind), REPLAYED[name])


@pytest.mark.parametrize("prompt", [1, 10, 24])
@pytest.mark.parametrize("name", REPLAYED)
def test_prompts_within_the_budget_are_replayed_alike(prompt: int, name: str) -> None:
    check_replay(*recorded("llama", prompt, 34 - prompt), REPLAYED[name])


ALL_SLIDE = ("mistral, sliding", "phi3, sliding")


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind not in (*KINDS, *ALL_SLIDE)], ids=shown)
def test_every_family_can_be_recorded_and_replayed(kind: str) -> None:
    model, trace = recorded(kind, 40, 4)
    for name in ("h2o", "keydiff", "expected"):
        check_replay(model, trace, REPLAYED[name])


def check_replay(model: Any, trace: Trace, spec: str) -> None:
    """A replay and a real cache hold the same after the prompt, and in the first layer after each further token."""
    policy = parse(spec)
    simulation = simulate(trace, policy)
    ids = torch.tensor([[int(token) for token in trace.tokens]])
    cache = CompressedCache(model, policy)
    logits(model, ids[:, : trace.prompt], cache)
    for number, layer in enumerate(trace.layers):
        for head in range(trace.kv_heads):
            assert kept(simulation, trace.prompt, number, head) == held(cache, layer, head=head)
    for seen in range(trace.prompt + 1, len(trace.tokens) + 1):
        logits(model, ids[:, seen - 1 : seen], cache)
        for head in range(trace.kv_heads):
            # Deeper layers of the real cache ask other questions, since tokens are gone below them.
            assert kept(simulation, seen, 0, head) == held(cache, trace.layers[0], head=head)


def test_a_budget_in_bytes_is_that_of_the_real_cache() -> None:
    model, trace = recorded("gemma2")
    policy = parse("tova:budget=24KiB")
    cache = CompressedCache(model, policy)
    logits(model, torch.tensor([[int(token) for token in trace.tokens[:PROMPT]]]), cache)
    assert set(simulate(trace, policy).budgets) == {len(held(cache, 1))}
    assert kept(simulate(trace, policy), PROMPT, 1, 1) == held(cache, 3, head=1)


def test_without_vectors_policies_of_sums_are_replayed_the_same_after_the_prompt() -> None:
    _, trace = recorded("llama")
    for name in ("h2o", "snapkv", "pyramid", "tova", "knorm", "compose", "hybrid", "streaming", "window", "full"):
        policy = parse(REPLAYED[name])
        with_vectors, without = simulate(trace, policy), simulate(replace(trace, vectors=None), policy)
        np.testing.assert_array_equal(with_vectors.held(PROMPT), without.held(PROMPT))
        assert (without.held().sum(2) == with_vectors.held().sum(2)).all()


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("keydiff:budget=24", "keydiff scores by keys, which this trace does not hold.*--vectors"),
        ("expectedattention:budget=24", "scores by the queries to come.*--vectors"),
    ],
)
def test_what_a_trace_without_vectors_cannot_do_is_refused(policy: str, sentence: str) -> None:
    _, trace = recorded("llama")
    with pytest.raises(TraceError, match=sentence):
        simulate(replace(trace, vectors=None), parse(policy))


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("knorm:budget=4", "knorm scores by the norms of keys.*kvwinnow record"),
        ("keydiff:budget=4", "--vectors"),
        ("h2o:budget=0.5", "share of the prompt, and this trace has none"),
        ("h2o:budget=64MiB", "not recorded from a model"),
    ],
)
def test_what_a_trace_of_text_cannot_do_is_refused(policy: str, sentence: str) -> None:
    for trace in (demo(), demo_rows()):
        with pytest.raises(KvwinnowError, match=sentence):
            simulate(trace, parse(policy))


def test_what_was_not_recorded_is_refused() -> None:
    _, trace = recorded("llama")
    with pytest.raises(TraceError, match="window of 5 queries"):
        simulate(trace, parse("snapkv:budget=24,window=5"))
    with pytest.raises(TraceError, match="asks for 2000 positions to come, and the trace holds 1024"):
        simulate(trace, parse("expectedattention:budget=24,future=2000"))
    with pytest.raises(TraceError, match="queries of 20 tokens out, and the trace allows 16"):
        simulate(trace, parse("expectedattention:budget=24,sinks=20"))
    assert trace.vectors is not None
    unknown = replace(trace, vectors=replace(trace.vectors, queries=None))
    with pytest.raises(TraceError, match="could not be found out"):
        simulate(unknown, parse("expectedattention:budget=24"))


# -- streams of numbers ----------------------------------------------------------------------------


def test_the_seeds_stream_keeps_what_it_must() -> None:
    simulation = simulate(demo(), parse("hybrid:budget=6,sinks=2"))
    states = [set(kept(simulation, seen, 0, 0)) for seen in range(1, 9)]
    assert states[:6] == [set(range(seen)) for seen in range(1, 7)]
    assert states[6] == {0, 1, 2, 3, 5, 6}
    assert states[7] == {0, 1, 3, 5, 6, 7}


def test_the_seeds_stream_as_a_prompt() -> None:
    # The heavy hitters of 2, 3, 4 and 5 (0.10, 0.90, 0.05, 0.20) are 3 and 5; 0 and 1 are sinks, 6 and 7 the window.
    simulation = simulate(replace(demo(), prompt=8), parse("hybrid:budget=6,sinks=2"))
    assert kept(simulation, 8, 0, 0) == [0, 1, 3, 5, 6, 7]


def test_a_number_is_the_statistic_and_is_not_summed() -> None:
    # By sums, the 0.5 of token 0 would be over 2 after five queries; as it is, 0.6 and 0.7 are more.
    trace = from_numbers(("a", "b", "c", "d", "e"), [0.5, 0.6, 0.1, 0.7, 0.2])
    assert kept(simulate(trace, parse("h2o:budget=2,recent=0")), 5, 0, 0) == [1, 3]


def test_scores_are_the_policys() -> None:
    simulation = simulate(demo(), parse("hybrid:budget=6,sinks=2"), scores=True)
    assert simulation.scores is not None
    np.testing.assert_allclose(
        simulation.scores[0, 0], np.array([0.95, 0.85, 0.10, 0.90, 0.05, 0.20, 0.15, 0.75], dtype=np.float32)
    )
    untouched = simulate(demo(), parse("hybrid:budget=8,sinks=2"), scores=True)
    assert untouched.scores is not None
    assert np.isnan(untouched.scores).all()


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    simulate(demo(), parse("full"), progress=lambda done, total: told.append((done, total)))
    assert told == [(seen, 8) for seen in range(1, 9)]


# -- random matrices -------------------------------------------------------------------------------


@st.composite
def matrices(draw: st.DrawFn) -> Trace:
    """A causal attention matrix of a few tokens, far from flat."""
    n = draw(st.integers(1, 24))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for query in range(n):
        weights = np.exp(2 * generator.standard_normal(query + 1))
        rows.append((weights / weights.sum()).tolist())
    return from_rows(tuple("x" * n), rows, draw(st.integers(0, n)))


def h2o_by_hand(trace: Trace, budget: int, sinks: int, recent: int) -> list[set[int]]:
    """What H2O holds after the prompt and after each further token, in float64 and plain loops."""
    rows = trace.mass[:, 0, 0].astype(np.float64)
    mass, there, states = np.zeros(len(trace.tokens)), set[int](), []

    def cut(seen: int) -> None:
        safe = {p for p in there if p < sinks or p > seen - 1 - recent}
        rest = sorted(there - safe, key=lambda p: (-mass[p], p))
        there.intersection_update(safe | set(rest[: max(0, budget - len(safe))]))

    if trace.prompt:
        mass += rows[: trace.prompt].sum(0)
        there |= set(range(trace.prompt))
        cut(trace.prompt)
        states.append(set(there))
    for query in range(trace.prompt, len(trace.tokens)):
        there.add(query)
        total = sum(rows[query][p] for p in there)
        for p in there:
            mass[p] += rows[query][p] / total
        if len(there) > budget:
            cut(query + 1)
        states.append(set(there))
    return states


@given(matrices(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 6))
def test_h2o_is_its_definition(trace: Trace, sinks: int, recent: int, more: int) -> None:
    budget = max(1, sinks + recent) + more
    simulation = simulate(trace, parse(f"h2o:budget={budget},sinks={sinks},recent={recent}"))
    expected = h2o_by_hand(trace, budget, sinks, recent)
    moments = [*([trace.prompt] if trace.prompt else []), *range(trace.prompt + 1, len(trace.tokens) + 1)]
    for seen, there in zip(moments, expected, strict=True):
        assert set(kept(simulation, seen, 0, 0)) == there


GUARDED = ["h2o:sinks=2,recent=3", "hybrid:sinks=2", "tova:sinks=2,recent=3", "streamingllm:sinks=2", "slidingwindow"]


@given(matrices(), st.sampled_from(GUARDED), st.integers(6, 12), st.integers(1, 4))
def test_budgets_hold_and_what_is_protected_stays(trace: Trace, spec: str, budget: int, every: int) -> None:
    policy = parse(f"{spec}{',' if ':' in spec else ':'}budget={budget},evict_every={every}")
    simulation = simulate(trace, policy)
    sinks, recent = policy.protected(budget)
    for seen in range(max(1, trace.prompt), len(trace.tokens) + 1):
        there = kept(simulation, seen, 0, 0)
        slack = 0 if seen == trace.prompt else every - 1
        assert len(there) <= budget + slack
        assert seen < budget or len(there) >= budget
        assert set(range(min(sinks, seen))) <= set(there)
        assert set(range(max(0, seen - recent), seen)) <= set(there)
        assert seen - 1 in there or policy.name == "h2o"


@given(matrices(), st.sampled_from(["h2o", "hybrid", "tova", "snapkv:window=2,kernel=3", "streamingllm"]))
def test_a_budget_of_all_tokens_keeps_all(trace: Trace, spec: str) -> None:
    budget = max(8, len(trace.tokens))
    policy = parse(f"{spec}{',' if ':' in spec else ':'}budget={budget}")
    assert (simulate(trace, policy).evicted == NEVER).all()


@given(matrices(), st.integers(1, 4), st.integers(5, 12))
def test_snapkv_cuts_the_prompt_alone_by_its_last_queries(trace: Trace, window: int, budget: int) -> None:
    policy = parse(f"snapkv:budget={budget},window={window},kernel=1,sinks=0")
    simulation = simulate(trace, policy)
    prompt = trace.prompt
    paid = trace.mass[max(0, prompt - window) : prompt, 0, 0].astype(np.float64).sum(0)
    outside = sorted(range(max(0, prompt - window)), key=lambda p: (-paid[p], p))
    expected = {*outside[: budget - window], *range(max(0, prompt - window), prompt)}
    if prompt > budget:
        assert set(kept(simulation, prompt, 0, 0)) == expected
    assert set(kept(simulation, len(trace.tokens), 0, 0)) >= set(range(prompt, len(trace.tokens)))


# -- retained mass ---------------------------------------------------------------------------------


@given(matrices(), st.integers(1, 8))
def test_retained_mass_is_its_definition(trace: Trace, budget: int) -> None:
    if trace.prompt == len(trace.tokens):
        trace = replace(trace, prompt=0)
    simulation = simulate(trace, parse(f"streamingllm:budget={budget},sinks=0"))
    paid = reached = 0.0
    for query in range(trace.prompt, len(trace.tokens)):
        before = set(kept(simulation, query, 0, 0)) | {query}
        for token, weight in enumerate(trace.mass[query, 0, 0].tolist()):
            paid += weight
            reached += weight if token in before else 0.0
    assert retained_mass(trace, simulation.evicted)[0, 0] == pytest.approx(reached / paid)


def test_nothing_is_lost_by_the_full_cache_and_something_by_the_others() -> None:
    _, trace = recorded("llama")
    assert (retained_mass(trace, simulate(trace, parse("full")).evicted) == 1).all()
    shares = [
        retained_mass(trace, simulate(trace, parse(f"h2o:budget={budget}")).evicted).mean() for budget in (8, 16, 32)
    ]
    assert 0 < shares[0] < shares[1] < shares[2] < 1


def test_retained_mass_of_numbers() -> None:
    # Each query finds what is left of all numbers so far: 1/1, 3/3, 4/4 + ... of a window of 2 and the token at hand.
    trace = from_numbers(("a", "b", "c", "d"), [1.0, 2.0, 1.0, 4.0])
    simulation = simulate(trace, parse("slidingwindow:budget=2"))
    assert retained_mass(trace, simulation.evicted)[0, 0] == pytest.approx((1 + 3 + 4 + 7) / (1 + 3 + 4 + 8))


def test_a_trace_that_ends_with_its_prompt_says_so() -> None:
    trace = replace(demo_rows(), prompt=16)
    with pytest.raises(TraceError, match="no query comes after"):
        retained_mass(trace, simulate(trace, parse("full")).evicted)


def test_the_budget_of_a_policy_is_checked_by_the_policy() -> None:
    with pytest.raises(PolicyError, match="under the 6 tokens"):
        parse("h2o:budget=3,sinks=2,recent=4")
