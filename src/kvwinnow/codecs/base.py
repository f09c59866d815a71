"""What every codec is: how one key or value vector is stored, by itself, so that any slot can be overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvwinnow.errors import CodecError
from kvwinnow.textform import show_spec

SMALLEST_FP16 = 2.0**-24
"""The smallest float16 above 0: divides in place of a scale that is 0, which multiplies any code back to nothing."""


@dataclass(frozen=True)
class Part:
    """One tensor of an encoded vector: ``width`` elements of ``dtype`` for each vector."""

    dtype: torch.dtype
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes per vector."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Codec:
    """Base of all codecs. Frozen: a codec has parameters, never state.

    A codec that quantises may ask for two exact transforms of what it stores (see ``codecs.vectors``): ``rotates``,
    an orthonormal Hadamard rotation, and ``centres``, the removal of a fixed mean vector from keys.
    """

    name: ClassVar[str] = ""
    quantises: ClassVar[bool] = False

    @property
    def rotates(self) -> bool:
        """Whether vectors are stored rotated."""
        return False

    @property
    def centres(self) -> bool:
        """Whether keys are stored less their mean vector (values never are: their mean is part of the output)."""
        return False

    def layout(self, dim: int) -> tuple[Part, ...]:
        """The tensors that hold one vector of ``dim`` elements.

        Raises:
            CodecError: ``dim`` does not fit the codec.
        """
        raise NotImplementedError

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., dim) in any float dtype to the parts, each (..., width)."""
        raise NotImplementedError

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The parts, each (..., width), to (..., dim): float32, or the stored dtype where that is a float itself."""
        raise NotImplementedError

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes one vector of ``dim`` elements takes, scales and zero points included."""
        return sum(part.nbytes for part in self.layout(dim))

    def __str__(self) -> str:
        return show_spec(self.name, self)


def group_of(dim: int, group: int | None, codec: str) -> int:
    """Elements that share a scale: ``group``, or by default the largest divisor of ``dim`` up to 64.

    Raises:
        CodecError: ``group`` does not divide ``dim``.
    """
    if group is None:
        return max(size for size in range(1, min(dim, 64) + 1) if dim % size == 0)
    if dim % group:
        fitting = [size for size in (128, 64, 32, 16) if dim % size == 0]
        raise CodecError(
            f"{codec}: group={group} does not divide the head dimension {dim}; "
            f"take {' or '.join(map(str, fitting)) or group_of(dim, None, codec)}"
        )
    return group


def grouped(x: Tensor, group: int) -> Tensor:
    """(..., dim) to (..., dim // group, group), elements in order."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def check_group(group: object, codec: str) -> None:
    """Refuse a group that is no number of elements.

    Raises:
        CodecError: not None and not a whole number of 2 or more.
    """
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 2):
        raise CodecError(f"{codec}: group={group!r} must be a whole number of elements, 2 or more, such as 64")
