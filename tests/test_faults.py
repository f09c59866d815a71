"""What breaks for users of other libraries, by the number of the fault; here each has the right value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvwinnow import H2O, TOVA, CompressedCache, Hybrid, KeyDiff, Knorm, KvwinnowError
from kvwinnow.cache import LayerCache, Step
from kvwinnow.cache.moments import QueryMoments
from kvwinnow.codecs import parse_codec
from kvwinnow.ops import Variant
from kvwinnow.policies import Phase, Policy
from kvwinnow.statistics import Kind
from tests.models import tiny_model, tiny_tokens
from tests.prose import GETTYSBURG
from tests.running import EVICTING, FULL_WIDTH, counts, held, logits, peak_bytes, text, with_budget

MIXES = [(5, 37), (64, 1, 40), (33, 33), (3, 70, 17, 50)]


# -- 1: left padding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_fault_01_each_padded_row_says_what_it_says_alone(policy: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(*lengths)
    cache = CompressedCache(model, policy)
    together = text(model, ids, mask, cache, tokens=10)
    for row, length in enumerate(lengths):
        alone = CompressedCache(model, policy)
        assert together[row] == text(model, ids[row : row + 1, -length:], cache=alone, tokens=10)[0]
        for head in range(2):
            assert held(cache, 1, row, head) == held(alone, 1, 0, head)


@pytest.mark.parametrize("name", ["window", "h2o", "snapkv"])
def test_fault_01_a_share_of_the_prompt_is_a_share_of_each_row_without_its_padding(name: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(80, 30)
    cache = CompressedCache(model, with_budget(name, 0.5))
    together = text(model, ids, mask, cache)
    for row, length in enumerate((80, 30)):
        alone = CompressedCache(model, with_budget(name, 0.5))
        assert together[row] == text(model, ids[row : row + 1, -length:], cache=alone)[0]


def test_fault_01_padding_is_never_kept() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(4, 60)
    for policy in FULL_WIDTH.values():
        cache = CompressedCache(model, policy)
        logits(model, ids, cache, attention_mask=mask)
        assert held(cache, 0, 0) == [0, 1, 2, 3]


# -- 2: grouped queries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_fault_02_one_selection_for_each_kv_head_whatever_the_group(policy: str, group: int) -> None:
    model = tiny_model(heads=8, kv_heads=8 // group)
    ids, _ = tiny_tokens(100)
    cache = CompressedCache(model, policy)
    logits(model, ids, cache)
    assert cache.positions(0).shape[1] == 8 // group
    assert counts(cache) == {24}


@pytest.mark.parametrize("group", [1, 4, 8])
def test_fault_02_bytes_are_those_of_the_kv_heads(group: int) -> None:
    kv_heads, layers, dim, slots = 8 // group, 2, 16, 64 + 1
    model = tiny_model(heads=8, kv_heads=kv_heads, layers=layers, dim=dim)
    cache = CompressedCache(model, "h2o:budget=64")
    text(model, tiny_tokens(100)[0], cache=cache, tokens=5)
    key_value_position_mass = 2 * dim * 4 + 4 + 4
    assert cache.nbytes() == layers * kv_heads * slots * key_value_position_mass


# -- 3: chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVICTING)
def test_fault_03_the_budget_holds_after_every_chunk(name: str) -> None:
    model = tiny_model(layers=1, trained=2048)
    ids, _ = tiny_tokens(1024)
    cache = CompressedCache(model, with_budget(name, 512))
    for fed, chunk in enumerate(ids.split(256, dim=1), start=1):
        logits(model, chunk, cache)
        assert counts(cache) == {min(fed * 256, 512)}


# -- 4: one prompt after another --------------------------------------------------------------------------------------


def say_afresh(ids: Tensor, policy: str, dtype: str) -> list[list[int]]:
    model = tiny_model()
    return text(model, ids, cache=CompressedCache(model, policy, dtype=dtype), tokens=6)


@pytest.mark.parametrize(
    ("policy", "dtype"), [*((policy, "fp32") for policy in FULL_WIDTH.values()), (FULL_WIDTH["h2o"], "int4")]
)
def test_fault_04_each_prompt_is_as_if_it_were_the_first(policy: str, dtype: str) -> None:
    model = tiny_model()
    reset = CompressedCache(model, policy, dtype=dtype)
    for length in (60, 45, 70):
        ids, _ = tiny_tokens(length, seed=length)
        first = say_afresh(ids, policy, dtype)
        reset.reset()
        assert text(model, ids, cache=reset, tokens=6) == first
        assert text(model, ids, cache=CompressedCache(model, policy, dtype=dtype), tokens=6) == first


def test_fault_04_a_share_is_that_of_the_prompt_at_hand() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "snapkv:budget=0.5,window=8")
    for length in (100, 60, 80):
        cache.reset()
        logits(model, tiny_tokens(length)[0], cache)
        assert counts(cache) == {length // 2}


def test_fault_04_a_cache_that_holds_a_prompt_refuses_another() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    ids, other = tiny_tokens(50)[0], tiny_tokens(60, seed=1)[0]
    before = text(model, ids, cache=cache)
    with pytest.raises(KvwinnowError, match=r"cache\.reset\(\)"):
        text(model, other, cache=cache)
    with pytest.raises(KvwinnowError, match=r"cache\.reset\(\)"):
        logits(model, other, cache, position_ids=torch.arange(60).unsqueeze(0))
    cache.reset()
    assert text(model, ids, cache=cache) == before


# -- 5: short prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 64, 65])
@pytest.mark.parametrize("name", FULL_WIDTH)
def test_fault_05_a_prompt_under_the_budget_gives_the_uncompressed_text(name: str, length: int) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(length)
    cache = CompressedCache(model, with_budget(name, 128))
    assert text(model, ids, cache=cache) == text(model, ids)
    assert held(cache) == list(range(length + 11))


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (3, 3), (64, 64), (65, 64)])
def test_fault_05_snapkv_cuts_only_what_exceeds_the_budget(length: int, kept: int) -> None:
    model = tiny_model()
    cache = CompressedCache(model, "snapkv:budget=64")
    logits(model, tiny_tokens(length)[0], cache)
    assert counts(cache) == {kept}
    assert set(range(min(4, length))) | set(range(max(0, length - 32), length)) <= set(held(cache))


@pytest.mark.parametrize("length", [1, 3, 64, 65])
@pytest.mark.parametrize("name", EVICTING)
def test_fault_05_a_share_of_a_short_prompt_leaves_what_the_policy_needs(name: str, length: int) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(length)
    cache = CompressedCache(model, with_budget(name, 0.5))
    least = {"streaming": 5, "hybrid": 5, "snapkv": 12, "snapkv-avg": 8, "knorm": 2, "keydiff": 4, "expected": 5}
    first = logits(model, ids, cache)
    assert torch.allclose(first, logits(model, ids), atol=1e-4)
    assert counts(cache) == {min(length, max((least | {"compose": 12}).get(name, 1), length // 2))}


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("name", ["snapkv", "snapkv-avg"])
def test_fault_05_a_share_that_cuts_nothing_gives_the_uncompressed_text(name: str, length: int) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(length)
    assert text(model, ids, cache=CompressedCache(model, with_budget(name, 0.5))) == text(model, ids)


# -- 6: hundreds of decode steps --------------------------------------------------------------------------------------


def decode(model: object, cache: CompressedCache, steps: int, seed: int = 9) -> None:
    for token in tiny_tokens(steps, seed=seed)[0].split(1, dim=1):
        logits(model, token, cache)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [
        "streamingllm:budget=20",
        "streamingllm:budget=20,sinks=6,evict_every=7",
        "h2o:budget=20,sinks=4",
        "h2o:budget=20,sinks=4,recent=0,evict_every=5",
        "hybrid:budget=20",
        "tova:budget=20,sinks=4",
        "knorm:budget=20,sinks=4,evict_every=5",
        "keydiff:budget=20,sinks=4,recent=2",
        "compose:budget=20,prompt=snapkv(window=8),decode=h2o(sinks=4,recent=0,normalize=age)",
        "compose:budget=20,prompt=expectedattention,decode=tova(sinks=4)",
    ],
)
def test_fault_06_sinks_outlive_hundreds_of_evictions(policy: str) -> None:
    model = tiny_model(layers=1)
    cache = CompressedCache(model, policy)
    logits(model, tiny_tokens(40)[0], cache)
    for round_ in range(4):
        decode(model, cache, 75, seed=round_)
        for head in range(2):
            assert held(cache, head=head)[:4] == [0, 1, 2, 3]
            assert 20 <= len(held(cache, head=head)) < 20 + 7


def test_fault_06_streaming_holds_sinks_and_the_latest_tokens_at_every_step() -> None:
    model = tiny_model(layers=1)
    cache = CompressedCache(model, "streamingllm:budget=12")
    logits(model, tiny_tokens(30)[0], cache)
    for step, token in enumerate(tiny_tokens(300, seed=5)[0].split(1, dim=1), start=31):
        logits(model, token, cache)
        assert held(cache) == [0, 1, 2, 3, *range(step - 8, step)]


# -- 7 and 8: sums of attention ---------------------------------------------------------------------------------------


def drive(policy: Policy, q: Tensor, k: Tensor, *, after: int | None = None) -> tuple[LayerCache, list[list[int]]]:
    """Feed tokens one by one to a layer of one head. q, k: (n, D). Returns what it held after each step."""
    layer = LayerCache(policy, parse_codec(q.dtype), parse_codec(q.dtype), exact=4)
    n, dim = q.shape
    trace = []
    for step in range(n):
        new = [x[step].view(1, 1, 1, dim) for x in (q, k, k)]
        phase = Phase.PROMPT if step == 0 else Phase.DECODE
        budget = policy.limit
        assert isinstance(budget, int)
        positions = torch.tensor([[step]], dtype=torch.int32)
        layer.attend(*new, Step(phase, positions, (0,), (step + 1,), (budget,)), Variant(dim**-0.5))
        assert layer.slots is not None
        if after is None or step >= after:
            held = layer.slots.positions[0, 0]
            trace.append(sorted(held[held >= 0].tolist()))
    return layer, trace


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fault_07_the_mass_of_a_token_is_the_true_sum_over_thousands_of_steps(dtype: torch.dtype) -> None:
    """With sinks=1 and recent=7 of budget=8 the tokens held are known, so the sum can be taken in float64."""
    steps, dim = 2500, 8
    generator = torch.Generator().manual_seed(0)
    q = (torch.randn(steps, dim, generator=generator) * 0.5 + 1).to(dtype)
    k = (torch.randn(steps, dim, generator=generator) * 0.5).to(dtype)
    k[0] = 1.0
    layer, _ = drive(H2O(budget=8, sinks=1, recent=7), q, k, after=steps)
    true = 0.0
    for step in range(steps):
        seen = k[[0, *range(max(1, step - 7), step + 1)]].double() if step else k[:1].double()
        true += float((seen @ q[step].double() / math.sqrt(dim)).softmax(0)[0])
    assert Kind.MASS in layer.running
    assert layer.slots is not None
    assert true > 900  # a bfloat16 sum would stall at 256 at the latest
    assert float(layer.running[Kind.MASS][layer.slots.positions == 0]) == pytest.approx(true, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fault_07_the_moments_of_thousands_of_queries_far_from_zero_are_the_true_ones(dtype: torch.dtype) -> None:
    """Queries about 100 with a deviation of 1: sums of squares in float32 would leave noise for a covariance."""
    n, dim = 20_000, 4
    q = torch.randn(2, n, dim, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 1.0, 0.5]) + 100
    q = q.to(dtype)
    moments = QueryMoments(1, 2, dim, q.device)
    for begin, end in ((0, 7), (7, 8), (8, 9_000), (9_000, n)):
        moments.add(0, q[:, begin:end], begin, None)
    expected = moments.expected((n,), 5, 0.5, None)
    true = q.double() * 0.5
    for head in range(2):
        torch.testing.assert_close(expected.mean[0, head].double(), true[head].mean(0), rtol=1e-6, atol=0)
        covariance = torch.cov(true[head].T, correction=0)
        torch.testing.assert_close(expected.covariance[0, head].double(), covariance, rtol=1e-4, atol=1e-4)


def test_fault_07_what_is_summed_and_stored_is_float32_in_a_bfloat16_model() -> None:
    model = tiny_model().to(torch.bfloat16)
    for name in ("h2o", "hybrid", "knorm", "compose"):
        cache = CompressedCache(model, FULL_WIDTH[name], dtype="int4")
        logits(model, tiny_tokens(60)[0], cache)
        decode(model, cache, 3)
        stored = [tensor for layer in cache._layers() for tensor in layer.running.values()]
        assert stored
        assert {tensor.dtype for tensor in stored} == {torch.float32}


def test_fault_08_without_a_recent_range_the_lightest_token_goes_be_it_the_newest() -> None:
    q = torch.ones(6, 1)
    k = torch.tensor([[4.0], [3.0], [2.0], [-9.0], [-9.0], [6.0]])
    _, trace = drive(H2O(budget=3, recent=0), q, k)
    # Tokens 3 and 4 receive e^-9 from themselves and die at once. Token 5 receives more than token 2 ever did.
    assert trace == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 5]]


def test_fault_08_the_default_recent_range_is_half_the_budget() -> None:
    q = torch.ones(6, 1)
    k = torch.tensor([[4.0], [3.0], [2.0], [-9.0], [-9.0], [-9.0]])
    _, trace = drive(H2O(budget=4), q, k)
    assert trace == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 4, 5]]


def test_fault_08_a_hybrid_without_a_window_evicts_by_weight() -> None:
    q = torch.ones(5, 1)
    k = torch.tensor([[1.0], [4.0], [3.0], [-9.0], [6.0]])
    _, trace = drive(Hybrid(budget=3, sinks=1, heavy_ratio=1.0), q, k)
    assert trace == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 4]]


@pytest.mark.parametrize("policy", [H2O(recent=0, normalize="age"), TOVA(recent=0)], ids=str)
def test_fault_08_the_newest_token_may_go_at_once_and_the_heaviest_stay(policy: Policy) -> None:
    q = torch.ones(6, 1)
    k = torch.tensor([[4.0], [3.0], [2.0], [-9.0], [-9.0], [6.0]])
    _, trace = drive(dataclasses.replace(policy, budget=3), q, k)  # type: ignore[call-arg]
    assert trace[:5] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert 5 in trace[5]


def test_fault_08_norms_and_directions_need_no_recent_range() -> None:
    q = torch.ones(5, 2)
    k = torch.tensor([[4.0, 0.0], [1.0, 0.0], [3.0, 0.0], [9.0, 0.0], [2.0, 0.0]])
    assert drive(Knorm(budget=2), q, k)[1] == [[0], [0, 1], [1, 2], [1, 2], [1, 4]]
    turned = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [-1.0, 0.2], [0.1, 1.0]])
    # Least like the mean direction: of three 1 stays and 2, the likest, goes; then 3 comes, and 4, which is like 1.
    assert drive(KeyDiff(budget=2), q, turned)[1] == [[0], [0, 1], [0, 1], [0, 3], [0, 3]]


@pytest.mark.parametrize(
    "policy",
    [
        "h2o:budget=24",
        "h2o:budget=24,recent=0",
        "h2o:budget=24,recent=0,normalize=age",
        "hybrid:budget=24,heavy_ratio=1.0",
        "tova:budget=24,recent=0",
        "knorm:budget=24",
        "keydiff:budget=24",
        "compose:budget=24,prompt=expectedattention,decode=keydiff",
    ],
)
def test_fault_08_the_budget_is_obeyed_at_every_step(policy: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, policy)
    logits(model, tiny_tokens(60)[0], cache)
    for seed in range(30):
        assert counts(cache) == {24}
        decode(model, cache, 1, seed=seed)


# -- 9 and 22: memory of a long prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "hybrid", "snapkv", "tova", "knorm", "keydiff", "expected", "compose"])
def test_fault_09_a_prompt_takes_memory_in_proportion_to_its_length(name: str) -> None:
    model = tiny_model(heads=2, kv_heads=1, layers=1, trained=8192)
    peaks = []
    for length in (2048, 4096):
        ids, _ = tiny_tokens(length)
        cache = CompressedCache(model, with_budget(name, 64))
        peaks.append(peak_bytes(lambda ids=ids, cache=cache: logits(model, ids, cache, logits_to_keep=1)))
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 4096 * 4096 * 4 / 2  # one head's weights in float32 would take twice this


@pytest.mark.parametrize("name", EVICTING)
def test_fault_22_a_prompt_never_holds_the_full_keys_and_values_of_two_layers(name: str) -> None:
    """Six more layers cost six budgets: none of them leaves its full keys and values behind."""
    length, kv_heads, dim = 1500, 4, 32
    full = 2 * kv_heads * dim * length * 4
    peaks, budgets = [], []
    for layers in (2, 8):
        model = tiny_model(heads=4, kv_heads=kv_heads, dim=dim, layers=layers, trained=2048)
        cache = CompressedCache(model, with_budget(name, 128))
        ids, _ = tiny_tokens(length)
        peaks.append(peak_bytes(lambda model=model, ids=ids, cache=cache: logits(model, ids, cache, logits_to_keep=1)))
        budgets.append(cache.nbytes())
    assert peaks[1] - peaks[0] <= budgets[1] - budgets[0] + full // 8
    assert budgets[1] < full  # else the line above would say nothing


@pytest.mark.parametrize("name", EVICTING)
def test_fault_22_each_layer_is_cut_before_the_next_begins(name: str) -> None:
    model = tiny_model(layers=4, trained=1024)
    cache = CompressedCache(model, with_budget(name, 64))
    after: list[int] = []
    for layer in model.base_model.layers:
        layer.register_forward_hook(lambda *_: after.append(cache.nbytes()))
    logits(model, tiny_tokens(700)[0], cache)
    assert after == [cache.nbytes() // 4 * n for n in (1, 2, 3, 4)]


# -- 10: a turn longer than the window --------------------------------------------------------------------------------


def test_fault_10_a_turn_longer_than_the_window_is_trimmed_inside_the_turn() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "streamingllm:budget=20")
    logits(model, tiny_tokens(100)[0], cache)
    assert held(cache) == [0, 1, 2, 3, *range(84, 100)]
    decode(model, cache, 3)
    assert held(cache) == [0, 1, 2, 3, *range(87, 103)]
    logits(model, tiny_tokens(50, seed=1)[0], cache)
    assert held(cache) == [0, 1, 2, 3, *range(137, 153)]
    logits(model, tiny_tokens(10, seed=2)[0], cache)
    assert held(cache) == [0, 1, 2, 3, *range(147, 163)]


# -- 14: turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FULL_WIDTH)
def test_fault_14_three_turns_say_what_the_uncompressed_cache_says(name: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, with_budget(name, 200))
    talk, plain = tiny_tokens(40)[0], tiny_tokens(40)[0]
    for turn in range(3):
        talk = torch.cat([talk, torch.tensor(text(model, talk, cache=cache, tokens=8))], dim=1)
        plain = torch.cat([plain, torch.tensor(text(model, plain, tokens=8))], dim=1)
        assert talk.tolist() == plain.tolist()
        more = tiny_tokens(15, seed=turn + 1)[0]
        talk, plain = torch.cat([talk, more], dim=1), torch.cat([plain, more], dim=1)


@pytest.mark.parametrize("name", EVICTING)
def test_fault_14_after_eviction_the_next_token_sees_what_is_left_at_its_true_distance(name: str) -> None:
    """In a model of one layer, a token's key depends on itself alone: a mask on the full model is the right value."""
    model = tiny_model(layers=1)
    cache = CompressedCache(model, FULL_WIDTH[name])
    ids = torch.empty(1, 0, dtype=torch.int64)
    for turn, length in enumerate((50, 1, 1, 20, 1, 6)):
        if turn:
            before = cache.positions(0)
        new = tiny_tokens(length, seed=turn)[0]
        ids = torch.cat([ids, new], dim=1)
        assert cache.get_seq_length() == ids.shape[1] - length
        out = logits(model, new, cache)
        if not turn:
            continue
        mask = torch.full((1, 4, ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
        for head in range(4):
            visible = torch.zeros(ids.shape[1], dtype=torch.bool)
            visible[before[0, head // 2][before[0, head // 2] >= 0].long()] = True
            mask[0, head, -length:, :-length].masked_fill_(~visible[:-length], -torch.inf)
        expected = model(ids, attention_mask=mask).logits[:, -length:]
        assert torch.allclose(out, expected, atol=1e-4)


# -- 15: tokens, share, bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize(("budget", "kept"), [(48, 48), (0.25, 50), ("1.0", 200), ("0.999", 199)])
def test_fault_15_a_budget_in_tokens_or_as_a_share(name: str, budget: int | float | str, kept: int) -> None:
    model = tiny_model()
    cache = CompressedCache(model, with_budget(name, budget))
    logits(model, tiny_tokens(200)[0], cache)
    assert counts(cache) == {kept}


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("size", ["64KiB", "50kB", "70000B", "0.0625 MiB"])
def test_fault_15_a_budget_in_bytes_is_that_of_the_whole_cache(name: str, size: str) -> None:
    limit = {"64KiB": 65536, "50kB": 50000, "70000B": 70000, "0.0625 MiB": 65536}[size]
    model = tiny_model()
    cache = CompressedCache(model, with_budget(name, size))
    logits(model, tiny_tokens(400)[0], cache)
    (kept,) = counts(cache)
    assert cache.nbytes() <= limit < cache.budgets.nbytes(kept + 1, 1)
    assert kept < 400


def test_fault_15_a_ratio_is_never_changed_inside() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=0.25")
    for length in (40, 200, 80):
        cache.reset()
        logits(model, tiny_tokens(length)[0], cache)
        assert cache.policy.limit == 0.25
        assert counts(cache) == {length // 4}


# -- 18: few bits together with few tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "int8", "int4", "fp4", "fp4:style=mx"])
@pytest.mark.parametrize("name", FULL_WIDTH)
def test_fault_18_every_policy_evicts_in_every_codec(name: str, dtype: str) -> None:
    """A prompt is cut by attention that no codec has touched, so what the first layer keeps is the same.

    What comes out after that is held against the oracle in test_oracle_codecs.py.
    """
    model = tiny_model()
    exact, coded = (CompressedCache(model, FULL_WIDTH[name], dtype=stored) for stored in ("fp32", dtype))
    ids, mask = tiny_tokens(70, 50)
    for cache in (exact, coded):
        logits(model, ids, cache, attention_mask=mask)
    assert torch.equal(*(cache.positions(0).sort(-1, descending=True).values[..., :24] for cache in (exact, coded)))
    assert name == "full" or coded.nbytes() < exact.nbytes()
    for seed, length in enumerate((9, 1, 1, 1, 1)):
        assert logits(model, tiny_tokens(length, length, seed=seed)[0], coded).isfinite().all()
        assert max(counts(coded)) <= {"full": 99, "snapkv": 28, "snapkv-avg": 28, "expected": 28}.get(name, 24 + 3)


# -- 24: the first tokens ---------------------------------------------------------------------------------------------


def loss_after_eviction(model: Any, cache: CompressedCache | None, ids: Tensor, last: int) -> float:
    """Mean negative log-likelihood (nats) of the last tokens, all others being the prompt."""
    if cache is None:
        out = logits(model, ids[:, :-1], logits_to_keep=last)
    else:
        first = logits(model, ids[:, :-last], cache, logits_to_keep=1)
        out = torch.cat([first, logits(model, ids[:, -last:-1], cache)], dim=1)
    return float(F.cross_entropy(out[0], ids[0, -last:]))


@pytest.mark.smollm2
def test_fault_24_a_real_model_stays_coherent_far_beyond_the_cache(smollm2: tuple[Any, Any]) -> None:
    """A chat of 338 tokens in caches of 64: with the template's first tokens the text stays as likely as it was."""
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": GETTYSBURG}]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"][:, :-2]
    full = loss_after_eviction(model, None, ids, 24)
    for policy in (
        "streamingllm:budget=64",
        "snapkv:budget=64,window=16",
        "hybrid:budget=64",
        "tova:budget=64,sinks=4",
        "compose:budget=64,prompt=snapkv(window=16),decode=h2o(sinks=4)",
    ):
        cache = CompressedCache(model, policy)
        assert loss_after_eviction(model, cache, ids, 24) < full + 0.5
        assert all(held(cache, layer, 0, head)[:4] == [0, 1, 2, 3] for layer in range(30) for head in range(3))
    bare = CompressedCache(model, "slidingwindow:budget=64")
    assert loss_after_eviction(model, bare, ids, 24) > full + 1


@pytest.mark.parametrize("name", ["streaming", "hybrid", "snapkv", "expected", "compose"])
def test_fault_24_the_first_real_tokens_of_each_row_stay_by_default(name: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(90, 60, 120)
    cache = CompressedCache(model, FULL_WIDTH[name])
    text(model, ids, mask, cache, tokens=30)
    for layer in range(2):
        for row in range(3):
            for head in range(2):
                assert held(cache, layer, row, head)[:4] == [0, 1, 2, 3]
