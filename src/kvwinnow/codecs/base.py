"""What every codec is: how one key or value vector is stored, by itself, so that any slot can be overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvwinnow.errors import CodecError
from kvwinnow.textform import show_spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
"""Bytes of an element, by the names of torch's dtypes; sizes are known without torch."""

LARGEST_FP16 = 65504.0
SMALLEST_FP16 = 2.0**-24
"""The smallest float16 above 0: divides in place of a scale that is 0, which multiplies any code back to nothing."""


@dataclass(frozen=True)
class Part:
    """One tensor of an encoded vector.

    Attributes:
        kind: the elements' dtype by its name in torch, such as "uint8".
        width: elements for each vector.
    """

    kind: str
    width: int

    @property
    def dtype(self) -> torch.dtype:
        """The elements' dtype."""
        return torch_dtype(self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes per vector."""
        return self.width * ITEMSIZE[self.kind]


@dataclass(frozen=True)
class Codec:
    """Base of all codecs. Frozen: a codec has parameters, never state.

    A codec that quantises may ask for two exact transforms of what it stores (see ``codecs.vectors``): ``rotates``,
    an orthonormal Hadamard rotation, and ``centres``, the removal of a fixed mean vector from keys. One whose own
    scales span a small range may ask for a third, ``scales``: division by one number for each KV head.
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

    @property
    def scales(self) -> bool:
        """Whether vectors are divided by a tensor scale, frozen like the mean, before they are encoded."""
        return False

    def tensor_scale(self, largest: Tensor) -> Tensor:
        """The tensor scale for first vectors whose largest elements are ``largest`` (any shape), where ``scales``."""
        raise NotImplementedError

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


class FourBit(Codec):
    """Base of the codecs of two elements a byte, whose fields ``rotate`` and ``centre`` ask for the transforms."""

    rotate: bool
    centre: bool

    @property
    def rotates(self) -> bool:
        return self.rotate

    @property
    def centres(self) -> bool:
        return self.centre


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def group_of(dim: int, group: int | None, codec: str, *, most: int = 64) -> int:
    """Elements that share a scale: ``group``, or by default the largest divisor of ``dim`` up to ``most``.

    Raises:
        CodecError: ``group`` does not divide ``dim``.
    """
    if group is None:
        return max(size for size in range(1, min(dim, most) + 1) if dim % size == 0)
    if dim % group:
        fitting = [size for size in (128, 64, 32, 16) if dim % size == 0]
        raise CodecError(
            f"{codec}: group={group} does not divide the head dimension {dim}; "
            f"take {' or '.join(map(str, fitting)) or group_of(dim, None, codec, most=most)}"
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


def check_flags(codec: str, **flags: object) -> None:
    """Refuse a flag that is neither true nor false.

    Raises:
        CodecError: it is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise CodecError(f"{codec}: {name}={value!r} must be true or false")


def check_even(dim: int, codec: str) -> None:
    """Refuse a head dimension whose elements cannot lie two a byte.

    Raises:
        CodecError: ``dim`` is odd.
    """
    if dim % 2:
        raise CodecError(f"{codec}: the head dimension {dim} is odd, and two elements share a byte; use int8 or bf16")


def pack(codes: Tensor) -> Tensor:
    """(..., dim) uint8 codes of 4 bits to (..., dim / 2): byte j holds element j low, element j + dim / 2 high."""
    first, second = codes.chunk(2, dim=-1)
    return first | (second << 4)


def unpack(packed: Tensor) -> Tensor:
    """What ``pack`` packed: (..., dim / 2) to (..., dim) uint8."""
    import torch

    return torch.cat([packed & 15, packed >> 4], dim=-1)
