"""Which slots stay: ranges, ties, padding, and the moment of an eviction."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.errors import PolicyError
from kvwinnow.policies import (
    H2O,
    Full,
    Hybrid,
    LayerView,
    Lengths,
    Phase,
    Policy,
    SlidingWindow,
    SnapKV,
    StreamingLLM,
)
from kvwinnow.policies.base import all_but_lowest, highest

PHASES = [Phase.PROMPT, Phase.DECODE]


def kept(
    policy: Policy, positions: list[int], scores: list[float], budget: int, phase: Phase = Phase.DECODE
) -> list[int]:
    """The positions that one KV head of one row keeps of ``positions``, one a slot, -1 = empty."""
    slots = torch.tensor(positions, dtype=torch.int32).view(1, 1, -1)
    statistic = torch.tensor(scores).view(1, 1, -1)
    last = max(positions)
    view = LayerView(phase, slots, statistic, torch.tensor([[[last]]], dtype=torch.int32))
    lengths = Lengths(seen=last + 1, kept=sum(position >= 0 for position in positions), budget=budget)
    stays = policy.select(view, [lengths], [budget])
    assert stays.shape == slots.shape
    assert not stays[slots < 0].any()
    return sorted(slots[stays].tolist())


# -- the methods by hand -------------------------------------------------------------------------------------------


def test_hybrid_keeps_what_the_worked_example_says() -> None:
    # By hand: 2 sinks {0, 1}; heavy = int(4 * 0.5) = 2; window = 2. After token 6: window {5, 6}, and of 2 (.10),
    # 3 (.90), 4 (.05) the heaviest are 3 and 2. After token 7: window {6, 7}, and of 2 (.10), 3 (.90), 5 (.20) they
    # are 3 and 5.
    weights = [0.95, 0.85, 0.10, 0.90, 0.05, 0.20, 0.15, 0.75]
    policy = Hybrid(budget=6, sinks=2, heavy_ratio=0.5)
    held: list[int] = []
    history = []
    for token in range(8):
        held.append(token)
        due = policy.due(Phase.DECODE, Lengths(seen=token + 1, kept=len(held), budget=6))
        if due is not None:
            held = kept(policy, held, [weights[position] for position in held], due)
        history.append(set(held))
    assert history[5] == {0, 1, 2, 3, 4, 5}
    assert history[6:] == [{0, 1, 2, 3, 5, 6}, {0, 1, 3, 5, 6, 7}]


@pytest.mark.parametrize("phase", PHASES)
def test_hybrid_of_heavy_hitters_alone_has_no_window(phase: Phase) -> None:
    policy = Hybrid(budget=3, sinks=1, heavy_ratio=1.0)
    assert policy.protected(3) == (1, 0)
    assert kept(policy, [0, 1, 2, 3, 4], [0.0, 0.5, 0.1, 0.4, 0.0], 3, phase) == [0, 1, 3]


@pytest.mark.parametrize("phase", PHASES)
def test_hybrid_without_heavy_hitters_is_streaming_llm(phase: Phase) -> None:
    scores = [0.0, 0.0, 9.0, 8.0, 0.0, 0.0]
    for policy in (Hybrid(budget=4, sinks=2, heavy_ratio=0), StreamingLLM(budget=4, sinks=2)):
        assert kept(policy, list(range(6)), scores, 4, phase) == [0, 1, 4, 5]


@pytest.mark.parametrize("phase", PHASES)
def test_the_sliding_window_keeps_the_latest(phase: Phase) -> None:
    assert kept(SlidingWindow(budget=3), [0, 1, 2, 3, 4, 5], [9.0] * 6, 3, phase) == [3, 4, 5]
    assert kept(SlidingWindow(budget=1), [7, 3, -1, 5, 6], [9.0] * 5, 1, phase) == [7]


def test_the_sliding_window_knows_positions_apart_that_float32_does_not() -> None:
    last = 2**30
    positions = list(range(last - 40, last + 1))
    assert kept(SlidingWindow(budget=10), positions, [0.0] * 41, 10) == positions[-10:]
    assert kept(SlidingWindow(budget=40), positions, [0.0] * 41, 40) == positions[-40:]


@pytest.mark.parametrize("phase", PHASES)
def test_h2o_keeps_the_heaviest_and_half_the_budget_for_the_latest(phase: Phase) -> None:
    scores = [0.1, 0.9, 0.2, 0.8, 0.3, 0.0, 0.0]
    assert kept(H2O(budget=4), list(range(7)), scores, 4, phase) == [1, 3, 5, 6]
    assert kept(H2O(budget=4, recent=0), list(range(7)), scores, 4, phase) == [1, 2, 3, 4]
    assert kept(H2O(budget=4, recent=1, sinks=1), list(range(7)), scores, 4, phase) == [0, 1, 3, 6]
    assert H2O().protected(1024) == (0, 512)
    assert H2O(sinks=4).protected(1024) == (4, 510)


def test_snapkv_pools_the_window_sums_without_the_windows_own_columns() -> None:
    # Window: positions 8 and 9, whose huge sums must neither be chosen nor spill over. Peak at 4.
    sums = [0.0, 0.1, 0.0, 0.0, 0.9, 0.0, 0.0, 0.2, 50.0, 50.0]
    policy = SnapKV(budget=5, window=2, kernel=3, sinks=0)
    assert kept(policy, list(range(10)), sums, 5, Phase.PROMPT) == [3, 4, 5, 8, 9]
    # One more: 6 and 7 tie at .2, 0 to 2 at .1; of 6 and 7 the lower stays.
    assert kept(policy, list(range(10)), sums, 6, Phase.PROMPT) == [3, 4, 5, 6, 8, 9]
    with_sink = SnapKV(budget=5, window=2, kernel=3, sinks=1)
    assert kept(with_sink, list(range(10)), sums, 5, Phase.PROMPT) == [0, 3, 4, 8, 9]


def test_snapkv_averages_with_zeros_beyond_the_ends() -> None:
    # Averages over 3: (0 + .6 + .3)/3 = .3, (.6 + .3 + .3)/3 = .4, (.3 + .3 + .5)/3 = .37, (.3 + .5 + 0)/3 = .27.
    policy = SnapKV(budget=3, window=1, kernel=3, pool="avg", sinks=0)
    assert kept(policy, [0, 1, 2, 3, 4], [0.6, 0.3, 0.3, 0.5, 9.0], 3, Phase.PROMPT) == [1, 2, 4]
    assert kept(policy, [0, 1, 2, 3, 4], [0.6, 0.3, 0.3, 0.5, 9.0], 4, Phase.PROMPT) == [0, 1, 2, 4]


def test_snapkv_pools_over_the_kept_slots_and_not_over_what_is_gone() -> None:
    # 40 is the neighbour of 3 among the slots, and gets its peak by the pooling.
    policy = SnapKV(budget=4, window=1, kernel=3, sinks=0)
    assert kept(policy, [1, 3, 40, 41, 60], [0.0, 0.9, 0.0, 0.1, 0.0], 4, Phase.PROMPT) == [1, 3, 40, 60]


# -- rules for all -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("budget", [2, 3, 4])
def test_equal_scores_keep_the_lower_position_wherever_it_lies(budget: int, phase: Phase) -> None:
    policy = H2O(budget=budget, recent=0)
    assert kept(policy, [4, 1, -1, 3, 0, 2], [0.5] * 6, budget, phase) == list(range(budget))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_no_numbers_keep_neither_padding_nor_too_many(bad: float, phase: Phase) -> None:
    for scores in ([bad] * 6, [0.1, bad, 0.2, bad, 0.3, 0.4]):
        for budget in (2, 3, 4):
            assert len(kept(H2O(budget=budget, recent=1), [4, 1, -1, 3, 0, 2], scores, budget, phase)) == budget


def test_padding_is_never_kept_however_it_scores() -> None:
    positions = [-1, 5, -1, 2, 0, 1, 3, 4, -1]
    scores = [9.0, 0.1, 9.0, 0.2, 0.3, 0.4, 0.5, 0.6, 9.0]
    assert kept(H2O(budget=3, recent=0), positions, scores, 3) == [1, 3, 4]
    assert kept(H2O(budget=5, recent=0), positions, scores, 5) == [0, 1, 2, 3, 4]
    assert kept(StreamingLLM(budget=3, sinks=2), positions, scores, 3) == [0, 1, 5]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=2, max_size=12), st.integers(0, 3), st.data())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_dropping_one_in_linear_time_is_dropping_one_by_sorting(
    scores: list[float], holes: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations([*range(len(scores)), *[-1] * holes]))
    positions = torch.tensor(order, dtype=torch.int32).view(1, 1, -1)
    values = torch.tensor([*scores, *[3.0] * holes]).view(1, 1, -1)
    values = values.masked_fill(positions < data.draw(st.integers(0, len(scores))), torch.inf)
    one = all_but_lowest(values, positions, torch.tensor([True]))
    assert torch.equal(one, highest(values, positions, torch.tensor([len(scores) - 1])))
    assert torch.equal(all_but_lowest(values, positions, torch.tensor([False])), positions >= 0)


def test_rows_and_heads_choose_for_themselves() -> None:
    positions = torch.tensor([[[0, 1, 2, 3], [3, 2, 1, 0]], [[-1, 0, 1, -1], [1, -1, -1, 0]]], dtype=torch.int32)
    scores = torch.tensor([[[4.0, 3, 2, 1], [4, 3, 2, 1]], [[9, 1, 2, 9], [2, 9, 9, 1]]])
    view = LayerView(Phase.DECODE, positions, scores, torch.tensor([[[3]], [[1]]], dtype=torch.int32))
    lengths = [Lengths(seen=4, kept=4, budget=2), Lengths(seen=2, kept=2, budget=2)]
    stays = H2O(budget=2, recent=0).select(view, lengths, [2, 2])
    assert [sorted(positions[b, h][stays[b, h]].tolist()) for b in (0, 1) for h in (0, 1)] == [
        [0, 1],
        [2, 3],
        [0, 1],
        [0, 1],
    ]


def test_rows_have_budgets_of_their_own() -> None:
    positions = torch.arange(6, dtype=torch.int32).expand(2, 1, 6)
    view = LayerView(Phase.DECODE, positions, torch.ones(2, 1, 6), torch.full((2, 1, 1), 5, dtype=torch.int32))
    lengths = [Lengths(seen=6, kept=6, budget=4), Lengths(seen=6, kept=6, budget=2)]
    stays = H2O(budget=4).select(view, lengths, [4, 2])
    assert positions[0, 0][stays[0, 0]].tolist() == [0, 1, 4, 5]
    assert positions[1, 0][stays[1, 0]].tolist() == [0, 5]


def test_a_score_that_needs_a_statistic_says_so() -> None:
    slots = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    view = LayerView(Phase.DECODE, slots, None, torch.tensor([[[3]]], dtype=torch.int32))
    for policy in (H2O(budget=2), Hybrid(budget=5), SnapKV(budget=36)):
        with pytest.raises(PolicyError, match="statistics"):
            policy.score(view)


def test_selecting_changes_nothing_it_is_given() -> None:
    positions = torch.tensor([[[2, 0, -1, 1, 3]]], dtype=torch.int32)
    statistic = torch.tensor([[[0.1, 0.2, 0.0, 0.4, 0.3]]])
    before: tuple[Tensor, Tensor] = copy.deepcopy((positions, statistic))
    view = LayerView(Phase.PROMPT, positions, statistic, torch.tensor([[[3]]], dtype=torch.int32))
    for policy in (H2O(budget=2), Hybrid(budget=3, sinks=1), SnapKV(budget=2, window=1, sinks=0, kernel=3)):
        policy.select(view, [Lengths(seen=4, kept=4, budget=2)], [2])
    assert torch.equal(positions, before[0])
    assert torch.equal(statistic, before[1])


# -- the moment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SlidingWindow(8), StreamingLLM(8), H2O(8), Hybrid(8)], ids=str)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_rolling_policy_cuts_prompts_at_once_and_decoding_every_so_often(policy: Policy, every: int) -> None:
    policy = type(policy)(budget=8, evict_every=every)  # type: ignore[call-arg]
    for tokens in range(1, 20):
        lengths = Lengths(seen=100, kept=tokens, budget=8)
        assert policy.due(Phase.PROMPT, lengths) == (8 if tokens > 8 else None)
        assert policy.due(Phase.DECODE, lengths) == (8 if tokens >= 8 + every else None)
    assert policy.capacity(8) == 8 + every


def test_snapkv_cuts_prompts_only_and_full_nothing() -> None:
    for tokens in range(1, 60):
        lengths = Lengths(seen=100, kept=tokens, budget=40)
        assert SnapKV(40).due(Phase.PROMPT, lengths) == (40 if tokens > 40 else None)
        assert SnapKV(40).due(Phase.DECODE, lengths) is None
        assert Full().due(Phase.PROMPT, lengths) is Full().due(Phase.DECODE, lengths) is None
    assert SnapKV(40).capacity(40) is Full().capacity(40) is None


@given(
    st.sampled_from([SlidingWindow(), StreamingLLM(), H2O(), Hybrid(), SnapKV(), Full(), H2O(evict_every=4)]),
    st.sampled_from(PHASES),
    st.integers(1, 3000),
    st.integers(1, 3000),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_due_is_pure_and_never_asks_for_more_than_is_held(
    policy: Policy, phase: Phase, tokens: int, budget: int
) -> None:
    lengths = Lengths(seen=tokens, kept=tokens, budget=budget)
    before = copy.deepcopy(policy)
    first = policy.due(phase, lengths)
    assert first == policy.due(phase, lengths)
    assert policy == before
    assert first is None or first < tokens
