"""What native kernels store, bit for bit what the codecs of torch store, at every level."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow import SnapKV, ops
from kvwinnow.cache.layer import LayerCache
from kvwinnow.cache.step import Step
from kvwinnow.codecs import Codec, parse_codec, rotate
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops.cpu import level, quantize
from kvwinnow.ops.cpu.rotation import rotated
from kvwinnow.policies import Phase
from tests.running import computing_on

CODECS = (
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:group=16",
    "fp8",
    "fp8:group=20",
    "int4",
    "int4:group=20",
    "int4:rotate=false,centre=false",
    "fp4",
    "fp4:style=mx",
    "fp4:rotate=false,centre=false",
    "fp4:style=mx,rotate=false,centre=false",
)
DIMS = (80, 64, 128, 40, 20)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
SPECIAL = (0.0, -0.0, NAN, INF, -INF, 1e-45, -1e-40, 2.0**-24, 2.0**-25, 6e-8, 65504.0, -65520.0, 1e5, 3e38, -3e38, 1.0)

quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def fits(codec: Codec, dim: int) -> bool:
    group = getattr(codec, "group", None)
    return group is None or dim % group == 0


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int, kind: str) -> Tensor:
    """Vectors: plain, of all orders of magnitude, constant, on ties of rounding, or with special values among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x = x * 10 ** torch.empty(*shape[:-1], 1).uniform_(-44, 38, generator=generator)
    elif kind == "constant":
        x = x[..., :1].expand(shape)
    elif kind == "ties":  # halves, among numbers that make the scales powers of two
        x = torch.randint(-30, 31, shape, generator=generator) / 2
    elif kind == "special":
        chosen = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.1, chosen, x)
    elif kind == "zeros":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0)
    return x.to(dtype)


def exact_in_sums(x: Tensor) -> Tensor:
    """Multiples of 2^-10 up to 2^10, whose sums are exact in float64, and NaNs and infinities."""
    near = (x.double().clamp(-(2.0**10), 2.0**10) * 2**10).round() / 2**10
    return torch.where(x.isfinite(), near.to(x.dtype), x)


KINDS = ("plain", "wide", "constant", "ties", "special", "zeros")


def strided(x: Tensor, layout: str) -> Tensor:
    """The same (B, H, n, D), lying as a model's keys do, or within something larger."""
    if layout == "model":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "part":
        large = torch.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 3, x.shape[3] + 5), 7.0, dtype=x.dtype)
        inside = large[:, 1:, 2 : x.shape[2] + 2, 3 : x.shape[3] + 3]
        inside.copy_(x)
        return inside
    return x.contiguous()


def filled(side: Vectors, seed: int) -> Vectors:
    """Any bytes where vectors will lie, and a mean and a tensor scale where there are some."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (side.exact, *side.parts):
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    if side.mean is not None:
        side.mean.copy_(exact_in_sums(torch.randn(side.mean.shape, generator=generator)))
    if side.scale is not None:
        side.scale.uniform_(0.001, 3, generator=generator)
    return side


def empty_slots(
    k_codec: Codec, v_codec: Codec, shape: tuple[int, int, int, int], exact: int, dtype: torch.dtype
) -> ops.Slots:
    device = torch.device("cpu")
    keys = Vectors.allocate(k_codec, shape, exact=exact, centred=True, dtype=dtype, device=device)
    values = Vectors.allocate(v_codec, shape, exact=exact, centred=False, dtype=dtype, device=device)
    positions = torch.arange(shape[2], dtype=torch.int32).repeat(*shape[:2], 1)
    return ops.Slots(filled(keys, 1), filled(values, 2), positions)


def held(slots: ops.Slots) -> list[Tensor]:
    return [slots.positions, *(x for side in (slots.keys, slots.values) for x in (side.exact, *side.parts))]


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but that a NaN is a NaN: torch's own bits of it depend on how many numbers it converts at once."""
    if one.dtype.is_floating_point:
        nan = one.isnan()
        if not torch.equal(nan, other.isnan()):
            return False
        one, other = one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_but(one: Tensor, other: Tensor, slot: Tensor) -> bool:
    """The same of all slots but one of each KV head, (B, Hkv, 1), which may lie in another tensor."""
    own = (torch.arange(one.shape[2]) == slot).unsqueeze(-1)
    blank = torch.zeros((), dtype=one.dtype)
    return same(torch.where(own, blank, one), torch.where(own, blank, other))


def assert_same(native: ops.Slots, plain: ops.Slots) -> None:
    for index, (one, other) in enumerate(zip(held(native), held(plain), strict=True)):
        assert same(one, other), f"tensor {index}"


@st.composite
def cases(draw: st.DrawFn) -> tuple[ops.Slots, Tensor, Tensor]:
    """Slots, and keys and values of a few new tokens."""
    dim = draw(st.sampled_from(DIMS))
    fitting = [codec for codec in map(parse_codec, CODECS) if fits(codec, dim)]
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    spare, exact = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    dtype, seed, layout = (
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 999)),
        draw(st.sampled_from(["plain", "model", "part"])),
    )
    codecs = draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))
    slots = empty_slots(*codecs, (batch, heads, exact + tokens + spare, dim), exact, dtype)
    k, v = (some((batch, heads, tokens, dim), dtype, seed + i, draw(st.sampled_from(KINDS))) for i in (0, 1))
    k, v = (exact_in_sums(x) if codec.rotates else x for x, codec in zip((k, v), codecs, strict=True))
    return slots, strided(k, layout), strided(v, layout)


@quick
@given(case=cases(), seed=st.integers(0, 99))
def test_any_slots_are_written_as_torch_writes_them(
    each_level: int, case: tuple[ops.Slots, Tensor, Tensor], seed: int
) -> None:
    native, k, v = case
    plain = copy.deepcopy(native)
    batch, heads, tokens, _ = k.shape
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(batch * heads, tokens, generator=generator) < 0.7
    rows, columns = chosen.nonzero(as_tuple=True)
    order = torch.rand(batch * heads, native.positions.shape[2], generator=generator).argsort(-1)
    places = order[rows, columns]
    assert quantize.write_vectors(native, k, v, 0, rows=rows, columns=columns, at=places)
    plain.keys.write_many(rows, places, k.flatten(0, 1)[rows, columns])
    plain.values.write_many(rows, places, v.flatten(0, 1)[rows, columns])
    assert_same(native, plain)


@quick
@given(case=cases(), all_of_them=st.booleans(), seed=st.integers(0, 99))
def test_the_first_slots_are_written_as_torch_writes_them(
    each_level: int, case: tuple[ops.Slots, Tensor, Tensor], all_of_them: bool, seed: int
) -> None:
    native, k, v = case
    plain = copy.deepcopy(native)
    order = None
    if not all_of_them:
        order = torch.rand(k.shape[:3], generator=torch.Generator().manual_seed(seed)).argsort(-1)[
            ..., : k.shape[2] // 2
        ]
    assert quantize.write_vectors(
        native, k, v, k.shape[2] if order is None else order.shape[2], rows=None, columns=order, at=None
    )
    plain.keys.write_first(k if order is None else ops.taken(k, order))
    plain.values.write_first(v if order is None else ops.taken(v, order))
    assert_same(native, plain)


@quick
@given(case=cases(), seed=st.integers(0, 99))
def test_a_token_goes_into_the_first_empty_slot_and_all_else_survives(
    each_level: int, case: tuple[ops.Slots, Tensor, Tensor], seed: int
) -> None:
    native, k, v = case
    k, v = k[:, :, :1], v[:, :, :1]
    batch, heads, count = native.positions.shape
    generator = torch.Generator().manual_seed(seed)
    empty = torch.rand(batch, heads, count, generator=generator) < 0.3
    empty.scatter_(2, torch.randint(0, count, (batch, heads, 1), generator=generator), True)
    native.positions.masked_fill_(empty, -1)
    before, plain = copy.deepcopy(native), copy.deepcopy(native)
    new = torch.randint(count, 2**31 - 1, (batch, 1), dtype=torch.int32, generator=generator)
    at = quantize.write_token(native, k, v, new)
    assert at is not None
    assert torch.equal(at.squeeze(-1), empty.to(torch.uint8).argmax(-1))
    plain.keys.write_one(at, k)
    plain.values.write_one(at, v)
    plain.positions.scatter_(2, at, new.unsqueeze(1).expand(-1, heads, -1))
    assert_same(native, plain)
    # Beside the one slot every byte is what it was, the halves of bytes and the scales of neighbours among them.
    edge = native.keys.exact.shape[2]
    for now, was in ((native.keys, before.keys), (native.values, before.values)):
        assert same_but(now.exact, was.exact, at)
        assert all(same_but(one, other, at - edge) for one, other in zip(now.parts, was.parts, strict=True))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float16_and_sixteen_bits_of_every_bfloat16(each_level: int, codec: str, dtype: torch.dtype) -> None:
    """All numbers of 16 bits, in groups of neighbours and of strangers: all scales and codes there are."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16 if dtype is torch.float16 else torch.bfloat16).to(dtype)
    numbers = numbers.where(~numbers.isnan(), 0)
    x = torch.stack([numbers.view(-1, 64), numbers.view(64, -1).mT])
    x = torch.cat([x, x * (1 / 3)], dim=1).unsqueeze(0)
    made = parse_codec(codec if ":group=20" not in codec else codec.replace("20", "8"))
    x = exact_in_sums(x) if made.rotates else x
    native = empty_slots(made, made, (1, 2, x.shape[2], 64), 0, dtype)
    plain = copy.deepcopy(native)
    assert quantize.write_vectors(native, x, x, x.shape[2], rows=None, columns=None, at=None)
    plain.keys.write_first(x)
    plain.values.write_first(x)
    assert_same(native, plain)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_pieces_change_nothing(each_level: int, threads: int) -> None:
    with computing_on(threads):
        codec = parse_codec("int4")
        native = empty_slots(codec, codec, (2, 3, 300, 64), 4, torch.bfloat16)
        plain = copy.deepcopy(native)
        k, v = (some((2, 3, 300, 64), torch.bfloat16, seed, "plain") for seed in (1, 2))
        assert quantize.write_vectors(native, k, v, 300, rows=None, columns=None, at=None)
        plain.keys.write_first(k)
        plain.values.write_first(v)
        assert_same(native, plain)


@quick
@given(
    dim=st.sampled_from([64, 80, 96, 128, 512, 2, 15]),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    layout=st.sampled_from(["plain", "model", "part"]),
)
@example(dim=256, dtype=torch.float32, out=torch.float32, seed=1, layout="plain")
def test_the_rotation_is_that_of_torch(
    each_level: int, dim: int, dtype: torch.dtype, out: torch.dtype, seed: int, layout: str
) -> None:
    x = strided(exact_in_sums(some((2, 3, 4, dim), dtype, seed, "special")), layout)
    mean = some((2, 3, dim), torch.float32, seed + 1, "plain")
    found = rotated(x, mean=mean, dtype=out)
    assert found is not None
    assert same(found[0], rotate(x).to(out))
    assert found[1] is not None
    product = x.double() @ mean.double().unsqueeze(-1)
    torch.testing.assert_close(found[1].double(), product, atol=1e-2, rtol=1e-5, equal_nan=True)


def test_default_dtype_and_device_change_nothing(each_level: int) -> None:
    codec = parse_codec("int4")
    native = empty_slots(codec, codec, (1, 2, 8, 64), 0, torch.bfloat16)
    native.positions[:, :, 3] = -1
    x, mean = some((1, 2, 1, 64), torch.bfloat16, 1, "plain"), torch.ones(1, 2, 64)
    new, plain = torch.full((1, 1), 9, dtype=torch.int32), copy.deepcopy(native)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        at, found = quantize.write_token(native, x, x, new), rotated(x, mean=mean, dtype=torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert at is not None
    assert found is not None
    assert found[1] is not None
    assert at.flatten().tolist() == [3, 3]
    for tensor in found:
        assert tensor is not None
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
    for side in (plain.keys, plain.values):
        side.write_one(at, x)
    plain.positions.scatter_(2, at, 9)
    assert_same(native, plain)


# -- what is not served ----------------------------------------------------------------------------


def test_nothing_is_written_where_no_slot_is_empty_or_a_place_is_none(each_level: int) -> None:
    codec = parse_codec("int4")
    slots = empty_slots(codec, codec, (1, 2, 8, 64), 2, torch.float32)
    slots.positions[0, 0, 5] = -1  # the second head has no empty slot
    before = copy.deepcopy(slots)
    x = some((1, 2, 1, 64), torch.float32, 1, "plain")
    assert quantize.write_token(slots, x, x, torch.zeros(1, 1, dtype=torch.int32)) is None
    rows = torch.tensor([0, 1])
    for rows, columns, at in (
        ([0, 2], [0, 0], [0, 0]),
        ([0, 1], [0, 1], [0, 0]),
        ([0, 1], [0, 0], [0, 8]),
        ([0, -1], [0, 0], [3, 3]),
    ):
        places = [torch.tensor(index) for index in (rows, columns, at)]
        assert not quantize.write_vectors(slots, x, x, 0, rows=places[0], columns=places[1], at=places[2])
    assert_same(slots, before)


def test_shared_slots_are_never_written_to(each_level: int) -> None:
    codec = parse_codec("int4")
    slots = empty_slots(codec, codec, (1, 2, 12, 64), 2, torch.float32)
    slots.keys.fork()
    slots.values.fork()
    slots.keys.resize(15)
    slots.values.resize(15)
    slots.positions = ops.moved(slots.positions, 15, None, -1)
    slots.positions[:, :, 4:6] = -1
    shared = [part.clone() for side in (slots.keys, slots.values) for part in side.shared[0]]
    x = some((1, 2, 1, 64), torch.float32, 1, "plain")
    at = quantize.write_token(slots, x, x, torch.full((1, 1), 99, dtype=torch.int32))
    assert at is not None
    assert at.flatten().tolist() == [12, 12]
    assert all(map(same, shared, (part for side in (slots.keys, slots.values) for part in side.shared[0])))
    one = torch.zeros(1, dtype=torch.int64)
    assert not quantize.write_vectors(slots, x, x, 0, rows=one, columns=one, at=one + 5)


def test_torch_stores_what_the_kernels_do_not_know(each_level: int) -> None:
    codec = parse_codec("bf16")
    slots = empty_slots(codec, codec, (1, 1, 4, 64), 0, torch.float64)
    slots.positions[:, :, 2] = -1
    x = some((1, 1, 1, 64), torch.float32, 1, "plain").double()
    assert quantize.write_token(slots, x, x, torch.zeros(1, 1, dtype=torch.int32)) is None
    assert ops.write_token(slots, x, x, torch.full((1, 1), 9, dtype=torch.int32)).tolist() == [[[2]]]
    assert torch.equal(slots.keys.parts[0][0, 0, 2], x.flatten().to(torch.bfloat16))
    assert slots.positions[0, 0].tolist() == [0, 1, 9, 3]


def test_slots_that_moved_are_written_and_read_where_they_lie_now(each_level: int) -> None:
    """What the kernels know of slots goes by the tensors: not for a copy, nor once they are reallocated."""
    codec = parse_codec("int4")
    slots = empty_slots(codec, codec, (1, 2, 40, 64), 4, torch.float32)
    for side in (slots.keys, slots.values):
        side.write_first(some((1, 2, 40, 64), torch.float32, 3, "plain"))
    x = some((1, 2, 1, 64), torch.float32, 1, "plain")
    new = torch.full((1, 1), 99, dtype=torch.int32)
    slots.positions[:, :, 7] = -1
    ops.write_token(slots, x, x, new)
    before, _ = ops.attention(x, slots, variant=ops.Variant(0.125))
    twin, kept = copy.deepcopy(slots), copy.deepcopy(slots)
    twin.positions[:, :, 9] = -1
    ops.write_token(twin, x, x, new)
    assert_same(slots, kept)
    old = weakref.ref(slots.keys.parts[0])
    for side in (slots.keys, slots.values):
        side.resize(70)
    assert old() is None  # nothing keeps what is no longer held
    slots.positions = ops.moved(slots.positions, 70, None, -1)
    plain = copy.deepcopy(slots)
    at = ops.write_token(slots, x, x, new)
    assert at.flatten().tolist() == [40, 40]
    for side in (plain.keys, plain.values):
        side.write_one(at, x)
    plain.positions.scatter_(2, at, 99)
    assert_same(slots, plain)
    slots.positions.scatter_(2, at, -1)
    torch.testing.assert_close(ops.attention(x, slots, variant=ops.Variant(0.125))[0], before)


# -- the cache -------------------------------------------------------------------------------------


def run(codec: str, dtype: torch.dtype) -> list[Tensor]:
    """A prompt in two chunks that is cut, and tokens that each evict one."""
    layer = LayerCache(SnapKV(budget=48), parse_codec(codec), parse_codec(codec), exact=4)
    generator, seen = torch.Generator().manual_seed(3), 0
    for phase, n in ((Phase.PROMPT, 70), (Phase.PROMPT, 30), *[(Phase.DECODE, 1)] * 6):
        q, k, v = (torch.randn(2, n, heads, 64, generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2, 2))
        positions = torch.arange(seen, seen + n, dtype=torch.int32).repeat(2, 1)
        seen += n
        layer.attend(q, k, v, Step(phase, positions, (0, 0), (seen, seen), (48, 48)), ops.Variant(0.125))
    return list(layer.flat().values())


@pytest.mark.parametrize("codec", ["int4", "fp4", "fp4:style=mx", "int8", "fp8", "bf16", "fp16"])
def test_the_cache_holds_the_same_bytes_as_without_kernels(
    each_level: int, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels = run(codec, torch.bfloat16)
    monkeypatch.setenv(level.VARIABLE, "off")
    without = run(codec, torch.bfloat16)
    assert all(map(same, with_kernels, without))


def test_compilers_see_the_operation(native: object) -> None:
    codec = parse_codec("int4")
    slots = empty_slots(codec, parse_codec("fp4"), (1, 2, 8, 64), 2, torch.float32)
    slots.positions[:, :, 5] = -1
    k, v = (some((1, 2, 1, 64), torch.float32, seed, "plain") for seed in (1, 2))
    target = quantize._target(slots)
    assert target is not None
    position = torch.zeros(1, 1, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.kvwinnow.write_token.default,
        (slots.positions, target.stored, k, v, position, target.frozen, target.layout),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
