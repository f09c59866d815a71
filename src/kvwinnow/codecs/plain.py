"""Floating point formats stored as they are: fp32, bf16, fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvwinnow.codecs.base import Codec, Part


@dataclass(frozen=True)
class Plain(Codec):
    """Stores each element in one torch dtype."""

    dtype: ClassVar[torch.dtype]

    def layout(self, dim: int) -> tuple[Part, ...]:
        return (Part(self.dtype, dim),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class FP32(Plain):
    """32-bit IEEE floats: exact for a float32 model."""

    name: ClassVar[str] = "fp32"
    dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True)
class BF16(Plain):
    """16-bit floats with the range of float32 and 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class FP16(Plain):
    """16-bit IEEE floats: 11 bits of precision, largest value 65,504 (larger ones are stored as that)."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        limit = torch.finfo(torch.float16).max
        return (x.clamp(-limit, limit).to(torch.float16),)
