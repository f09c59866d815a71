"""Per-head compaction against numpy, at every level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow import ops
from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.ops.cpu import level
from tests.running import computing_on

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn)


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def bits(tensor: Tensor) -> np.ndarray:
    """(..., D) as bytes (..., D, itemsize)."""
    own = tensor.contiguous()
    return own.view(torch.uint8).numpy().reshape(*own.shape, own.element_size())


def expected(source: Tensor, order: Tensor, slots: int, fill: float) -> np.ndarray:
    size, whole = source.element_size(), bits(source)
    filler = torch.tensor([fill]).to(source.dtype).view(torch.uint8).numpy()
    out = np.empty((*source.shape[:2], slots, *source.shape[3:], size), dtype=np.uint8)
    out[:] = filler
    for b in range(source.shape[0]):
        for h in range(source.shape[1]):
            for i, row in enumerate(order[b, h, :slots].tolist()):
                out[b, h, i] = whole[b, h, row]
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """A source of some strides, an order with repetitions, and a number of slots."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows, kept = draw(st.integers(1, 40)), draw(st.integers(0, 50))
    width = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 20, 32, 64, 96]))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    layout = draw(st.sampled_from(["slots", "model", "part", "flat"]))
    if layout == "model":  # as a model makes keys
        source = some((batch, rows, heads, width), dtype, seed).transpose(1, 2)
    elif layout == "part":  # rows and widths of something larger
        source = some((batch, heads, rows + 5, width + 3), dtype, seed)[:, :, 2 : rows + 2, 1 : width + 1]
    elif layout == "flat":
        source = some((batch, heads, rows), dtype, seed)
    else:
        source = some((batch, heads, rows, width), dtype, seed)
    order = torch.randint(0, rows, (batch, heads, kept), generator=torch.Generator().manual_seed(seed))
    if draw(st.booleans()):
        order = order.mT.contiguous().mT
    return source, order, draw(st.integers(0, 60))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases(), fill=st.sampled_from([0.0, -1.0, 1.0]))
def test_rows_are_those_of_the_order(each_level: int, case: tuple[Tensor, Tensor, int], fill: float) -> None:
    source, order, slots = case
    fill = abs(fill) if source.dtype is torch.uint8 else fill
    assert (bits(ops.moved(source, slots, order, fill)) == expected(source, order, slots, fill)).all()
    assert (bits(ops.taken(source, order)) == expected(source, order, order.shape[2], 0.0)).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [64, 60])
def test_large_copies_pass_by_the_caches(each_level: int, threads: int, width: int) -> None:
    """More than 2 MiB, in pieces of 512 rows and a rest; rows of 240 bytes are copied the plain way."""
    with computing_on(threads):
        source = some((1, 9000, 3, width), torch.float32, 1).transpose(1, 2)
        order = torch.rand(1, 3, 9000, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :, :4001]
        assert (bits(ops.moved(source, 4010, order)) == expected(source, order, 4010, 0.0)).all()


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_a_row_that_is_not_there_is_an_error(each_level: int, wrong: int) -> None:
    source, order = torch.zeros(1, 2, 10, 16), torch.zeros(1, 2, 700, dtype=torch.int64)
    order[0, 1, 600] = wrong
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|index"):
        ops.moved(source, 700, order)


def test_without_kernels_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(level.VARIABLE, "off")
    source = some((2, 3, 20, 16), torch.int32, 1)
    order = torch.randint(0, 20, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    assert (bits(ops.moved(source, 9, order, -1)) == expected(source, order, 9, -1.0)).all()


def test_a_level_that_is_none_is_refused_in_a_kernels_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(level.VARIABLE, "fast")
    with pytest.raises(UnsupportedSetupError, match="'fast' is no level"):
        ops.taken(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 2, dtype=torch.int64))


def test_compilers_see_the_operation() -> None:
    source, order = torch.zeros(2, 3, 20, 16), torch.zeros(2, 3, 7, dtype=torch.int64)
    torch.library.opcheck(
        torch.ops.kvwinnow.gather_rows.default,
        (source, order, 9, 0.0),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
