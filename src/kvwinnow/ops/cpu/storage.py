"""How vectors lie in memory, in the words of native/decode.h."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvwinnow.codecs import Codec

FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kinds of storage whose elements are numbers themselves."""

MOST_DIM = 512
"""The largest head dimension that kernels read and write slots of: MAX_DIM of native/decode.h."""

T = TypeVar("T")

_CODES = {"int8": 3, "int4": 4, "fp8": 5}
_FP4 = {"nv": 6, "mx": 7}


def kind_of(codec: Codec, dtype: torch.dtype) -> int | None:
    """The kind of storage that a codec's parts are, the first of them of that dtype; None: kernels know none."""
    if not codec.quantises:
        return FLOATS.get(dtype)
    own: Any = codec
    return _FP4.get(own.style) if own.name == "fp4" else _CODES.get(own.name)


def address(tensor: Tensor | None) -> int:
    """Where a tensor's elements begin; 0, which kernels take for none, where there is no tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def in_rows(part: Tensor) -> bool:
    """Whether the vectors of each head of (B, Hkv, S, width) lie one behind the other."""
    return part.stride(3) == 1 and part.stride(2) == part.shape[3]


class Known(Generic[T]):
    """What has been worked out about some tensors, for as long as they are the same ones, and lie where they lay.

    It keeps none of them alive, and a copy of it, which belongs to copies of the tensors, knows nothing about those.
    """

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []
        self._places: list[int] = []
        self._facts: T | None = None

    def get(self, tensors: list[Tensor], work_out: Callable[[], T]) -> T:
        """What is known of ``tensors``, or else worked out now."""
        places = [tensor.data_ptr() for tensor in tensors]
        # Tensors are the same if they are the same objects: equality would compare their elements.
        same = places == self._places and all(map(operator.is_, tensors, [tensor() for tensor in self._tensors]))
        if not same:
            self._facts = work_out()
            self._tensors, self._places = [weakref.ref(tensor) for tensor in tensors], places
        return self._facts  # type: ignore[return-value]
