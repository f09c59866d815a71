"""fp8 and fp4 against the formats' own definitions, written down once more in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.codecs import FP4, FP8, FP16
from kvwinnow.codecs.vectors import Vectors

HALF = 2.0**-11
"""Relative rounding of float16, in which fp8's scale is stored."""


def value(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A float of any format by its definition: sign, exponent, mantissa; exponent 0 means subnormal."""
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) & 1 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


E2M1 = [value(code, 2, 1, 1) for code in range(16)]
E4M3 = [value(code, 4, 3, 7) for code in range(256)]
NAN_E4M3 = (0x7F, 0xFF)


def nearest(x: float, table: list[float], codes: range) -> int:
    """The code of the nearest value of a table of growing values, ties to the even code; beyond the last: the last."""
    size = abs(x)
    return min(codes, key=lambda code: (abs(table[code] - size), code % 2))


def test_the_tables_are_those_of_the_specifications() -> None:
    assert E2M1 == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert E4M3[0x7E] == 448
    assert E4M3[0x01] == 2.0**-9
    assert E4M3[0x08] == 2.0**-6


def codes_of(packed: Tensor) -> Tensor:
    """fp4's codes in order: element j low in byte j, element j + dim / 2 high in it."""
    return torch.cat([packed & 15, packed >> 4], -1)


EDGES = [0.0, *(abs(a + b) / 2 for a, b in itertools.pairwise(E2M1[:8])), *E2M1[:8]]
NEAR = [math.nextafter(x, to) for x in EDGES for to in (-math.inf, math.inf)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("style", ["nv", "mx"])
def test_fp4_rounds_to_the_nearest_and_ties_to_even(style: str, sign: int) -> None:
    """With an element of 6 in the group either style's scale is 1."""
    near = torch.tensor(NEAR, dtype=torch.float64).to(torch.float32)
    x = torch.cat([torch.tensor(EDGES), near, torch.nextafter(torch.tensor(EDGES), torch.tensor(9.0))])
    x = torch.cat([x, torch.nextafter(torch.tensor(EDGES), torch.tensor(-9.0)).clamp(min=0), torch.rand(200) * 6])
    x = x.clamp(max=6.0) * sign
    groups = torch.stack([x, torch.full_like(x, 6.0)], -1)
    packed, scale = FP4(style=style, group=2).encode(groups)
    expected = [nearest(number, E2M1, range(8)) for number in x.tolist()]
    codes = codes_of(packed)[:, 0].int()
    assert (codes & 7).tolist() == expected
    assert all(bool(code & 8) == (number < 0) for code, number in zip(codes.tolist(), x.tolist(), strict=True))
    assert set(scale.flatten().tolist()) == {127 if style == "mx" else 0x38}
    back = FP4(style=style, group=2).decode((packed, scale))
    assert back[:, 0].tolist() == [E2M1[code] for code in codes.tolist()]


@pytest.mark.parametrize("style", ["nv", "mx"])
def test_what_fp4_can_represent_comes_back_exactly(style: str) -> None:
    x = torch.tensor(E2M1)
    for scale in (2.0**-6, 0.25, 1.0, 64.0):
        codec = FP4(style=style, group=16)
        assert torch.equal(codec.decode(codec.encode(x * scale)), x * scale)


@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 3.5])
def test_what_fp8_can_represent_comes_back_exactly(scale: float) -> None:
    x = torch.tensor([number for code, number in enumerate(E4M3) if code not in NAN_E4M3])
    codec = FP8()
    assert torch.equal(codec.decode(codec.encode(x * scale)), x * scale)


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=8, max_size=8))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_fp8_stores_the_nearest_code_under_the_nearest_scale(numbers: list[float]) -> None:
    codes, scale = FP8().encode(torch.tensor(numbers))
    largest = max(map(abs, numbers))
    assert scale.item() == pytest.approx(max(largest / 448, 2.0**-24), rel=HALF, abs=2.0**-25)
    for number, code in zip(numbers, codes.tolist(), strict=True):
        ratio = number / scale.item()
        best = nearest(ratio, E4M3, range(0x7F))
        # The ratio itself is rounded to float32, which may move it across a tie.
        assert abs(abs(E4M3[code]) - abs(ratio)) <= abs(E4M3[best] - abs(ratio)) + 1e-6 * abs(ratio)
        assert code & 0x7F != 0x7F


@given(st.lists(st.floats(-2600, 2600, width=32), min_size=16, max_size=16))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_nv_stores_the_nearest_code_under_the_nearest_e4m3_scale(numbers: list[float]) -> None:
    packed, scale = FP4(group=16).encode(torch.tensor(numbers))
    largest = max(map(abs, numbers))
    stored = E4M3[int(scale)]
    assert abs(stored - largest / 6) <= min(abs(E4M3[code] - largest / 6) for code in range(1, 0x7F)) + 1e-6 * largest
    for number, code in zip(numbers, codes_of(packed).tolist(), strict=True):
        ratio = abs(number) / stored
        assert abs(E2M1[code & 7] - ratio) <= min(abs(E2M1[c] - ratio) for c in range(8)) + 1e-6 * ratio


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_mx_takes_the_power_of_two_of_the_specification(numbers: list[float]) -> None:
    packed, scale = FP4(style="mx", group=16).encode(torch.tensor(numbers))
    largest = max(map(abs, numbers))
    wanted = math.floor(math.log2(largest)) - 2 if largest > 2.0**-120 else -126
    assert int(scale) - 127 == max(wanted, -126) or largest <= 2.0**-120
    for number, code in zip(numbers, codes_of(packed).tolist(), strict=True):
        ratio = abs(number) / 2.0 ** (int(scale) - 127)
        assert abs(E2M1[code & 7] - ratio) == min(abs(E2M1[c] - ratio) for c in range(8))


@pytest.mark.parametrize(
    ("codec", "largest"),
    [(FP8(), 448 * 65504.0), (FP4(), 6 * 448.0), (FP4(style="mx"), 6 * 2.0**125)],
    ids=str,
)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_too_large_is_stored_as_the_largest(codec: FP8 | FP4, largest: float, sign: int) -> None:
    for size in (math.inf, 3e38):
        x = torch.zeros(64)
        x[3] = sign * size
        back = codec.decode(codec.encode(x)).double()
        assert back[3] == sign * largest
        assert not back[:3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp16_stores_the_largest_for_what_is_larger_in_any_dtype(dtype: torch.dtype) -> None:
    """65,504 is no bfloat16: the nearest is 65,536, of which float16 makes infinity."""
    (stored,) = FP16().encode(torch.tensor([1e5, -3e38, math.inf, 65280.0], dtype=dtype))
    assert stored.tolist() == [65504.0, -65504.0, 65504.0, 65280.0]


@pytest.mark.parametrize("codec", [FP8(), FP8(group=16), FP4(), FP4(style="mx")], ids=str)
@pytest.mark.parametrize("dim", [24, 40, 64, 80, 96, 128])
def test_the_error_is_that_of_the_mantissa(codec: FP8 | FP4, dim: int) -> None:
    if dim % (codec.group or 1):
        codec = type(codec)()
    x = torch.randn(100, dim, generator=torch.Generator().manual_seed(1))
    error = (codec.decode(codec.encode(x)).double() - x.double()).abs()
    groups = x.double().unflatten(-1, (codec.layout(dim)[1].width, -1)).abs().amax(-1, keepdim=True)
    groups = groups.expand(-1, -1, dim // groups.shape[1]).flatten(1)
    if isinstance(codec, FP8):  # half of 2^-3, or half of the smallest step 2^-9
        limit = x.double().abs() * (2.0**-4 + 2 * HALF) + groups / 448 * (1 + 2 * HALF) * 2.0**-10
    elif codec.style == "nv":  # half the widest step 2 below 6, scale rounded by 2^-4
        limit = groups / 6 * (1 + 2.0**-4)
    else:  # half a step of 2 under a scale that brings the largest to 4 or more; beyond 6 up to 2 more
        limit = torch.maximum(groups / 4, groups - 0.75 * groups)
    assert (error <= limit + 1e-7).all()
    assert (error > 0.4 * limit).any()


# -- the tensor scale of NV style ------------------------------------------------------------------------------------


def storage(first: Tensor, starts: list[int] | None = None, codec: FP4 | None = None) -> Vectors:
    batch, heads, _, dim = first.shape
    vectors = Vectors.allocate(
        codec or FP4(rotate=False, centre=False),
        (batch, heads, 8, dim),
        exact=0,
        centred=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    vectors.freeze(first, starts or [0] * batch)
    return vectors


def stored(vectors: Vectors, x: Tensor) -> Tensor:
    """One vector (B, Hkv, 1, D) written to slot 5 and read again."""
    vectors.write_one(torch.full((*x.shape[:2], 1), 5), x)
    return vectors.read(5, 6)


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e5, 1e12])
def test_the_tensor_scale_follows_the_size_of_the_first_vectors(size: float) -> None:
    first = torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(0)) * size
    vectors = storage(first)
    x = first[:, :, :1]
    error = ((stored(vectors, x) - x).norm() / x.norm()).item()
    assert error < 0.13
    # Up to 64 times larger the precision is the same, beyond that values are cut.
    assert ((stored(vectors, x * 16) - x * 16).norm() / (x * 16).norm()).item() < 0.13
    largest = first.abs().amax((2, 3))
    cut = stored(vectors, torch.full_like(x, 1e3 * size * 10)).amax((2, 3))
    torch.testing.assert_close(cut, 64 * largest, rtol=1e-4, atol=0)


def test_each_head_of_each_row_has_its_own_tensor_scale_frozen_from_its_first_tokens() -> None:
    first = torch.randn(3, 2, 10, 16)
    first[0] *= 100
    vectors = storage(first, [0, 4, 10])
    assert vectors.scale is not None
    assert vectors.frozen == [True, True, False]
    expected = torch.stack([first[0].abs().amax((1, 2)), first[1, :, 4:].abs().amax((1, 2))]) * 64 / (448 * 6)
    torch.testing.assert_close(vectors.scale[:2], expected)
    assert vectors.scale[2].tolist() == [1.0, 1.0]
    before = vectors.scale.clone()
    later = 1000 * torch.randn(3, 2, 7, 16)
    vectors.freeze(later, [0, 0, 2])
    assert torch.equal(vectors.scale[:2], before[:2])
    torch.testing.assert_close(vectors.scale[2], later[2, :, 2:].abs().amax((1, 2)) * 64 / (448 * 6))


def test_first_vectors_of_zeros_leave_the_scale_at_one() -> None:
    vectors = storage(torch.zeros(1, 2, 5, 16))
    assert vectors.scale is not None
    assert vectors.scale.tolist() == [[1.0, 1.0]]
    assert not stored(vectors, torch.zeros(1, 2, 1, 16)).any()


def test_the_tensor_scale_is_taken_of_what_is_stored() -> None:
    """Centred and rotated, that is: an offset that the mean takes away does not make it larger."""
    first = torch.randn(1, 2, 64, 64) + 1000
    vectors = storage(first, codec=FP4())
    assert vectors.scale is not None
    assert vectors.scale.max() < 0.5
