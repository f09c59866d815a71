"""Floating point formats stored as they are: fp32, bf16, fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.codecs.base import LARGEST_FP16, Codec, Part, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plain(Codec):
    """Stores each element in one torch dtype, named ``kind``."""

    kind: ClassVar[str]

    def layout(self, dim: int) -> tuple[Part, ...]:
        return (Part(self.kind, dim),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(torch_dtype(self.kind)),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class FP32(Plain):
    """32-bit IEEE floats: exact for a float32 model."""

    name: ClassVar[str] = "fp32"
    kind: ClassVar[str] = "float32"


@dataclass(frozen=True)
class BF16(Plain):
    """16-bit floats with the range of float32 and 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    kind: ClassVar[str] = "bfloat16"


@dataclass(frozen=True)
class FP16(Plain):
    """16-bit IEEE floats: 11 bits of precision, largest value 65,504 (larger ones are stored as that)."""

    name: ClassVar[str] = "fp16"
    kind: ClassVar[str] = "float16"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        # In bfloat16 the bound itself would be rounded, to 65,536.
        return super().encode(x.float().clamp(-LARGEST_FP16, LARGEST_FP16))
