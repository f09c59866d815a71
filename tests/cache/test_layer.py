"""The cache of one layer: what it holds, where it writes, and what it gives back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.cache import LayerCache, Step
from kvwinnow.cache.memory import GROWTH, LayerShape, allocation, layer_nbytes, prompt_nbytes, slots_for
from kvwinnow.codecs import parse_codec
from kvwinnow.ops import Variant
from kvwinnow.policies import Phase, parse
from kvwinnow.statistics import Kind
from tests.running import EVICTING, FULL_WIDTH, ROLLING

HEADS, KV_HEADS, DIM = 4, 2, 16


class Driver:
    """A layer fed with random vectors; remembers all of them."""

    def __init__(self, policy: str, dtype: str = "fp32", *, rows: int = 1, seed: int = 0) -> None:
        self.layer = LayerCache(parse(policy), parse_codec(dtype), parse_codec(dtype), exact=4)
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = rows
        self.seen = [0] * rows
        self.keys = torch.empty(rows, KV_HEADS, 0, DIM)
        self.values = torch.empty(rows, KV_HEADS, 0, DIM)

    def random(self, heads: int, n: int) -> Tensor:
        return torch.randn(self.rows, heads, n, DIM, generator=self.generator)

    def feed(self, n: int, phase: Phase | None = None) -> tuple[Tensor, Tensor]:
        """Give n tokens to every row. Returns the queries and the output."""
        phase = phase or (Phase.DECODE if n == 1 and self.seen[0] else Phase.PROMPT)
        q, k, v = self.random(HEADS, n) * 2, self.random(KV_HEADS, n), self.random(KV_HEADS, n)
        positions = torch.arange(self.seen[0], self.seen[0] + n, dtype=torch.int32).expand(self.rows, -1)
        self.seen = [seen + n for seen in self.seen]
        limit = self.layer.policy.limit
        budget = limit if isinstance(limit, int) else None
        step = Step(phase, positions, (0,) * self.rows, tuple(self.seen), (budget,) * self.rows)
        self.keys, self.values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        return q, self.layer.attend(q, k, v, step, Variant(DIM**-0.5))

    @property
    def positions(self) -> Tensor:
        assert self.layer.slots is not None
        return self.layer.slots.positions

    def held(self, row: int = 0, head: int = 0) -> list[int]:
        held = self.positions[row, head]
        return sorted(held[held >= 0].tolist())

    def weights(self, q: Tensor, head: int, visible: list[int]) -> Tensor:
        """Softmax weights in float64 of one query (D,) over the tokens visible to it."""
        keys = self.keys[0, head // (HEADS // KV_HEADS), visible].double()
        return (keys @ q.double() / math.sqrt(DIM)).softmax(0)


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_a_decode_step_attends_to_what_each_head_holds_and_to_itself(policy: str) -> None:
    driver = Driver(policy)
    driver.feed(60)
    for step in range(60, 100):
        before = [driver.held(head=head) for head in range(KV_HEADS)]
        q, out = driver.feed(1)
        for head in range(HEADS):
            visible = [*before[head // 2], step]
            values = driver.values[0, head // 2, visible].double()
            expected = driver.weights(q[0, head, 0], head, visible) @ values
            assert torch.allclose(out[0, head, 0].double(), expected, atol=1e-5)


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_a_prompt_attends_to_what_is_held_and_to_itself_before_anything_is_evicted(policy: str) -> None:
    driver = Driver(policy)
    driver.feed(60)
    before = [driver.held(head=head) for head in range(KV_HEADS)]
    q, out = driver.feed(30)
    for head in range(HEADS):
        for n in range(30):
            visible = [*before[head // 2], *range(60, 61 + n)]
            values = driver.values[0, head // 2, visible].double()
            expected = driver.weights(q[0, head, n], head, visible) @ values
            assert torch.allclose(out[0, head, n].double(), expected, atol=1e-5)


@pytest.mark.parametrize("recent", [0, 6])
def test_mass_is_what_each_token_received_from_the_queries_that_saw_it(recent: int) -> None:
    driver = Driver(f"h2o:budget=24,recent={recent}")
    true = [dict.fromkeys(range(200), 0.0) for _ in range(KV_HEADS)]
    for n in (40, *[1] * 12, 15, *[1] * 9, 9):
        start = driver.seen[0]
        before = [driver.held(head=head) for head in range(KV_HEADS)] if start else [[], []]
        q, _ = driver.feed(n)
        for head in range(HEADS):
            for column in range(n):
                visible = [*before[head // 2], *range(start, start + column + 1)]
                weights = driver.weights(q[0, head, column], head, visible) / (HEADS // KV_HEADS)
                for token, weight in zip(visible, weights.tolist(), strict=True):
                    true[head // 2][token] += weight
        assert Kind.MASS in driver.layer.running
        for head in range(KV_HEADS):
            slots = zip(
                driver.positions[0, head].tolist(), driver.layer.running[Kind.MASS][0, head].tolist(), strict=True
            )
            for position, mass in slots:
                assert position < 0 or mass == pytest.approx(true[head][position], rel=1e-4)
            latest = list(range(start + n - recent, start + n))
            others = {*before[head], *range(start, start + n)} - set(latest)
            heaviest = sorted(others, key=lambda token: -true[head][token])[: 24 - recent]
            assert driver.held(head=head) == sorted([*heaviest, *latest])


def test_rows_do_not_know_each_other() -> None:
    both, first = Driver("h2o:budget=24", rows=2), Driver("h2o:budget=24").layer
    for n in (40, 1, 1, 12, 1):
        start = both.seen[0]
        q, out = both.feed(n)
        positions = torch.arange(start, start + n, dtype=torch.int32).unsqueeze(0)
        step = Step(Phase.DECODE if n == 1 else Phase.PROMPT, positions, (0,), (start + n,), (24,))
        new = slice(start, start + n)
        alone = first.attend(q[:1], both.keys[:1, :, new], both.values[:1, :, new], step, Variant(DIM**-0.5))
        assert torch.allclose(out[:1], alone, atol=1e-5)


# -- slots ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(FULL_WIDTH)),
    dtype=st.sampled_from(["fp32", "int8", "int4"]),
    turns=st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=1, max_size=25),
)
def test_every_head_holds_each_token_once_and_as_many_as_are_counted(name: str, dtype: str, turns: list[int]) -> None:
    driver = Driver(FULL_WIDTH[name], dtype, rows=2)
    latest = {"h2o-bare": 0, "knorm": 0, "expected": 0, "tova": 1}.get(name, 2)
    bound = driver.layer.policy.capacity(24)
    for n in turns:
        driver.feed(n)
        for row in range(2):
            recent = range(max(0, driver.seen[row] - latest), driver.seen[row])
            for head in range(KV_HEADS):
                held = driver.held(row, head)
                assert len(held) == len(set(held)) == driver.layer.kept[row]
                assert held[-1] < driver.seen[row]
                assert set(recent) <= set(held)
        if bound is not None:
            assert driver.positions.shape[2] <= bound


@pytest.mark.parametrize("policy", ROLLING.values(), ids=ROLLING)
def test_an_eviction_is_an_overwrite(policy: str) -> None:
    """What stays is neither moved nor written again."""
    driver = Driver(policy)
    driver.feed(60)
    for _ in range(30):
        before = driver.positions.clone()
        keys = driver.layer.slots.keys.parts[0].clone()
        driver.feed(1)
        stayed = (before == driver.positions) & (before >= 0)
        assert torch.equal(driver.layer.slots.keys.parts[0][stayed], keys[stayed])
        assert int(stayed.sum(-1).min()) >= 24 - 4


@pytest.mark.parametrize("dtype", ["int8", "int4", "int4:centre=false"])
def test_growth_moves_codes_and_never_quantises_again(dtype: str) -> None:
    driver = Driver("full", dtype)
    driver.feed(10)
    first = [part[:, :, :6].clone() for part in driver.layer.slots.keys.parts]
    exact = driver.layer.slots.keys.exact.clone()
    sizes = set()
    for _ in range(80):
        driver.feed(1)
        sizes.add(driver.positions.shape[2])
    assert sizes == {32, 64, 96}
    assert all(torch.equal(p[:, :, :6], f) for p, f in zip(driver.layer.slots.keys.parts, first, strict=True))
    assert torch.equal(driver.layer.slots.keys.exact, exact)
    assert driver.positions[0, 0, :90].tolist() == list(range(90))


@pytest.mark.parametrize("policy", ["streamingllm:budget=24", "hybrid:budget=24", "h2o:budget=24,sinks=4"])
@pytest.mark.parametrize("dtype", ["int8", "int4:rotate=false,centre=false"])
def test_sinks_lie_unquantised_for_ever(policy: str, dtype: str) -> None:
    driver = Driver(policy, dtype)
    driver.feed(60)
    for _ in range(50):
        driver.feed(1)
    assert driver.positions[0, :, :4].tolist() == [[0, 1, 2, 3]] * KV_HEADS
    assert torch.equal(driver.layer.slots.keys.exact[0], driver.keys[0, :, :4])
    assert torch.equal(driver.layer.slots.values.exact[0], driver.values[0, :, :4])


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_what_is_held_reads_back_as_what_was_given(policy: str, dtype: str) -> None:
    driver = Driver(policy, dtype)
    for n in (60, 1, 1, 1, 14, 1):
        driver.feed(n)
    slots = driver.layer.slots
    count = driver.positions.shape[2]
    tolerance = {"fp32": 0.0, "bf16": 0.02, "int8": 0.02, "int4": 0.35}[dtype]
    values = slots.values.restore(slots.values.read(0, count).float())
    keys = slots.keys.restore(slots.keys.read(0, count).float())
    if slots.keys.mean is not None:
        keys = keys + slots.keys.mean.unsqueeze(2)
    for head in range(KV_HEADS):
        for slot, position in enumerate(driver.positions[0, head].tolist()):
            if position >= 0:
                assert torch.allclose(keys[0, head, slot], driver.keys[0, head, position], atol=tolerance)
                assert torch.allclose(values[0, head, slot], driver.values[0, head, position], atol=tolerance)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "bound", "slots"),
    [(0, None, 32), (31, None, 32), (32, None, 64), (33, None, 64), (24, 25, 25), (31, 40, 32), (32, 40, 40)],
)
def test_slots_are_allocated_in_steps_with_room_for_one_more(tokens: int, bound: int | None, slots: int) -> None:
    assert allocation(tokens, bound) == slots
    assert allocation(tokens, bound) - tokens <= GROWTH


def test_unquantised_slots_are_allocated_even_under_a_smaller_budget() -> None:
    plain, coded = parse_codec("bf16"), parse_codec("int4")
    assert slots_for(1, 2, (plain, plain), exact=4) == 2
    assert slots_for(1, 2, (plain, coded), exact=4) == 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4", "int4:group=8"])
@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_bytes_follow_from_the_shapes(policy: str, dtype: str) -> None:
    driver = Driver(policy, dtype, rows=3)
    driver.feed(60)
    shape = LayerShape(HEADS, KV_HEADS, DIM, exact=4, itemsize=4)
    codec = parse_codec(dtype)
    slots = driver.positions.shape[2]
    foretold = layer_nbytes(parse(policy), (codec, codec), shape, batch=3, slots=slots)
    assert driver.layer.nbytes() == foretold + prompt_nbytes(parse(policy), shape, batch=3)


def test_int4_bytes_by_hand() -> None:
    """Group 8 of dimension 16: 8 bytes of codes, 2 groups of a float16 scale and a float16 zero point each."""
    driver = Driver("streamingllm:budget=63", "int4:group=8")
    driver.feed(100)
    vector, exact_vector, mean, position = 8 + 2 * 4, 16 * 4, 16 * 4, 4
    assert driver.layer.nbytes() == KV_HEADS * (2 * (60 * vector + 4 * exact_vector) + mean + 64 * position)


def test_reset_gives_everything_back() -> None:
    for policy in FULL_WIDTH.values():
        used, again, fresh = Driver(policy, seed=1), Driver(policy, seed=2), Driver(policy, seed=2)
        used.feed(60)
        used.feed(1)
        used.layer.reset()
        assert used.layer.nbytes() == 0
        assert used.layer.kept == []
        again.layer = used.layer
        assert torch.equal(again.feed(50)[1], fresh.feed(50)[1])
        assert torch.equal(again.positions, fresh.positions)
