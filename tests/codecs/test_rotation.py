"""The two exact transforms of 4-bit storage: they may change what is stored, never what comes out."""

from __future__ import annotations

import pytest
import torch

from kvwinnow.codecs import Int4, rotate
from kvwinnow.codecs.vectors import Vectors
from tests.oracle import hadamard

DIMS = [64, 80, 96, 128, 2, 15]


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthonormal_and_its_own_inverse(dim: int) -> None:
    matrix = rotate(torch.eye(dim)).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)
    x = torch.randn(7, dim)
    torch.testing.assert_close(rotate(rotate(x)), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_the_hadamard_transform_of_the_largest_power_of_two(dim: int) -> None:
    x = torch.randn(2, 3, dim)
    torch.testing.assert_close(rotate(x).double(), hadamard(x), atol=1e-5, rtol=0)


def test_rotation_spreads_an_outlier() -> None:
    x = torch.zeros(64)
    x[5] = 8.0
    assert rotate(x).abs().tolist() == [1.0] * 64


def stored(dim: int, *, centre: bool = True, rotated: bool = True) -> Vectors:
    codec = Int4(centre=centre, rotate=rotated)
    return Vectors.allocate(
        codec, (2, 3, 8, dim), exact=4, centred=True, dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("dim", [64, 80])
def test_mean_and_rotation_leave_the_products_as_they_were(dim: int, centre: bool, rotated: bool) -> None:
    vectors = stored(dim, centre=centre, rotated=rotated)
    keys = torch.randn(2, 3, 10, dim) + 5 * torch.randn(2, 3, 1, dim)
    queries = torch.randn(2, 3, 4, dim)
    vectors.freeze(keys, [0, 4])
    q, shift = vectors.query(queries)
    logits = q.float() @ vectors.store(keys).float().mT
    logits = logits if shift is None else logits + shift
    torch.testing.assert_close(logits.double(), queries.double() @ keys.double().mT, atol=1e-3, rtol=1e-5)


def test_the_mean_is_that_of_the_first_tokens_without_padding() -> None:
    vectors, keys = stored(64), torch.randn(2, 3, 40, 64)
    vectors.freeze(keys, [0, 40])
    assert vectors.frozen == [True, False]
    further = torch.randn(2, 3, 36, 64)
    vectors.freeze(further, [0, 2])
    assert vectors.frozen == [True, True]
    assert vectors.mean is not None
    torch.testing.assert_close(vectors.mean[0], keys[0].mean(1))
    torch.testing.assert_close(vectors.mean[1], further[1, :, 2:].mean(1))


def test_the_mean_is_frozen() -> None:
    vectors = stored(64)
    vectors.freeze(torch.randn(2, 3, 300, 64), [0, 0])
    assert vectors.mean is not None
    before = vectors.mean.clone()
    vectors.freeze(torch.randn(2, 3, 5, 64), [0, 0])
    assert torch.equal(vectors.mean, before)


def test_a_sum_of_stored_values_is_brought_back() -> None:
    values, weights = torch.randn(2, 3, 10, 64), torch.rand(2, 3, 1, 10)
    codec = Int4()
    vectors = Vectors.allocate(
        codec, (2, 3, 8, 64), exact=0, centred=False, dtype=torch.float32, device=torch.device("cpu")
    )
    assert vectors.mean is None
    torch.testing.assert_close(vectors.restore(weights @ vectors.store(values)), weights @ values, atol=1e-5, rtol=0)
