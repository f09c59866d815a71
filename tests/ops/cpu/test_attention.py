"""Attention of a few queries over slots: native kernels against float64 on the same stored values, at every level."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow import ops
from kvwinnow.codecs import parse_codec
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.errors import CodecError
from kvwinnow.ops import Slots, Variant
from kvwinnow.ops.cpu import attention, level
from tests.running import computing_on

STORED = ["fp32", "bf16", "fp16", "int8", "int8:group=32", "int4", "int4:group=32"]
STORED += ["fp8", "fp8:group=32", "fp4", "fp4:style=mx"]
BOUNDS = {**dict.fromkeys(("fp32", "fp16", "fp8", "int8", "int4", "fp4"), 1e-5), "bf16": 3e-5}
"""Largest error relative to the largest output; where AMX takes bfloat16, queries and weights have 17 bits."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        bound: the error that is allowed.
    """

    q: Tensor
    shift: Tensor | None
    slots: Slots
    variant: Variant
    bound: float


def stored(spec: str, shape: tuple[int, int, int, int], *, exact: int, keys: bool, seed: int) -> Vectors:
    """Random vectors (B, Hkv, S, D), some channels of which are much larger than others, in a codec's form."""
    batch, heads, slots, _ = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., :2] *= 4
    codec = parse_codec(spec)
    own = torch.float32 if spec == "fp32" else torch.bfloat16
    vectors = Vectors.allocate(codec, shape, exact=exact, centred=keys, dtype=own, device=torch.device("cpu"))
    vectors.freeze(x, [0] * batch)
    rows = torch.arange(batch * heads).repeat_interleave(slots)
    vectors.write_many(rows, torch.arange(slots).repeat(batch * heads), x.flatten(0, 2))
    return vectors


def bound_of(*specs: str) -> float:
    return max(BOUNDS[spec.split(":")[0]] for spec in specs)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, slots = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 20])), draw(st.integers(1, 150))
    dim = draw(st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 192, 256]))
    value_dim = draw(st.sampled_from([dim, dim, 64]))
    key, value = draw(st.sampled_from(STORED)), draw(st.sampled_from(STORED))
    exact, seed = draw(st.sampled_from([0, 4, 17])), draw(st.integers(0, 999))
    try:
        keys = stored(key, (batch, kv_heads, slots, dim), exact=exact, keys=True, seed=seed)
        values = stored(value, (batch, kv_heads, slots, value_dim), exact=exact, keys=False, seed=seed + 1)
    except CodecError:  # a group that does not divide this dimension
        key = value = "int8"
        keys = stored(key, (batch, kv_heads, slots, dim), exact=exact, keys=True, seed=seed)
        values = stored(value, (batch, kv_heads, slots, value_dim), exact=exact, keys=False, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(batch, kv_heads, slots, generator=generator).argsort(-1).to(torch.int32)
    empty = torch.rand(positions.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    positions.masked_fill_(empty, -1)
    sinks = torch.randn(kv_heads * rows, generator=generator) if draw(st.booleans()) else None
    variant = Variant(
        dim**-0.5,
        softcap=draw(st.sampled_from([None, 3.0])),
        sliding=draw(st.sampled_from([None, 40])),
        sinks=sinks,
    )
    q, shift = keys.query(torch.randn(batch, kv_heads, rows, dim, generator=generator))
    # Exact slots hold bfloat16, whatever the codec.
    return Case(q, shift, Slots(keys, values, positions), variant, bound_of(key, value, *["bf16"][:exact]))


def oracle(case: Case, sinks: bool) -> tuple[Tensor, Tensor, Tensor]:
    slots, variant = case.slots, case.variant
    keys, values = (side.read(0, side.slots).double() for side in (slots.keys, slots.values))
    logits = case.q.double() @ keys.mT
    if case.shift is not None:
        logits += case.shift.double()
    logits *= variant.scale
    if variant.softcap is not None:
        logits = variant.softcap * (logits / variant.softcap).tanh()
    hidden = slots.positions < 0
    if variant.sliding is not None:
        hidden |= slots.positions <= slots.positions.amax(-1, keepdim=True) - variant.sliding
    logits.masked_fill_(hidden.unsqueeze(2), -torch.inf)
    lse = logits.logsumexp(-1)
    if sinks and variant.sinks is not None:
        lse = torch.logaddexp(lse, variant.sinks.double().view(1, logits.shape[1], -1))
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return weights @ values, lse, weights.mean(2)


def check(got: attention.Attended | None, want: tuple[Tensor, Tensor, Tensor], bound: float) -> None:
    assert got is not None
    for name, own, other in zip(got._fields, got, want, strict=True):
        finite = other.isfinite()
        assert torch.equal(own.isfinite(), finite), name
        largest = max(1.0 if name == "lse" else 0.0, other[finite].abs().max().item() if finite.any() else 0.0)
        error = (own[finite] - other[finite]).abs().max().item() if finite.any() else 0.0
        assert error <= bound * largest, (name, error, largest)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases(), sinks=st.booleans())
def test_few_queries_over_slots_equal_float64(each_level: int, case: Case, sinks: bool) -> None:
    check(
        attention.attend(case.q, case.shift, case.slots, case.variant, sinks=sinks, weigh=True),
        oracle(case, sinks),
        case.bound,
    )


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("key", STORED)
def test_every_format_of_keys_meets_every_format_of_values(each_level: int, key: str, dim: int) -> None:
    """More than a unit of work, which ends within a block; what a neighbour's nibble holds is another element."""
    keys = stored(key, (1, 2, 1100, dim), exact=4, keys=True, seed=3)
    positions = torch.arange(1100, dtype=torch.int32).expand(1, 2, -1).contiguous()
    q, shift = keys.query(torch.randn(1, 2, 3, dim, generator=torch.Generator().manual_seed(4)))
    for value in STORED:
        values = stored(value, (1, 2, 1100, dim), exact=4, keys=False, seed=5)
        case = Case(q, shift, Slots(keys, values, positions), Variant(dim**-0.5), bound_of(key, value))
        check(attention.attend(q, shift, case.slots, case.variant, weigh=True), oracle(case, False), case.bound)


@pytest.mark.parametrize("spec", ["bf16", "int8", "int4", "fp8", "fp4"])
def test_a_long_tail_of_small_weights_is_not_lost(each_level: int, spec: str) -> None:
    """One slot has half of the weight, and thousands share the rest: fixed point must not round them to nothing."""
    count, dim = 20_000, 64
    keys = stored(spec, (1, 1, count, dim), exact=0, keys=False, seed=1)
    values = stored(spec, (1, 1, count, dim), exact=0, keys=False, seed=2)
    small = torch.randn(1, 1, 1, dim, generator=torch.Generator().manual_seed(1)) * 0.01
    first = keys.read(0, 1).double()
    q = (small + first * (torch.tensor(count).log() / (first * first).sum())).float()
    positions = torch.arange(count, dtype=torch.int32).view(1, 1, -1)
    case = Case(q, None, Slots(keys, values, positions), Variant(1.0), bound_of(spec))
    check(attention.attend(q, None, case.slots, case.variant, weigh=True), oracle(case, False), case.bound)


@pytest.mark.parametrize("spec", STORED)
@pytest.mark.parametrize("hidden", [True, False], ids=["hidden", "of-no-weight"])
def test_a_large_value_without_weight_costs_the_others_nothing(each_level: int, hidden: bool, spec: str) -> None:
    """An evicted slot keeps what it held, until it is written again; and attention may pass by a visible one."""
    count, dim, large = 200, 64, 50
    keys = stored("fp32", (1, 2, count, dim), exact=0, keys=False, seed=1)
    values = Vectors.allocate(
        parse_codec(spec), (1, 2, count, dim), exact=0, centred=False, dtype=torch.float32, device=torch.device("cpu")
    )
    x = torch.randn(1, 2, count, dim, generator=torch.Generator().manual_seed(3))
    x[:, :, large] *= 1e4
    values.write_first(x)
    positions = torch.arange(count, dtype=torch.int32).expand(1, 2, -1).clone()
    q = torch.randn(1, 2, 4, dim, generator=torch.Generator().manual_seed(4))
    if hidden:
        positions[:, :, large] = -1
    else:  # a logit of -40
        q[..., 0] = 4
        keys.parts[0][:, :, large] = 0
        keys.parts[0][:, :, large, 0] = -80
    case = Case(q, None, Slots(keys, values, positions), Variant(dim**-0.5), bound_of("fp32", spec))
    check(attention.attend(q, None, case.slots, case.variant, weigh=True), oracle(case, False), case.bound)


def test_every_number_that_fp8_knows_is_read_exactly(each_level: int) -> None:
    """Each slot by itself: as a value it has all of the weight, as a key it meets queries that pick one element."""
    dim, largest = 32, 0x7E  # that is 448, which every vector has, so that its scale is 1
    codes = [code for code in range(256) if code & 0x7F < 0x7F]  # what is left is NaN
    rows = [[largest, *codes[start : start + dim - 1]] for start in range(0, len(codes), dim - 1)]
    rows[-1] += [0] * (dim - len(rows[-1]))
    want = torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codec = parse_codec("fp8")
    vectors = Vectors.allocate(
        codec, (len(rows), 1, 1, dim), exact=0, centred=False, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    vectors.write_many(torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.long), want)
    q = torch.eye(dim).expand(len(rows), 1, dim, dim).contiguous()
    slots = Slots(vectors, vectors, torch.zeros(len(rows), 1, 1, dtype=torch.int32))
    got = attention.attend(q, None, slots, Variant(1.0))
    assert got is not None
    assert torch.equal(got.out, want.view(-1, 1, 1, dim).expand(-1, -1, dim, -1))
    torch.testing.assert_close(got.lse, want.view(got.lse.shape), rtol=1e-6, atol=0)


def test_equal_slots_have_equal_weights(each_level: int) -> None:
    """Ties are broken by position, so they have to be ties, wherever in a block the slots lie."""
    for spec in STORED:
        keys = stored(spec, (1, 1, 200, 64), exact=0, keys=True, seed=8)
        for part in keys.parts:
            part[:, :, 1:] = part[:, :, :1]
        q, shift = keys.query(torch.randn(1, 1, 3, 64, generator=torch.Generator().manual_seed(9)))
        positions = torch.arange(200, dtype=torch.int32).view(1, 1, -1)
        got = attention.attend(q, shift, Slots(keys, keys, positions), Variant(0.125), weigh=True)
        assert got is not None
        assert got.weights.unique().numel() == 1, spec


@pytest.mark.parametrize("spec", ["fp32", "bf16", "int4"])
def test_results_do_not_depend_on_the_number_of_threads(each_level: int, spec: str) -> None:
    keys = stored(spec, (2, 3, 3000, 64), exact=4, keys=True, seed=1)
    q, shift = keys.query(torch.randn(2, 3, 3, 64))
    positions = torch.arange(3000, dtype=torch.int32).expand(2, 3, -1).contiguous()
    slots, found = Slots(keys, keys, positions), []
    for threads in (1, 2, 3):
        with computing_on(threads):
            found.append(attention.attend(q, shift, slots, Variant(0.125), weigh=True))
    assert found[0] is not None
    for other in found[1:]:
        assert other is not None
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_matrix_products_in_between_change_nothing(each_level: int) -> None:
    """oneDNN uses AMX too: tiles are configured anew in every call, and given back."""
    keys = stored("int4", (1, 2, 500, 64), exact=4, keys=True, seed=1)
    q, shift = keys.query(torch.randn(1, 2, 3, 64))
    slots = Slots(keys, keys, torch.arange(500, dtype=torch.int32).expand(1, 2, -1).contiguous())
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    product = matrix @ matrix
    first = attention.attend(q, shift, slots, Variant(0.125), weigh=True)
    assert first is not None
    for _ in range(20):
        assert torch.equal(matrix @ matrix, product)
        again = attention.attend(q, shift, slots, Variant(0.125), weigh=True)
        assert again is not None
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("spec", ["bf16", "int8", "int4", "fp4"])
def test_an_overwritten_slot_leaves_its_neighbours_alone(each_level: int, spec: str) -> None:
    keys = stored(spec, (1, 1, 70, 64), exact=4, keys=True, seed=1)
    values = stored(spec, (1, 1, 70, 64), exact=4, keys=False, seed=2)
    slots = Slots(keys, values, torch.arange(70, dtype=torch.int32).view(1, 1, -1).contiguous())
    new = torch.randn(1, 1, 1, 64)
    for slot in (0, 5, 33, 69):
        before = [side.read(0, 70).clone() for side in (keys, values)]
        for side, old in zip((keys, values), before, strict=True):
            side.write_one(torch.tensor([[[slot]]]), new)
            others = torch.arange(70) != slot
            assert torch.equal(side.read(0, 70)[:, :, others], old[:, :, others])
        q, shift = keys.query(torch.randn(1, 1, 3, 64))
        case = Case(q, shift, slots, Variant(0.125), bound_of(spec))
        check(attention.attend(q, shift, slots, case.variant, weigh=True), oracle(case, False), case.bound)


def test_shared_segments_are_read_where_they_lie(each_level: int) -> None:
    whole = stored("int4", (1, 2, 90, 64), exact=4, keys=True, seed=1)
    q, shift = whole.query(torch.randn(1, 2, 3, 64))
    positions = torch.arange(90, dtype=torch.int32).expand(1, 2, -1).contiguous()
    want = oracle(Case(q, shift, Slots(whole, whole, positions), Variant(0.125), 0.0), False)
    shared = copy.deepcopy(whole).fork()
    assert shared.shared
    got = attention.attend(q, shift, Slots(shared, shared, positions), Variant(0.125), weigh=True)
    check(got, want, BOUNDS["int4"])


@pytest.mark.parametrize("what", ["dim", "dtype", "rows", "off", "strides"])
def test_what_is_not_served_is_left_to_torch(native: object, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    dim, rows = (20 if what == "dim" else 64), (attention.ROWS + 1 if what == "rows" else 3)
    keys = stored("fp32", (1, 2, 30, dim), exact=0, keys=True, seed=1)
    if what == "dtype":
        keys.parts = tuple(part.double() for part in keys.parts)
    if what == "strides":
        keys.parts = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in keys.parts)
    if what == "off":
        monkeypatch.setenv(level.VARIABLE, "off")
    slots = Slots(keys, keys, torch.arange(30, dtype=torch.int32).expand(1, 2, -1).contiguous())
    q = torch.randn(1, 2, rows, dim)
    assert attention.attend(q, None, slots, Variant(0.125)) is None
    if what not in ("dtype", "rows"):
        out, _ = ops.attention(q.view(1, 2 * rows, 1, dim), slots, variant=Variant(0.125))
        want = oracle(Case(q, None, slots, Variant(0.125), 0.0), False)[0]
        torch.testing.assert_close(out.view_as(want), want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["bf16", "int4"])
def test_a_graph_sees_one_operator(each_level: int, spec: str) -> None:
    keys = stored(spec, (1, 2, 40, 64), exact=4, keys=True, seed=1)
    q, shift = keys.query(torch.randn(1, 2, 3, 64))
    sides = attention._pieces(keys)
    assert sides is not None
    positions = torch.arange(40, dtype=torch.int32).expand(1, 2, -1).contiguous()
    tensors, layout = sides.tensors * 2, sides.layout * 2
    arguments = (q.float(), shift, positions, None, None, tensors, layout, 0.125, 0.0, True, 64)
    torch.library.opcheck(attention.attend_slots, arguments, test_utils=("test_schema", "test_faketensor"))
    direct = attention.attend(q, shift, Slots(keys, keys, positions), Variant(0.125), weigh=True)
    assert direct is not None
    for own, other in zip(attention.attend_slots(*arguments), direct, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("spec", STORED)
@pytest.mark.parametrize("where", ["queries", "keys", "values"])
def test_what_overflowed_does_not_look_like_a_result(each_level: int, spec: str, where: str) -> None:
    """Where what is stored gives NaN or infinity in float64 it does here, and NaN in no other rows."""
    keys = stored(spec, (1, 2, 150, 64), exact=4, keys=True, seed=1)
    values = stored(spec, (1, 2, 150, 64), exact=4, keys=False, seed=2)
    clean, shift = keys.query(torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(3)))
    positions = torch.arange(150, dtype=torch.int32).expand(1, 2, -1).contiguous()
    for bad, slot in ((torch.nan, 70), (torch.inf, 70), (torch.nan, 1), (torch.inf, 1)):
        q, sides = clean.clone(), [copy.deepcopy(keys), copy.deepcopy(values)]
        new = torch.ones(1, 2, 1, 64)
        new[:, 1, :, 3] = bad
        if where == "queries":
            q[0, 1, 2, 3] = bad
        else:
            sides[where == "values"].write_one(torch.full((1, 2, 1), slot), new)
        case = Case(q, shift, Slots(sides[0], sides[1], positions), Variant(0.125), bound_of(spec))
        got, want = attention.attend(q, shift, case.slots, case.variant, weigh=True), oracle(case, False)
        assert got is not None
        broken = [(~own.isfinite()).any(-1) for own in (got.out, want[0], got.weights, want[2])]
        assert broken[0][broken[1]].all(), (bad, slot)
        assert broken[2][broken[3]].all(), (bad, slot)
        if bad != torch.inf:  # products with infinity go beyond float32, or are no numbers, sooner than in float64
            assert torch.equal(broken[0], broken[1]), slot
            assert torch.equal(broken[2], broken[3]), slot


@pytest.mark.parametrize(("spec", "dim"), [("fp32", 20), ("int8", 72), ("fp4:group=8", 64)])
def test_a_graph_leaves_to_torch_what_is_not_served(native: object, spec: str, dim: int) -> None:
    keys = stored(spec, (1, 2, 40, dim), exact=4, keys=True, seed=1)
    slots = Slots(keys, keys, torch.arange(40, dtype=torch.int32).expand(1, 2, -1).contiguous())

    def attend(q: Tensor) -> Tensor:
        return ops.attention(q, slots, variant=Variant(0.125))[0]

    q = torch.randn(1, 6, 1, dim, generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    # Without a graph kernels rotate the query and multiply it with the mean, in another order than torch.
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q), attend(q), rtol=1e-5, atol=1e-6)


def test_queries_that_have_a_gradient_keep_it(native: object) -> None:
    keys = stored("fp32", (1, 2, 40, 64), exact=0, keys=True, seed=1)
    slots = Slots(keys, keys, torch.arange(40, dtype=torch.int32).expand(1, 2, -1).contiguous())
    q = torch.randn(1, 6, 1, 64, requires_grad=True)
    out, _ = ops.attention(q, slots, variant=Variant(0.125))
    assert out.requires_grad
    with torch.no_grad():
        assert attention.attend(q.view(1, 2, 3, 64), None, slots, Variant(0.125)) is not None


def test_slots_without_a_position_each_are_not_served(native: object) -> None:
    keys = stored("fp32", (1, 2, 40, 64), exact=0, keys=True, seed=1)
    positions = torch.arange(30, dtype=torch.int32).expand(1, 2, -1).contiguous()
    assert attention.attend(torch.randn(1, 2, 3, 64), None, Slots(keys, keys, positions), Variant(0.125)) is None
