"""Products of a few vectors with matrices against float64, at every level."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from kvwinnow.ops.cpu import level, linear
from kvwinnow.ops.cpu.linear import MOST_VECTORS, serves
from tests.running import computing_on

ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""How far a result is rounded, relative to itself."""


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """A sum in float32, in any order, and rounded once."""
    wide = [None if part is None else part.double() for part in (x, weight, bias)]
    exact = functional.linear(*wide)
    sizes = functional.linear(wide[0].abs(), wide[1].abs(), None if bias is None else wide[2].abs())
    assert out.dtype is x.dtype
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= 1.01 * ROUNDED[x.dtype] * exact.abs() + 4e-7 * sizes + 2.0**-25).all()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_layers_equal_float64(each_level: int, data: st.DataObject) -> None:
    dtype, seed = data.draw(st.sampled_from(list(ROUNDED))), data.draw(st.integers(0, 999))
    width = 32 * data.draw(st.integers(1, 12))
    leading = data.draw(st.sampled_from([(), (1,), (1, 1), (2, 1), (3,), (1, MOST_VECTORS)]))
    x = some((*leading, width), dtype, seed)
    if leading and data.draw(st.booleans()):  # the rows of something wider
        x = some((*leading, width + 8), dtype, seed)[..., 4 : width + 4]
    weights, biases = [], []
    for i in range(data.draw(st.integers(1, 3))):
        count, wider = data.draw(st.integers(0, 70)), data.draw(st.sampled_from([0, 1, 32]))
        weights.append(some((count, width + wider), dtype, seed + i)[:, wider // 2 : wider // 2 + width])
        biases.append(some((count,), dtype, seed - i) if data.draw(st.booleans()) else None)
    made = linear.linear(x, weights, biases)
    for out, weight, bias in zip(made, weights, biases, strict=True):
        assert_near(out, x, weight, bias)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_threads_share_large_matrices(each_level: int, threads: int, dtype: torch.dtype) -> None:
    x = some((2, 256), dtype, 1)
    weights = [some((count, 256), dtype, count) for count in (1037, 5, 640)]
    with computing_on(threads):
        made = linear.linear(x, weights, [None] * 3)
    for out, weight in zip(made, weights, strict=True):
        assert_near(out, x, weight, None)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_row_does_not_depend_on_the_others(each_level: int, dtype: torch.dtype) -> None:
    """A request decodes to the same tokens alone and in a batch."""
    x, weight = some((MOST_VECTORS, 96), dtype, 1), some((77, 96), dtype, 2)
    [together] = linear.linear(x, [weight], [None])
    for row, out in zip(x, together, strict=True):
        assert torch.equal(linear.linear(row[None], [weight], [None])[0][0], out)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_is_no_number_stays_in_its_row(each_level: int, dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 64, dtype=dtype), torch.ones(5, 64, dtype=dtype)
    weight[1, 3], weight[2, 40], weight[3, 0] = float("nan"), float("inf"), float("-inf")
    [out] = linear.linear(x, [weight], [None])
    assert torch.equal(
        out[0].nan_to_num(nan=-1.0, posinf=-2.0, neginf=-3.0), torch.tensor([64, -1, -2, -3, 64]).to(dtype)
    )


def test_results_too_large_for_float16_are_infinite(each_level: int) -> None:
    x = torch.full((1, 64), 100.0, dtype=torch.float16)
    [out] = linear.linear(x, [torch.stack((x[0], -x[0], x[0] / 100))], [None])
    assert out.tolist() == [[float("inf"), float("-inf"), 6400.0]]


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(MOST_VECTORS + 1, 32), torch.ones(3, 32), None),
        (torch.ones(0, 32), torch.ones(3, 32), None),
        (torch.ones(1, 40), torch.ones(3, 40), None),
        (torch.ones(1, 32), torch.ones(32, 3).T, None),
        (torch.ones(1, 32, dtype=torch.float64), torch.ones(3, 32, dtype=torch.float64), None),
        (torch.ones(1, 32), torch.ones(3, 32), torch.ones(6)[::2]),
    ],
)
def test_torch_serves_the_rest(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert not serves(x, weight, bias)
    [out] = linear.linear(x, [weight], [bias])
    assert torch.equal(out, functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(3, 64), None),
        (torch.ones(3, 32, dtype=torch.float16), None),
        (torch.ones(3, 32), torch.ones(2)),
        (torch.ones(3, 32), torch.ones(3, dtype=torch.bfloat16)),
    ],
)
def test_shapes_and_dtypes_that_do_not_agree_are_torchs_to_refuse(weight: Tensor, bias: Tensor | None) -> None:
    x = torch.ones(1, 32)
    assert not serves(x, weight, bias)
    with pytest.raises(RuntimeError):
        linear.linear(x, [weight], [bias])


@pytest.mark.parametrize("device", ["cuda", "mps", "meta"])
def test_other_devices_are_left_alone(device: str) -> None:
    """Graphs are traced with tensors that only say where they would be."""
    with FakeTensorMode():
        assert serves(torch.empty(1, 64), torch.empty(8, 64))
        assert not serves(torch.empty(1, 64, device=device), torch.empty(8, 64, device=device))


def test_torch_serves_where_kernels_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(level.VARIABLE, level.OFF)
    x, weight = some((1, 64), torch.float32, 1), some((9, 64), torch.float32, 2)
    assert torch.equal(linear.linear(x, [weight], [None])[0], functional.linear(x, weight))


def test_the_operator_is_known_to_compilers() -> None:
    x, weights = some((2, 1, 64), torch.float32, 1), [some((n, 64), torch.float32, n) for n in (5, 40)]
    given = (x, weights, [None, some((40,), torch.float32, 3)])
    torch.library.opcheck(torch.ops.kvwinnow.linear.default, given, test_utils=("test_schema", "test_faketensor"))
