"""fp4: e2m1 floats (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), two a byte, under small scales per group.

Two published styles of scales: NVFP4 (NVIDIA: 16 elements share an e4m3 scale, and the tensor has a float32 scale) and
MXFP4 (OCP Microscaling Formats 1.0: 32 elements share a power of two).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.codecs.base import FourBit, Part, check_even, check_flags, check_group, group_of, grouped, pack
from kvwinnow.codecs.fp8 import LARGEST_E4M3, from_e4m3, to_e4m3
from kvwinnow.errors import CodecError

if TYPE_CHECKING:
    from torch import Tensor

STYLES = {"nv": 16, "mx": 32}
"""The elements that share a scale in each style."""
LARGEST_E2M1 = 6.0
HEADROOM = 64.0
"""How many times larger than the largest of the first ones an element may be before NV style's tensor scale cuts it.

In SmolLM2-135M elements grow to 35 times those of a first call of one token (whose values are next to nothing), 4 times
those of four, twice those of 32. Groups keep e4m3's full precision down to 1/448 of the first call's largest element.
"""

_SMALLEST_E4M3 = 2.0**-9
_SMALLEST_NORMAL = 2.0**-126
_SCALE_BIAS = 127


@dataclass(frozen=True)
class FP4(FourBit):
    """4-bit floats and a scale per group: 4.5 bits an element in NV style, 4.25 in MX style.

    NV style divides all vectors of a KV head by a float32 tensor scale, frozen from the first ones, so that the groups'
    e4m3 scales are used where they are precise. It leaves room for elements ``HEADROOM`` times larger than all the
    first ones; what is larger still is stored as the largest.

    Byte j of a vector holds element j in its low half and element j + dim / 2 in its high half.

    Attributes:
        style: "nv" or "mx".
        group: elements that share a scale; it divides the head dimension. None: its largest divisor up to the style's
            16 or 32.
        rotate: store vectors rotated by a Hadamard matrix, which spreads outlier channels over all elements.
        centre: store keys less their mean vector.
    """

    name: ClassVar[str] = "fp4"
    quantises: ClassVar[bool] = True

    style: str = "nv"
    group: int | None = None
    rotate: bool = True
    centre: bool = True

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise CodecError(f"fp4: style={self.style!r} is unknown; take {' or '.join(STYLES)}")
        check_group(self.group, self.name)
        check_flags(self.name, rotate=self.rotate, centre=self.centre)

    @property
    def scales(self) -> bool:
        return self.style == "nv"

    def tensor_scale(self, largest: Tensor) -> Tensor:
        import torch

        scale = largest * (HEADROOM / (LARGEST_E4M3 * LARGEST_E2M1))
        return torch.where(scale >= _SMALLEST_NORMAL, scale, 1.0)  # nothing but zeros so far

    def _group(self, dim: int) -> int:
        return group_of(dim, self.group, self.name, most=STYLES[self.style])

    def layout(self, dim: int) -> tuple[Part, ...]:
        check_even(dim, self.name)
        return Part("uint8", dim // 2), Part("uint8", dim // self._group(dim))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        groups = grouped(x.float(), self._group(x.shape[-1]))
        largest = groups.abs().amax(-1, keepdim=True)
        stored = to_e4m3((largest / LARGEST_E2M1).clamp(min=_SMALLEST_E4M3)) if self.style == "nv" else _e8m0(largest)
        # The codes are made for the scale as it is stored.
        return pack(_e2m1(groups / self._scale(stored)).flatten(-2)), stored.squeeze(-1)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        import torch

        packed, stored = parts
        bits = packed.to(torch.int16)
        # As float16 bits, sign, exponent and mantissa mean the same number times 2^-14.
        halves = (bits & 8) << 12 | (bits & 7) << 9, (bits & 0x80) << 8 | (bits & 0x70) << 5
        values = torch.cat(halves, dim=-1).view(torch.float16).float().mul_(2.0**14)
        groups = grouped(values, values.shape[-1] // stored.shape[-1])
        return groups.mul_(self._scale(stored).unsqueeze(-1)).flatten(-2)

    def _scale(self, stored: Tensor) -> Tensor:
        """Scales as they are stored, any shape uint8, to float32."""
        import torch

        if self.style == "nv":
            return from_e4m3(stored)
        return (stored.to(torch.int32) << 23).view(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1, ties to the even code and what is larger than 6 to that; codes of 4 bits as uint8.

    Codes 0 to 4 stand for 0 to 2 in steps of .5, codes 4 to 6 for 2 to 4 in steps of 1, and code 7 for 6: three
    straight lines, each of which is the lowest where it holds. Rounding to whole numbers breaks ties to even ones.
    """
    import torch

    size = x.abs()
    low, middle, high = (size * 2).round_(), size.round().add_(2), (size / 2).round_().add_(4)
    codes = low.minimum(middle).minimum(high).clamp_(max=7).to(torch.uint8)
    return codes | (x < 0).to(torch.uint8) << 3


def _e8m0(largest: Tensor) -> Tensor:
    """The power of two that brings ``largest`` into [4, 8), as uint8: its exponent + 127; from 2^-126, the normal ones.

    That is the specification's choice (section 6.3): what exceeds 6 by then is stored as 6.
    """
    import torch

    _, exponent = torch.frexp(largest.clamp(_SMALLEST_NORMAL, torch.finfo(torch.float32).max))
    return (exponent - 3 + _SCALE_BIAS).clamp_(1, 254).to(torch.uint8)
