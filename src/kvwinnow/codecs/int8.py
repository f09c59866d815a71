"""int8: symmetric, one float16 scale per group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.codecs.base import LARGEST_FP16, SMALLEST_FP16, Codec, Part, check_group, group_of, grouped

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Int8(Codec):
    """8 bits an element and a float16 scale per group: 8.25 bits an element at group 64.

    Attributes:
        group: elements that share a scale; it divides the head dimension. None: its largest divisor up to 64.
    """

    name: ClassVar[str] = "int8"
    quantises: ClassVar[bool] = True

    group: int | None = None

    def __post_init__(self) -> None:
        check_group(self.group, self.name)

    def layout(self, dim: int) -> tuple[Part, ...]:
        return Part("int8", dim), Part("float16", dim // group_of(dim, self.group, self.name))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        import torch

        groups = grouped(x.float(), group_of(x.shape[-1], self.group, self.name))
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(max=LARGEST_FP16).to(torch.float16)
        # The codes are made for the scale as it is stored.
        codes = (groups / scale.float().clamp_(min=SMALLEST_FP16)).round_().clamp_(-127, 127)
        return codes.to(torch.int8).flatten(-2), scale.squeeze(-1)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        codes, scale = parts
        groups = grouped(codes, codes.shape[-1] // scale.shape[-1]).float()
        return groups.mul_(scale.float().unsqueeze(-1)).flatten(-2)
