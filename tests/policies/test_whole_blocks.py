"""Whole blocks: when a policy held to them cuts, and how many tokens stay, as pure functions of lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwinnow.errors import PolicyError
from kvwinnow.policies import (
    H2O,
    POLICIES,
    Compose,
    Full,
    Lengths,
    Phase,
    Policy,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    WholeBlocks,
)
from kvwinnow.statistics import WINDOW

quick = settings(max_examples=200, deadline=None, derandomize=True)


def history(policy: Policy, budget: int, calls: list[tuple[Phase, int]]) -> list[tuple[int, int]]:
    """(seen, evicted) after each call of that phase and so many tokens, from the row's beginning."""
    seen = evicted = 0
    told = []
    for phase, new in calls:
        seen += new
        keep = policy.due(phase, Lengths(seen, seen - evicted, budget))
        assert keep is None or keep < seen - evicted  # something goes, or nothing is due
        evicted = evicted if keep is None else seen - keep
        told.append((seen, evicted))
    return told


def prompt_in(chunks: list[int]) -> list[tuple[Phase, int]]:
    return [(Phase.PROMPT, n) for n in chunks]


chunks = st.lists(st.integers(1, 150), min_size=1, max_size=5)


@quick
@given(chunks, st.integers(1, 100), st.integers(1, 40), st.sampled_from([StreamingLLM(), SnapKV()]))
def test_a_prompt_leaves_the_closed_form_however_it_is_cut_in_chunks(
    prompt: list[int], budget: int, m: int, inner: Policy
) -> None:
    for seen, evicted in history(WholeBlocks(inner, m), budget, prompt_in(prompt)):
        assert evicted == m * max(0, (seen - budget) // m)
        assert seen < budget + m or budget <= seen - evicted <= budget + m - 1
        assert seen >= budget + m or not evicted


@quick
@given(chunks, st.integers(1, 100), st.integers(1, 40), st.integers(1, 90), st.integers(1, 300))
def test_decoding_follows_the_closed_form_token_by_token(
    prompt: list[int], budget: int, m: int, evict_every: int, new: int
) -> None:
    policy = WholeBlocks(H2O(200, evict_every=evict_every), m)
    slack = m * -(-evict_every // m)
    told = history(policy, budget, prompt_in(prompt) + [(Phase.DECODE, 1)] * new)
    after_prompt = told[len(prompt) - 1][1]
    bound = policy.capacity(budget)
    assert bound == budget + slack
    before = after_prompt
    for seen, evicted in told[len(prompt) :]:
        assert evicted == after_prompt + slack * max(0, (seen - after_prompt - budget) // slack)
        assert evicted % m == 0
        assert evicted >= before
        assert seen - before <= bound  # what lay there when the token came
        assert evicted == before or seen - evicted == budget
        before = evicted


@quick
@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 40), st.integers(1, 90))
def test_a_prompt_left_whole_is_cut_at_its_first_decoded_token(
    prompt: int, budget: int, m: int, evict_every: int
) -> None:
    policy = WholeBlocks(Compose(200, Full(), H2O(200, evict_every=evict_every)), m)
    slack = m * -(-evict_every // m)
    told = history(policy, budget, [(Phase.PROMPT, prompt)] + [(Phase.DECODE, 1)] * 100)
    assert told[0] == (prompt, 0)
    whole = told[1][0] - budget
    assert told[1][1] == (whole // m * m if whole >= slack else 0)
    first = told[1][1]
    for seen, evicted in told[2:]:
        assert evicted == first + slack * max(0, (seen - first - budget) // slack)
    assert policy.capacity(budget) is None


@quick
@given(st.lists(st.tuples(chunks, st.integers(0, 60), st.integers(0, 50)), min_size=2, max_size=4), st.integers(1, 40))
def test_what_is_gone_stays_gone_when_a_budget_grows_from_turn_to_turn(
    turns: list[tuple[list[int], int, int]], m: int
) -> None:
    policy, seen, evicted, budget = WholeBlocks(StreamingLLM(sinks=0), m), 0, 0, 1
    for prompt, decoded, more in turns:
        budget += more
        for phase, new in prompt_in(prompt) + [(Phase.DECODE, 1)] * decoded:
            seen += new
            keep = policy.due(phase, Lengths(seen, seen - evicted, budget))
            if keep is not None:
                assert budget <= keep < min(budget + m, seen - evicted)
                evicted = seen - keep
            assert evicted % m == 0
            assert seen - evicted < budget + m


@quick
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 100), st.sampled_from(sorted(POLICIES)))
def test_blocks_of_one_token_are_the_policy_itself(seen: int, kept: int, budget: int, name: str) -> None:
    inner = POLICIES[name]()
    if name != "blocks":
        one, lengths = WholeBlocks(inner, 1), Lengths(max(seen, kept), kept, budget)
        for phase in Phase:
            assert one.due(phase, lengths) == inner.due(phase, lengths)
        assert one.capacity(budget) == inner.capacity(budget)
        assert one.most_kept(budget) == budget


@pytest.mark.parametrize(
    ("evict_every", "cut_at"), [(1, 80), (16, 80), (17, 96), (24, 96), (32, 96), (33, 112)], ids=str
)
def test_the_slack_is_rounded_up_to_blocks(evict_every: int, cut_at: int) -> None:
    policy = WholeBlocks(H2O(64, evict_every=evict_every), 16)
    due = {kept: policy.due(Phase.DECODE, Lengths(160 + kept, kept, 64)) for kept in range(60, cut_at + 1)}
    assert due.pop(cut_at) == 64
    assert set(due.values()) == {None}
    assert policy.capacity(64) == cut_at


def test_by_hand() -> None:
    policy = WholeBlocks(SnapKV(64), 16)
    # 100 tokens are 36 too many: two blocks of 16 go, 68 stay.
    assert policy.due(Phase.PROMPT, Lengths(100, 100, 64)) == 68
    assert [policy.due(Phase.PROMPT, Lengths(n, n, 64)) for n in (63, 64, 79, 80, 95, 96)] == [
        None, None, None, 64, 79, 64,
    ]  # fmt: skip
    assert policy.due(Phase.DECODE, Lengths(500, 500, 64)) is None
    assert policy.most_kept(64) == 79
    # The next chunk of 20 makes 88 of the 68, and 120 in all: 56 too many, so three blocks are gone by then.
    assert policy.due(Phase.PROMPT, Lengths(120, 88, 64)) == 72


def test_all_but_when_and_how_many_is_the_other_policys() -> None:
    inner = Compose(64, PyramidKV(64, window=8, beta=4), H2O(64, sinks=3, normalize="age"))
    policy = WholeBlocks(inner, 16)
    assert policy.limit == 64
    assert policy.layered
    assert policy.minimum() == inner.minimum() == 12
    assert policy.protected(64) == inner.protected(64)
    assert policy.statistics(Phase.PROMPT) == WINDOW(8)
    assert policy.running() == inner.running()
    parts = [policy.layer_budget(64, layer=layer, layers=4, seen=500) for layer in range(4)]
    assert parts == [inner.layer_budget(64, layer=layer, layers=4, seen=500) for layer in range(4)]
    assert len(set(parts)) == 4
    assert WholeBlocks(Full()).limit is None
    assert WholeBlocks(Full()).due(Phase.PROMPT, Lengths(100, 100, 100)) is None
    assert not WholeBlocks(H2O()).layered


@pytest.mark.parametrize("bad", [0, -16, 1.5, True, None, "16"], ids=repr)
def test_bad_sizes_of_blocks_are_refused(bad: object) -> None:
    with pytest.raises(PolicyError) as error:
        WholeBlocks(H2O(), bad)  # type: ignore[arg-type]
    assert f"multiple_of={bad!r}" in str(error.value)
    assert "1 or more" in str(error.value)


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"policy='h2o' is a str and no policy; in text write h2o\(budget=64\)"):
        WholeBlocks("h2o")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="in blocks of 8 itself"):
        WholeBlocks(WholeBlocks(H2O(), 8))
    for role in ("prompt", "decode"):
        with pytest.raises(PolicyError, match=rf"compose: {role}= .* blocks:multiple_of=4,policy=compose"):
            Compose(**{role: WholeBlocks(H2O(), 4)})
