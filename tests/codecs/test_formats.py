"""Number formats: what a round trip may cost, at which sizes, in how many bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.codecs import BF16, CODECS, FP4, FP8, FP16, FP32, Codec, Int4, Int8, parse_codec
from kvwinnow.errors import CodecError

HALF = 2.0**-11
"""Relative rounding of float16, in which scales and zero points are stored."""
SUBNORMAL = 2.0**-25
"""Absolute rounding of float16 near zero."""

QUANTISING: list[Codec] = [Int8(), Int8(group=16), Int4(), Int4(group=32), Int4(group=16, rotate=False, centre=False)]
FLOATS: list[Codec] = [FP8(), FP8(group=16), FP4(), FP4(group=32), FP4(style="mx"), FP4(style="mx", group=16)]
ALL: list[Codec] = [FP32(), BF16(), FP16(), *QUANTISING, *FLOATS]


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x)).double()


def bound(x: Tensor, codec: Int8 | Int4) -> Tensor:
    """Most that each element of each group may change, (..., groups, 1); the codec names its group."""
    of = x.double().unflatten(-1, (-1, codec.group))
    if isinstance(codec, Int8):
        step, levels, offset = of.abs().amax(-1, keepdim=True) / 127, 127, torch.zeros(())
    else:
        low, high = of.amin(-1, keepdim=True), of.amax(-1, keepdim=True)
        step, levels, offset = (high - low) / 15, 15, low.abs() * HALF + SUBNORMAL
    # Half a step; what the outermost level loses when its scale is rounded; the zero point's own rounding, which
    # widens the step too; float32 arithmetic.
    rounded = levels * (step * HALF + SUBNORMAL)
    return step / 2 + rounded + 2 * offset + 1e-6 * of.abs().amax(-1, keepdim=True)


def random_vectors(kind: str, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, dim, generator=generator)
    if kind == "outliers":
        x[:, :: dim // 4] *= 50
    if kind == "offset":
        x += 7 * torch.randn(dim, generator=generator)
    return x


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("kind", ["normal", "outliers", "offset"])
@pytest.mark.parametrize("codec", QUANTISING, ids=str)
def test_an_element_changes_by_half_a_step_at_most(codec: Any, kind: str, dim: int) -> None:
    if dim % (codec.group or 1):
        pytest.skip("this group does not divide the dimension")
    x = random_vectors(kind, dim)
    group = codec.group or max(size for size in range(1, 65) if dim % size == 0)
    error = (round_trip(codec, x) - x.double()).abs().unflatten(-1, (-1, group))
    limit = bound(x, type(codec)(group=group))
    assert (error <= limit).all()
    # The bound means something: some element comes near it.
    assert (error > 0.4 * limit).any()


@given(st.lists(st.floats(-60000, 60000, width=32), min_size=16, max_size=16))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_the_bound_holds_for_any_group_within_the_range_of_float16(values: list[float]) -> None:
    x = torch.tensor(values)
    for codec in (Int8(group=16), Int4(group=16)):
        assert ((round_trip(codec, x) - x.double()).abs() <= bound(x, codec).flatten()).all()


@pytest.mark.parametrize(
    ("codec", "relative", "absolute"), [(FP32(), 0.0, 0.0), (BF16(), 2**-8, 0.0), (FP16(), HALF, SUBNORMAL)], ids=str
)
def test_plain_formats_round_as_ieee_does(codec: Codec, relative: float, absolute: float) -> None:
    x = random_vectors("outliers", 64)
    assert ((round_trip(codec, x) - x.double()).abs() <= relative * x.double().abs() + absolute).all()


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert not round_trip(codec, torch.zeros(3, 64)).any()


@pytest.mark.parametrize("value", [1.0, -3.7, 100.1, -60000.0, 1e-3])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_constant_vectors_come_back(codec: Codec, value: float) -> None:
    back = round_trip(codec, torch.full((2, 64), value))
    if "nv" in str(codec) and abs(value) > 2688:
        pytest.skip("beyond what NV style holds without its tensor scale")
    # Floats are as good as their mantissa; MX style cuts a group's largest element by a quarter at most.
    relative = {BF16: 2**-8, FP8: 2**-4, FP4: 0.25 if "mx" in str(codec) else 2**-4}.get(type(codec), 2 * HALF)
    assert ((back - value).abs() <= relative * abs(value) + 127 * SUBNORMAL).all()


@pytest.mark.parametrize("size", [1e6, 1e5, 7e4, 1e-4, 1e-7, 1e-12, 1e-30])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_huge_and_tiny_values_stay_finite_and_no_larger_than_they_were(codec: Codec, size: float) -> None:
    x = random_vectors("normal", 64) * size
    for vectors in (x, x.abs(), -x.abs()):
        back = round_trip(codec, vectors)
        assert back.isfinite().all()
        rounded = 1.01 if codec.name != "fp4" else 1 + 2**-4  # the scale, to e4m3
        assert back.abs().max() <= rounded * vectors.double().abs().max() + 127 * SUBNORMAL


@pytest.mark.parametrize("codec", [FP32(), BF16(), Int8(), Int8(group=16)], ids=str)
def test_values_beyond_float16_keep_their_precision(codec: Codec) -> None:
    x = random_vectors("normal", 64) * 1e6
    assert ((round_trip(codec, x) - x.double()).norm() / x.double().norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_every_model_dtype_is_taken(codec: Codec, dtype: torch.dtype) -> None:
    x = random_vectors("normal", 64).to(dtype)
    assert torch.equal(round_trip(codec, x), round_trip(codec, x.float()))


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_vector_is_stored_without_a_look_at_its_neighbours(codec: Codec) -> None:
    x = random_vectors("outliers", 64)
    together, alone = codec.encode(x), [codec.encode(vector) for vector in x]
    for part, *single in zip(together, *alone, strict=True):
        assert torch.equal(part, torch.stack(single))


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_layout_tells_the_real_tensors_and_bytes(codec: Codec) -> None:
    parts = codec.encode(torch.randn(5, 64))
    assert [(part.dtype, part.shape) for part in parts] == [(p.dtype, (5, p.width)) for p in codec.layout(64)]
    assert sum(part.untyped_storage().nbytes() for part in parts) == 5 * codec.bytes_per_vector(64)


def test_bytes_are_those_of_the_arithmetic() -> None:
    bits = {
        str(codec): codec.bytes_per_vector(128) * 8 / 128 for codec in (Int4(group=64), Int4(group=32), Int8(group=64))
    }
    assert list(bits.values()) == [4.5, 5.0, 8.25]
    floats = [FP8(), FP8(group=64), FP4(), FP4(style="mx"), FP4(group=64)]
    assert [codec.bytes_per_vector(128) for codec in floats] == [128 + 2, 128 + 4, 64 + 8, 64 + 4, 64 + 2]
    assert [codec.bytes_per_vector(128) for codec in (FP32(), BF16(), FP16())] == [512, 256, 256]


@pytest.mark.parametrize(("dim", "group"), [(64, 64), (80, 40), (96, 48), (128, 64), (16, 16), (256, 64), (112, 56)])
def test_the_default_group_is_the_largest_divisor_up_to_64(dim: int, group: int) -> None:
    assert Int8().layout(dim)[1].width == Int4().layout(dim)[1].width == dim // group


@pytest.mark.parametrize(
    ("dim", "nv", "mx"),
    [(24, 12, 24), (40, 10, 20), (64, 16, 32), (80, 16, 20), (96, 16, 32), (128, 16, 32), (2, 2, 2), (10, 10, 10)],
)
def test_the_default_group_of_fp4_is_the_largest_divisor_up_to_the_styles(dim: int, nv: int, mx: int) -> None:
    assert FP4().layout(dim)[1].width == dim // nv
    assert FP4(style="mx").layout(dim)[1].width == dim // mx
    assert FP8().layout(dim)[1].width == 1


def test_formats_of_4_bits_are_the_only_ones_that_rotate_and_centre() -> None:
    assert {name for name, codec in CODECS.items() if codec().rotates} == {"int4", "fp4"}
    assert {name for name, codec in CODECS.items() if codec().centres} == {"int4", "fp4"}
    for made in (Int4, FP4):
        assert not made(rotate=False).rotates
        assert not made(centre=False).centres
    assert {name for name, codec in CODECS.items() if codec().scales} == {"fp4"}
    assert not FP4(style="mx").scales


@pytest.mark.parametrize(
    "codec", [*ALL, Int4(group=32, rotate=False), Int4(centre=False), Int8(group=128), FP4(rotate=False)], ids=str
)
def test_the_text_form_reads_back(codec: Codec) -> None:
    assert parse_codec(str(codec)) == codec
    assert parse_codec(codec) is codec


@pytest.mark.parametrize(("dtype", "codec"), [(torch.float32, FP32), (torch.bfloat16, BF16), (torch.float16, FP16)])
def test_a_torch_dtype_names_its_codec(dtype: torch.dtype, codec: type[Codec]) -> None:
    assert parse_codec(dtype) == codec()


REFUSED: list[tuple[Any, list[str]]] = [
    ("int5", ["int5", "int4"]),
    ("", ["fp32"]),
    ("int4:", ["int4:"]),
    ("int4:groups=32", ["groups", "group"]),
    ("int4:group", ["group"]),
    ("int4:group=", ["group"]),
    ("int4:group=32,group=64", ["group", "32", "64"]),
    ("int4:group=1", ["group=1", "2"]),
    ("int4:group=-32", ["-32", "2"]),
    ("int4:group=2.5", ["2.5"]),
    ("int4:group=many", ["many"]),
    ("int8:group=true", ["True"]),
    ("int4:rotate=1", ["rotate", "1"]),
    ("int4:centre=maybe", ["centre", "maybe"]),
    ("fp32:group=32", ["fp32", "group"]),
    ("fp8:group=0", ["group=0", "2"]),
    ("fp8:style=mx", ["fp8", "style", "group"]),
    ("fp4:style=ocp", ["ocp", "nv", "mx"]),
    ("fp4:style=16", ["16", "nv", "mx"]),
    ("fp4:mx", ["mx", "style"]),
    ("fp4:group=1", ["fp4", "group=1"]),
    ("fp4:centre=0", ["fp4", "centre", "0"]),
    (torch.int64, ["torch.int64", "int8"]),
    (4, ["4", "int"]),
    (None, ["None"]),
]


@pytest.mark.parametrize(("text", "says"), REFUSED, ids=[repr(text) for text, _ in REFUSED])
def test_bad_dtypes_are_refused_in_a_sentence(text: Any, says: list[str]) -> None:
    with pytest.raises(CodecError) as error:
        parse_codec(text)
    assert all(word in str(error.value) for word in says)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("codec", "dim", "says"),
    [
        (Int4(), 65, ["65", "odd", "int8"]),
        (Int4(group=32), 80, ["32", "80", "16"]),
        (Int8(group=64), 80, ["64", "80", "16"]),
        (Int8(group=7), 64, ["7", "64", "32"]),
        (Int8(group=32), 18, ["32", "18"]),
        (FP4(), 65, ["65", "odd", "int8"]),
        (FP4(group=16), 24, ["fp4", "16", "24", "12"]),
        (FP4(style="mx", group=32), 40, ["fp4", "32", "40", "20"]),
        (FP4(style="mx", group=32), 80, ["fp4", "32", "80", "16"]),
        (FP8(group=16), 40, ["fp8", "16", "40"]),
    ],
    ids=str,
)
def test_a_head_dimension_that_does_not_fit_is_refused(codec: Codec, dim: int, says: list[str]) -> None:
    with pytest.raises(CodecError) as error:
        codec.layout(dim)
    assert all(word in str(error.value) for word in says)


def test_int8_takes_odd_dimensions() -> None:
    x = torch.randn(4, 65)
    assert (round_trip(Int8(), x) - x.double()).abs().max() < 0.05


def test_the_text_form_writes_truth_as_the_documentation_does() -> None:
    assert str(parse_codec("int4:group=32,rotate=true,centre=False")) == "int4:group=32,rotate=true,centre=false"
