"""fp8: e4m3 floats (4 bits of exponent, 3 of mantissa) under a float16 scale per vector or group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.codecs.base import LARGEST_FP16, SMALLEST_FP16, Codec, Part, check_group, group_of, grouped

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_E4M3 = 448.0
"""This kind of float8 has no infinity: what is larger becomes NaN, so it is cut to this first."""


@dataclass(frozen=True)
class FP8(Codec):
    """8-bit floats (OCP e4m3, largest 448) and a float16 scale for each vector: 8.25 bits an element at dimension 64.

    The codes lie in memory as bytes, since not every torch operation takes float8 on every device.

    Attributes:
        group: elements that share a scale; it divides the head dimension. None: all elements of the vector.
    """

    name: ClassVar[str] = "fp8"
    quantises: ClassVar[bool] = True

    group: int | None = None

    def __post_init__(self) -> None:
        check_group(self.group, self.name)

    def _group(self, dim: int) -> int:
        return group_of(dim, self.group, self.name, most=dim)

    def layout(self, dim: int) -> tuple[Part, ...]:
        return Part("uint8", dim), Part("float16", dim // self._group(dim))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        import torch

        groups = grouped(x.float(), self._group(x.shape[-1]))
        scale = (
            (groups.abs().amax(-1, keepdim=True) / LARGEST_E4M3).clamp(SMALLEST_FP16, LARGEST_FP16).to(torch.float16)
        )
        # The codes are made for the scale as it is stored.
        return to_e4m3(groups / scale.float()).flatten(-2), scale.squeeze(-1)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        codes, scale = parts
        groups = grouped(from_e4m3(codes), codes.shape[-1] // scale.shape[-1])
        return groups.mul_(scale.float().unsqueeze(-1)).flatten(-2)


def to_e4m3(x: Tensor) -> Tensor:
    """Float32 to the nearest e4m3, ties to the even one and what is larger than 448 to that; as uint8."""
    import torch

    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """What ``to_e4m3`` gave, to float32; ten times faster than torch's own conversion on a CPU."""
    import torch

    bits = codes.to(torch.int16)
    # As float16 bits, sign, exponent and mantissa mean the same number times 2^-8.
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16).float().mul_(2.0**8)
