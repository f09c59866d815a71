"""How a back end orders the elements of a block, told in digits so that reading them in order is one view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvwinnow.errors import UnsupportedSetupError

Digits = tuple[tuple[int, int], ...]
"""(count, step) of each digit, the highest first."""

_WHOLE = {4: torch.int32, 8: torch.int64}
"""Numbers of so many bytes."""


@dataclass(frozen=True)
class Order:
    """How the elements of a KV head's keys, or values, lie in a block.

    Attributes:
        tokens: (count, step) of each digit of a token's place in the block, the highest first.
        elements: the same of an element's place in its vector.
    """

    tokens: Digits
    elements: Digits

    @classmethod
    def of(cls, places: Tensor) -> Self:
        """The order of which ``places`` (block, D) int64 are where each element lies.

        Raises:
            UnsupportedSetupError: no digits tell it.
        """
        found = cls(_digits(places[:, 0].tolist()), _digits(places[0].tolist()))
        if not torch.equal(_sums(found.tokens).unsqueeze(1) + _sums(found.elements), places):
            raise UnsupportedSetupError(
                "vLLM's CPU back end lays out its blocks in an order that kvwinnow cannot read; choose another "
                "--block-size or --dtype"
            )
        return found

    def view(self, blocks: Tensor) -> Tensor:
        """Blocks (n, Hkv, block, D) as they lie, as (n, Hkv, block, D) of tokens and elements."""
        count, step = self.elements[-1] if self.elements else (1, 1)
        wide = _WHOLE.get(count * blocks.itemsize)
        rest = (*self.tokens, *self.elements[:-1])
        if step == 1 < count and wide is not None and all(step % count == 0 for _, step in rest):
            # Elements that lie side by side are moved as one, many times faster.
            order = Order(_divided(self.tokens, count), _divided(self.elements[:-1], count))
            return order.view(blocks.contiguous().view(wide)).contiguous().view(blocks.dtype)
        n, heads, block, dim = blocks.shape
        digits = (*self.tokens, *self.elements)
        size = (n, heads, *(count for count, _ in digits))
        steps = (heads * block * dim, block * dim, *(step for _, step in digits))
        return blocks.contiguous().as_strided(size, steps).reshape(n, heads, block, dim)


def _divided(digits: Digits, by: int) -> Digits:
    return tuple((count, step // by) for count, step in digits)


def _sums(digits: Digits) -> Tensor:
    """The sequence that these digits tell, the last one running fastest."""
    sums = torch.zeros(1, dtype=torch.long)
    for count, step in digits:
        sums = (sums.unsqueeze(1) + torch.arange(count) * step).flatten()
    return sums


def _digits(places: list[int]) -> Digits:
    """A sequence that begins with 0 as sums of digits times steps, the highest digit first."""
    if len(places) == 1:
        return ()
    step = places[1]
    count = next((i for i, place in enumerate(places) if place != i * step), len(places))
    while len(places) % count:
        count -= 1
    return (*_digits(places[::count]), (count, step))
