"""A layer's decode step in one native call, against float64 and torch's codecs, at every level."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow import ops
from kvwinnow.errors import CodecError
from kvwinnow.ops import Slots, Variant
from kvwinnow.ops.cpu import attention, level, quantize, step
from tests.ops.cpu.test_attention import STORED, Case, bound_of, oracle, stored

DTYPES = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""How far an output is rounded, relative to itself."""


def made(batch: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """(B, H, 1, D), laid out as models make them: (B, 1, H, D), one row of which other things lie behind."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, heads + 1, dim, generator=generator).to(dtype)[:, :, :heads].transpose(1, 2)


def slots_of(key: str, value: str, shape: tuple[int, int, int], dims: tuple[int, int], exact: int, seed: int) -> Slots:
    """Slots of which a third are empty, at least one in each KV head."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(shape, generator=generator).argsort(-1).to(torch.int32)
    positions.masked_fill_(torch.rand(shape, generator=generator) < 0.3, -1)
    positions.scatter_(2, torch.randint(shape[2], (*shape[:2], 1), generator=generator), -1)
    keys = stored(key, (*shape, dims[0]), exact=exact, keys=True, seed=seed)
    return Slots(keys, stored(value, (*shape, dims[1]), exact=exact, keys=False, seed=seed + 1), positions)


def expected(slots: Slots, k: Tensor, v: Tensor, position: Tensor) -> tuple[Slots, Tensor]:
    """By torch's codecs: the slots once the token is stored, and where."""
    after = copy.deepcopy(slots)
    slot = (after.positions < 0).to(torch.uint8).argmax(-1, keepdim=True)
    after.keys.write_one(slot, k)
    after.values.write_one(slot, v)
    after.positions.scatter_(2, slot, position.unsqueeze(1).expand(-1, k.shape[1], -1))
    return after, slot


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_step_equals_float64_over_what_torch_stores(each_level: int, data: st.DataObject) -> None:
    batch, kv_heads, group = (data.draw(st.integers(1, most)) for most in (3, 3, 9))
    dim = data.draw(st.sampled_from([16, 32, 64, 80, 96, 128, 256]))
    dims = dim, data.draw(st.sampled_from([dim, dim, 64]))
    key, value = data.draw(st.sampled_from(STORED)), data.draw(st.sampled_from(STORED))
    dtype, exact = data.draw(st.sampled_from(list(DTYPES))), data.draw(st.sampled_from([0, 4, 17]))
    shape, seed = (batch, kv_heads, data.draw(st.integers(1, 90))), data.draw(st.integers(0, 999))
    try:
        slots = slots_of(key, value, shape, dims, exact, seed)
    except CodecError:  # a group that does not divide this dimension
        key = value = "int8"
        slots = slots_of(key, value, shape, dims, exact, seed)
    heads = kv_heads * group
    q, k, v = (made(batch, n, d, dtype, seed + n) for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, dims[1])))
    position = torch.where(torch.arange(batch) % 2 == data.draw(st.integers(0, 2)), -1, 500 + torch.arange(batch))
    position = position.to(torch.int32).unsqueeze(1)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if data.draw(st.booleans()) else None
    softcap, sliding = data.draw(st.sampled_from([None, 3.0])), data.draw(st.sampled_from([None, 40]))
    variant = Variant(dim**-0.5, softcap, sliding, sinks)
    mass = torch.rand(shape) if data.draw(st.booleans()) else None
    weigh = data.draw(st.booleans())

    after, slot = expected(slots, k, v, position)
    before = None if mass is None else mass.clone()
    done = step.step(q, slots, k, v, position, variant, mass, weigh)

    assert done is not None
    assert done.out is not None
    assert torch.equal(done.slot, slot)
    assert torch.equal(slots.positions, after.positions)
    for own, other in zip(slots.tensors(), after.tensors(), strict=True):
        assert torch.equal(own.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    queries, shift = after.keys.query(q.reshape(batch, kv_heads, group, dim).float())
    bound = bound_of(key, value, *["bf16"][:exact])
    want, _, weights = oracle(Case(queries, shift, after, variant, bound), sinks=True)
    want = after.values.restore(want).view(batch, heads, 1, -1)
    assert done.out.dtype is dtype
    largest = want.abs().max().item()
    assert (done.out.double() - want).abs().max().item() <= (bound * 2 + DTYPES[dtype]) * largest
    assert (done.weights is not None) == weigh
    if done.weights is not None:
        torch.testing.assert_close(done.weights.double(), weights, rtol=0, atol=bound)
    if mass is not None and before is not None:
        had = before.double().scatter(2, slot, 0.0)
        torch.testing.assert_close(mass.double(), had + weights * (position >= 0).unsqueeze(1), rtol=1e-6, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["off", "double", "dims", "elements apart", "mass apart", "full"])
def test_what_is_not_served_is_left_as_it_is(
    each_level: int, what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_of("int4", "int4", (1, 2, 30), (64, 64), 4, 1)
    q, k, v = (made(1, n, 64, dtype, n) for n in (6, 2, 2))
    mass = torch.rand(1, 2, 30)
    if what == "off":
        monkeypatch.setenv(level.VARIABLE, "off")
    elif what == "double":
        q = q.double()
    elif what == "dims":
        k = made(1, 2, 32, dtype, 2)
    elif what == "elements apart":
        v = v.transpose(1, 3).contiguous().transpose(1, 3)
    elif what == "mass apart":
        mass = torch.rand(1, 30, 2).transpose(1, 2)
    else:
        slots.positions.fill_(3)
    before, had = copy.deepcopy(slots), mass.clone()
    position = torch.full((1, 1), 99, dtype=torch.int32)
    assert step.step(q, slots, k, v, position, Variant(0.125), mass, False) is None
    assert torch.equal(slots.positions, before.positions)
    assert all(map(torch.equal, slots.tensors(), before.tensors()))
    assert torch.equal(mass, had)


@pytest.mark.parametrize(
    "what",
    ["query heads", "query dim", "key heads", "value rows", "value dim", "tokens", "position", "mass", "float64"],
)
def test_shapes_that_do_not_agree_are_refused_by_torch_and_write_nothing(each_level: int, what: str) -> None:
    slots = slots_of("bf16", "bf16", (2, 2, 30), (64, 64), 0, 1)
    q, k, v = (made(2, n, 64, torch.float32, n) for n in (4, 2, 2))
    position, mass = torch.full((2, 1), 99, dtype=torch.int32), torch.zeros(2, 2, 30)
    if what == "query heads":
        q = q[:, :3]
    elif what == "query dim":
        q = q[..., :48]
    elif what == "key heads":
        k = k[:, :1]
    elif what == "value rows":
        v = v[:1]
    elif what == "value dim":
        v = v[..., :48]
    elif what == "tokens":
        k = k.expand(-1, -1, 2, -1)
    elif what == "position":
        position = position[:1]
    elif what == "mass":
        mass = torch.zeros(2, 2, 20)
    else:
        mass = mass.double()
    before = copy.deepcopy(slots)
    assert step.step(q, slots, k, v, position, Variant(0.125), mass, True) is None
    assert torch.equal(slots.positions, before.positions)
    assert all(map(torch.equal, slots.tensors(), before.tensors()))
    assert not mass.any()
    if what in ("key heads", "value rows", "value dim", "tokens", "position"):
        assert quantize.write_token(slots, k, v, position) is None
    if what in ("query heads", "query dim"):
        assert attention.attend(q.reshape(2, -1, 1, q.shape[3]), None, slots, Variant(0.125)) is None
    if what in ("key heads", "value rows", "value dim"):
        assert not quantize.write_vectors(slots, k, v, 1, rows=None, columns=None, at=None)
    assert all(map(torch.equal, slots.tensors(), before.tensors()))


def test_indices_that_are_not_as_many_as_vectors_are_not_served(each_level: int) -> None:
    slots = slots_of("bf16", "bf16", (2, 2, 30), (64, 64), 0, 1)
    x, before = made(2, 2, 64, torch.float32, 1), copy.deepcopy(slots)
    one = torch.zeros(1, dtype=torch.int64)
    for rows, columns, at in ((one, one, one[:0]), (one, one[:0], one), (one, one, one.int())):
        assert not quantize.write_vectors(slots, x, x, 0, rows=rows, columns=columns, at=at)
    assert all(map(torch.equal, slots.tensors(), before.tensors()))


@pytest.mark.parametrize("forced", [None, "off"])
def test_a_row_without_a_token_gives_no_weights_whatever_its_query(
    native: object, forced: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced is not None:
        monkeypatch.setenv(level.VARIABLE, forced)
    slots = slots_of("fp32", "fp32", (2, 1, 30), (64, 64), 0, 1)
    q, k, v = (made(2, n, 64, torch.float32, n) for n in (2, 1, 1))
    q[1] = torch.nan
    mass = torch.ones(2, 1, 30)
    done = ops.decode(q, slots, k, v, torch.tensor([[50], [-1]], dtype=torch.int32), variant=Variant(0.125), mass=mass)
    assert torch.equal(mass[1, 0], torch.ones(30).index_fill(0, done.slot[1, 0], 0.0))
    assert mass[0].sum() == pytest.approx(30.0)  # the new token's slot began at nothing, and weights sum to one


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_has_a_gradient_keeps_it(native: object, which: int) -> None:
    slots = slots_of("fp32", "fp32", (1, 1, 30), (64, 64), 0, 1)
    inputs = [made(1, n, 64, torch.float32, n) for n in (2, 1, 1)]
    inputs[which] = inputs[which].detach().requires_grad_()
    position = torch.full((1, 1), 99, dtype=torch.int32)
    assert step.step(inputs[0], slots, *inputs[1:], position, Variant(0.125), None, False) is None
    with torch.no_grad():
        assert step.step(inputs[0], slots, *inputs[1:], position, Variant(0.125), None, False) is not None


@pytest.mark.parametrize("dim", [20, 40])
def test_torch_attends_where_only_storing_is_served(each_level: int, dim: int) -> None:
    """The kernels store vectors of any length, and attend to those of a multiple of 16."""
    slots = slots_of("bf16", "bf16", (2, 2, 30), (dim, dim), 0, 1)
    q, k, v = (made(2, n, dim, torch.float32, n) for n in (6, 2, 2))
    position, mass = torch.full((2, 1), 99, dtype=torch.int32), torch.rand(2, 2, 30)
    after, slot = expected(slots, k, v, position)
    had = mass.double().scatter(2, slot, 0.0)
    done = ops.decode(q, slots, k, v, position, variant=Variant(0.125), mass=mass, weigh=True)
    assert torch.equal(done.slot, slot)
    assert torch.equal(slots.positions, after.positions)
    want, _, weights = oracle(Case(q.reshape(2, 2, 3, dim), None, after, Variant(0.125), 0.0), sinks=True)
    torch.testing.assert_close(done.out.view_as(want).double(), want, rtol=1e-5, atol=1e-5)
    assert done.weights is not None
    torch.testing.assert_close(done.weights.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mass.double(), had + weights, rtol=1e-5, atol=1e-6)


def test_the_kernels_and_torch_say_the_same(each_level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ops.decode`` with kernels and without, over forks' slots too."""
    results = []
    for forced in (None, "off"):
        if forced is not None:
            monkeypatch.setenv(level.VARIABLE, forced)
        slots = slots_of("int4", "int8", (2, 2, 70), (64, 64), 4, 5)
        slots.keys.fork()
        slots.values.fork()
        for side in (slots.keys, slots.values):
            side.resize(100)
        slots.positions = ops.moved(slots.positions, 100, None, -1)
        mass = torch.zeros(2, 2, 100)
        outs = []
        for token in range(3):
            q, k, v = (made(2, n, 64, torch.float32, n + 10 * token) for n in (6, 2, 2))
            position = torch.tensor([[200 + token], [-1 if token == 1 else 300 + token]], dtype=torch.int32)
            done = ops.decode(q, slots, k, v, position, variant=Variant(0.125), mass=mass)
            assert done.weights is None
            outs.append(done.out)
        results.append((torch.stack(outs), mass, slots.positions))
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_threads_do_not_share_what_lies_between(native: object) -> None:
    """Steps of several sizes in several threads at once give what each gives alone."""
    cases = [(1, 2, 3, 64), (3, 2, 9, 128), (2, 1, 1, 256), (1, 3, 3, 32)]

    def outcome(batch: int, kv_heads: int, group: int, dim: int) -> tuple[Tensor, Tensor]:
        slots = slots_of("int4", "int8", (batch, kv_heads, 70), (dim, dim), 4, dim)
        heads = kv_heads * group
        q, k, v = (made(batch, n, dim, torch.float32, n) for n in (heads, kv_heads, kv_heads))
        position, mass = torch.full((batch, 1), 99, dtype=torch.int32), torch.zeros(batch, kv_heads, 70)
        return ops.decode(q, slots, k, v, position, variant=Variant(0.125), mass=mass).out, mass

    alone = [outcome(*case) for case in cases]
    wrong: list[tuple[int, ...]] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not all(map(torch.equal, outcome(*cases[index]), alone[index])):
                wrong.append(cases[index])

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
