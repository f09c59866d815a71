"""Which slots stay: ranges, ties, padding, and the moment of an eviction."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.errors import PolicyError
from kvwinnow.policies import (
    H2O,
    TOVA,
    Compose,
    ExpectedAttention,
    Full,
    Hybrid,
    KeyDiff,
    Knorm,
    LayerView,
    Lengths,
    Phase,
    Policy,
    PyramidKV,
    Queries,
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


@pytest.mark.parametrize("pool", ["max", "avg"])
def test_a_kernel_wider_than_all_columns_is_as_good_as_any_wider_one(pool: str) -> None:
    """Its width is a user's, in a server a stranger's, and must cost nothing."""
    positions, weights = list(range(20)), [0.1 * (7 * i % 11) for i in range(20)]
    found = [
        kept(SnapKV(budget=8, window=2, sinks=1, kernel=kernel, pool=pool), positions, weights, 8, Phase.PROMPT)
        for kernel in (41, 10**11 + 1)
    ]
    assert found[0] == found[1]


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


@pytest.mark.parametrize("phase", PHASES)
def test_tova_keeps_what_the_latest_query_gives_most_to_and_the_latest_token(phase: Phase) -> None:
    weights = [0.3, 0.05, 0.4, 0.2, 0.04, 0.01]
    assert kept(TOVA(budget=3), list(range(6)), weights, 3, phase) == [0, 2, 5]
    assert kept(TOVA(budget=3, recent=0), list(range(6)), weights, 3, phase) == [0, 2, 3]
    assert kept(TOVA(budget=3, recent=2, sinks=1), list(range(6)), weights, 3, phase) == [0, 4, 5]


@pytest.mark.parametrize("phase", PHASES)
def test_knorm_keeps_the_smallest_norms(phase: Phase) -> None:
    norms = [9.0, 2.0, 7.0, 1.0, 3.0, 8.0]
    assert kept(Knorm(budget=3), list(range(6)), norms, 3, phase) == [1, 3, 4]
    assert kept(Knorm(budget=3, sinks=1, recent=1), list(range(6)), norms, 3, phase) == [0, 3, 5]


@pytest.mark.parametrize("phase", PHASES)
def test_h2o_by_age_divides_by_the_queries_that_could_see_a_token(phase: Phase) -> None:
    # Last is 5: tokens 0 to 5 were seen by 6, 5, 4, 3, 2, 1 queries, so that the means are .3, .1, .25, .4, .1, .6.
    sums = [1.8, 0.5, 1.0, 1.2, 0.2, 0.6]
    for policy in (H2O(budget=3, recent=0), Hybrid(budget=3, sinks=0, heavy_ratio=1.0)):
        assert kept(policy, list(range(6)), sums, 3, phase) == [0, 2, 3]
        by_age = type(policy)(budget=3, normalize="age", **_others(policy))
        assert kept(by_age, list(range(6)), sums, 3, phase) == [0, 3, 5]


def _others(policy: Policy) -> dict[str, object]:
    return {"recent": 0} if isinstance(policy, H2O) else {"sinks": 0, "heavy_ratio": 1.0}


def test_observers_are_counted_from_the_first_query_that_was_measured() -> None:
    positions = torch.tensor([[[0, 3, 7, -1]]], dtype=torch.int32)
    last = torch.tensor([[[9]]], dtype=torch.int32)
    assert LayerView(Phase.DECODE, positions, None, last).observers()[0, 0, :3].tolist() == [10, 7, 3]
    since = torch.tensor([[[6]]], dtype=torch.int32)
    assert LayerView(Phase.DECODE, positions, None, last, since).observers()[0, 0, :3].tolist() == [4, 4, 3]


def view_of(
    keys: Tensor, positions: list[int], values: Tensor | None = None, queries: Queries | None = None
) -> LayerView:
    slots = torch.tensor(positions, dtype=torch.int32).view(1, 1, -1)
    return LayerView(
        Phase.PROMPT,
        slots,
        None,
        torch.tensor([[[max(positions)]]], dtype=torch.int32),
        read_keys=lambda: keys.view(1, 1, *keys.shape),
        read_values=None if values is None else lambda: values.view(1, 1, *values.shape),
        make_queries=None if queries is None else lambda: queries,
    )


def test_keydiff_keeps_the_keys_least_like_the_mean_direction_of_those_held() -> None:
    # Directions: three to the right, whatever their length, and one up. The last slot is empty and must not count.
    keys = torch.tensor([[1.0, 0.0], [0.0, 5.0], [9.0, 0.0], [2.0, 0.0], [-1e9, 0.0]])
    view = view_of(keys, [0, 1, 2, 3, -1])
    scores = KeyDiff(budget=2).score(view)[0, 0, :4]
    # The mean direction is (.75, .25), of length sqrt(.625): cosines .75 and .25 over that.
    right, up = -0.75 / 0.625**0.5, -0.25 / 0.625**0.5
    torch.testing.assert_close(scores, torch.tensor([right, up, right, right]))
    stays = KeyDiff(budget=2).select(view, [Lengths(seen=4, kept=4, budget=2)], [2])
    assert stays[0, 0].tolist() == [True, True, False, False, False]


def test_expected_attention_by_hand() -> None:
    # One head of dimension 2. Logits: k.mean + k'covariance k/2 = 1 + 2/2, 0 + 0, 3 + 2 * 9/2; slot 0 is a sink.
    keys = torch.tensor([[7.0, 7.0], [1.0, 0.0], [0.0, 4.0], [3.0, 0.0], [50.0, 0.0]])
    values = torch.tensor([[1.0, 0.0], [3.0, 4.0], [1.0, 0.0], [0.0, 0.5], [9.0, 0.0]])
    queries = Queries(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[[2.0, 0.0], [0.0, 0.0]]]]))
    view = view_of(keys, [0, 1, 2, 3, -1], values, queries)
    own = slice(1, 4)

    def weights(*logits: float) -> Tensor:
        return torch.tensor(logits).softmax(0)

    plain = ExpectedAttention(budget=2, sinks=1, values=False)
    torch.testing.assert_close(plain.score(view)[0, 0, own], weights(2.0, 0.0, 12.0))
    mean = ExpectedAttention(budget=2, sinks=1, values=False, covariance=False)
    torch.testing.assert_close(mean.score(view)[0, 0, own], weights(1.0, 0.0, 3.0))
    whole = ExpectedAttention(budget=2, sinks=1, covariance=False, epsilon=0.5)
    expected = (weights(1.0, 0.0, 3.0) + 0.5) * torch.tensor([5.0, 1.0, 0.5])
    torch.testing.assert_close(whole.score(view)[0, 0, own], expected)


def test_compose_scores_and_protects_by_the_policy_of_the_phase() -> None:
    policy = Compose(4, prompt=Knorm(recent=1), decode=H2O(recent=0, sinks=2))
    scores = [9.0, 8.0, 1.0, 2.0, 3.0, 7.0]
    assert kept(policy, list(range(6)), scores, 4, Phase.PROMPT) == [2, 3, 4, 5]
    assert kept(policy, list(range(6)), scores, 4, Phase.DECODE) == [0, 1, 4, 5]
    assert policy.protected(4) == (2, 1)


# -- layers --------------------------------------------------------------------------------------------------------


@given(
    budget=st.integers(1, 5000),
    layers=st.integers(1, 90),
    more=st.integers(-4000, 60_000),
    window=st.integers(1, 64),
    beta=st.integers(1, 40),
    decode=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_pyramid_falls_and_has_exactly_the_tokens_of_its_mean(
    budget: int, layers: int, more: int, window: int, beta: int, decode: int
) -> None:
    pyramid = PyramidKV(budget + window + decode + 4, window=window, beta=beta)
    composed = Compose(pyramid.budget, prompt=pyramid, decode=TOVA(recent=decode))
    assert isinstance(pyramid.budget, int)
    seen = max(1, pyramid.budget + more)
    for policy in (pyramid, composed):
        budgets = [
            policy.layer_budget(pyramid.budget, layer=layer, layers=layers, seen=seen) for layer in range(layers)
        ]
        assert sum(budgets) == layers * pyramid.budget
        assert all(lower >= upper for lower, upper in itertools.pairwise(budgets))
        assert budgets[-1] >= policy.minimum()
        if seen <= pyramid.budget or beta == 1:
            assert set(budgets) == {pyramid.budget}
        assert budgets[0] <= max(pyramid.budget, seen - window)
    for policy in (SnapKV(), H2O(), Full(), Compose()):
        assert policy.layer_budget(budget, layer=0, layers=layers, seen=seen) == budget
        assert not policy.layered


def test_a_pyramid_by_hand() -> None:
    # From 2 * 100 - 100/4 = 175 to 100/4 = 25 in steps of 150/4 = 37.5; 137.5 rounds to 138, and 62 is opposite.
    policy = PyramidKV(100, window=8, beta=4)
    budgets = [policy.layer_budget(100, layer=layer, layers=5, seen=1000) for layer in range(5)]
    assert budgets == [175, 138, 100, 62, 25]
    # A prompt of 150 tokens: no layer can use more than the 142 before the window.
    budgets = [policy.layer_budget(100, layer=layer, layers=5, seen=150) for layer in range(5)]
    assert budgets == [142, 121, 100, 79, 58]


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
    for policy in (H2O(budget=2), Hybrid(budget=5), SnapKV(budget=36), Knorm(), KeyDiff(), TOVA(), ExpectedAttention()):
        with pytest.raises(PolicyError, match=r"statistics|keys"):
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


@pytest.mark.parametrize(
    "policy", [SlidingWindow(8), StreamingLLM(8), H2O(8), Hybrid(8), TOVA(8), Knorm(8), KeyDiff(8)], ids=str
)
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


def test_compose_cuts_at_the_moments_of_its_policies() -> None:
    both = Compose(40, prompt=SnapKV(), decode=TOVA(evict_every=3))
    whole = Compose(40, prompt=Full(), decode=TOVA(evict_every=3))
    prompts = Compose(40, prompt=Knorm(), decode=Full())
    for tokens in range(1, 60):
        lengths = Lengths(seen=100, kept=tokens, budget=40)
        over = 40 if tokens > 40 else None
        assert [policy.due(Phase.PROMPT, lengths) for policy in (both, whole, prompts)] == [over, None, over]
        late = 40 if tokens >= 43 else None
        assert [policy.due(Phase.DECODE, lengths) for policy in (both, whole, prompts)] == [late, late, None]
    assert [policy.capacity(40) for policy in (both, whole, prompts)] == [43, None, None]


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
