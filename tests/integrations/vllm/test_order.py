"""Blocks whose elements lie in some order: they are read token by token, or the order is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.integrations.vllm.order import Order

factors = st.lists(st.integers(2, 4), min_size=0, max_size=3)


@given(
    tokens=factors, elements=factors, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), data=st.data()
)
def test_any_order_of_digits_is_read_token_by_token(
    tokens: list[int], elements: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    block, dim = math.prod(tokens), math.prod(elements)
    digits = [*tokens, *elements]
    lies = data.draw(st.permutations(range(len(digits))))
    blocks = (50 * torch.randn(3, 2, block, dim)).to(dtype)
    # As they lie: the digits of token and element, in another order.
    axes = [0, 1, *(2 + axis for axis in lies)]
    stored = blocks.view(3, 2, *digits).permute(axes).contiguous().view(3, 2, block, dim)
    numbers = torch.arange(block * dim).view(digits).permute(lies).flatten() if digits else torch.arange(1)
    places = numbers.argsort().view(block, dim)
    assert torch.equal(Order.of(places).view(stored), blocks)


def test_an_order_that_no_digits_tell_is_refused() -> None:
    places = torch.arange(32).view(4, 8)
    places[2] = places[2].flip(0)
    with pytest.raises(UnsupportedSetupError, match="cannot read"):
        Order.of(places)
