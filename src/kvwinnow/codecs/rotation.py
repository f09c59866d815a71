"""The Hadamard rotation of 4-bit storage: orthonormal, its own business of no policy, and free of parameters.

Rotating keys and queries alike leaves every product q.k as it was, while outlier channels are spread over all
elements, where one scale per group serves them better (QuaRot, arXiv 2404.00456, section 4).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@functools.lru_cache(maxsize=32)
def _signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, size) of 1 and -1, symmetric (Sylvester's construction); ``size`` is a power of two."""
    import torch

    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def rotate(x: Tensor) -> Tensor:
    """(..., dim) to float32 (..., dim), each vector rotated; applied twice it gives back the vector.

    Where ``dim`` is no power of two the rotation is block-diagonal over its largest power-of-two factor.

    On CPUs sums are taken in float64, where they are exact unless elements are some 2^20 apart. So a vector is stored
    as the same bytes whatever else is rotated with it, and whichever library adds up (``ops/cpu`` does it otherwise).
    """
    import torch

    dim = x.shape[-1]
    size = dim & -dim
    blocks = x.to(torch.float64 if x.device.type == "cpu" else torch.float32).reshape(*x.shape[:-1], dim // size, size)
    sums = blocks @ _signs(size, blocks.dtype, x.device)
    # Whether sums of nothing but -0 are -0 is left to whoever adds up; here they are 0.
    return sums.add_(0.0).mul_(1 / math.sqrt(size)).float().flatten(-2)
