"""int4: asymmetric, two elements a byte, a float16 scale and zero point per group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.codecs.base import (
    LARGEST_FP16,
    SMALLEST_FP16,
    FourBit,
    Part,
    check_even,
    check_flags,
    check_group,
    group_of,
    grouped,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Int4(FourBit):
    """4 bits an element, a float16 scale and zero point per group: 4.5 bits an element at group 64, 5 at group 32.

    Byte j of a vector holds element j in its low half and element j + dim / 2 in its high half.

    Attributes:
        group: elements that share a scale; it divides the head dimension. None: its largest divisor up to 64.
        rotate: store vectors rotated by a Hadamard matrix, which spreads outlier channels over all elements.
        centre: store keys less their mean vector.
    """

    name: ClassVar[str] = "int4"
    quantises: ClassVar[bool] = True

    group: int | None = None
    rotate: bool = True
    centre: bool = True

    def __post_init__(self) -> None:
        check_group(self.group, self.name)
        check_flags(self.name, rotate=self.rotate, centre=self.centre)

    def layout(self, dim: int) -> tuple[Part, ...]:
        check_even(dim, self.name)
        groups = dim // group_of(dim, self.group, self.name)
        return Part("uint8", dim // 2), Part("float16", groups), Part("float16", groups)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        import torch

        groups = grouped(x.float(), group_of(x.shape[-1], self.group, self.name))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        low = low.clamp(-LARGEST_FP16, LARGEST_FP16).to(torch.float16)
        # The codes are made for scale and zero point as they are stored.
        zero = low.float()
        scale = ((high - zero) / 15).clamp_(0, LARGEST_FP16).to(torch.float16)
        codes = (groups - zero).div_(scale.float().clamp_(min=SMALLEST_FP16)).round_().clamp_(0, 15)
        return pack(codes.to(torch.uint8).flatten(-2)), scale.squeeze(-1), low.squeeze(-1)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        packed, scale, low = parts
        codes = unpack(packed)
        groups = grouped(codes, codes.shape[-1] // scale.shape[-1]).float()
        return groups.mul_(scale.float().unsqueeze(-1)).add_(low.float().unsqueeze(-1)).flatten(-2)
