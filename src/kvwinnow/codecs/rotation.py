"""The Hadamard rotation of 4-bit storage: orthonormal, its own business of no policy, and free of parameters.

Rotating keys and queries alike leaves every product q.k as it was, while outlier channels are spread over all
elements, where one scale per group serves them better (QuaRot, arXiv 2404.00456, section 4).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@functools.lru_cache(maxsize=32)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """(size, size) float32, symmetric and orthonormal (Sylvester's construction); ``size`` is a power of two."""
    import torch

    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix.div(size**0.5)


def rotate(x: Tensor) -> Tensor:
    """(..., dim) to float32 (..., dim), each vector rotated; applied twice it gives back the vector.

    Where ``dim`` is no power of two the rotation is block-diagonal over its largest power-of-two factor.
    """
    dim = x.shape[-1]
    size = dim & -dim
    blocks = x.float().reshape(*x.shape[:-1], dim // size, size)
    return (blocks @ _hadamard(size, x.device)).flatten(-2)
