"""One pass of attention with its log-sum-exp, in both ways it is computed, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvwinnow.ops.flash import SLIDING_BLOCK, _blockwise, flash, merge, sliding_flash
from tests.oracle import masked_attention

Pass = Callable[[Tensor, Tensor, Tensor, float, bool, Tensor | None], tuple[Tensor, Tensor]]


def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return flash(q, k, v, scale=scale, causal=causal, mask=mask)


PASSES: dict[str, Pass] = {"kernel": kernel, "blockwise": _blockwise}
GROUPS = [(1, 1), (3, 1), (4, 4), (8, 2), (8, 1)]


def tensors(batch: int, heads: int, kv_heads: int, n: int, m: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n + m)
    return (
        2 * torch.randn(batch, heads, n, dim),
        torch.randn(batch, kv_heads, m, dim),
        torch.randn(batch, kv_heads, m, dim),
    )


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64; visible (B, Hq, n, m)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.stack([masked_attention(*row, scale)[0] for row in zip(q, k, v, visible, strict=True)])
    logits = (q.double() @ k.double().mT * scale).masked_fill(~visible, -math.inf)
    return out, logits.logsumexp(-1)


def compare(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, atol: float = 1e-5) -> None:
    for actual, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=atol, rtol=1e-6)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("n", [1, 2, 127, 129, 300])
def test_causal_attention(n: int, heads: int, kv_heads: int, name: str) -> None:
    q, k, v = tensors(2, heads, kv_heads, n, n)
    visible = torch.ones(n, n, dtype=torch.bool).tril().expand(2, heads, n, n)
    compare(PASSES[name](q, k, v, 0.25, True, None), expected(q, k, v, 0.25, visible))


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 40), (5, 300), (200, 7)])
def test_masked_attention(n: int, m: int, heads: int, kv_heads: int, name: str) -> None:
    q, k, v = tensors(2, heads, kv_heads, n, m)
    hidden = torch.rand(2, heads, 1, m) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(2, heads, 1, m).masked_fill(hidden, -math.inf)
    visible = (~hidden).expand(2, heads, n, m)
    compare(PASSES[name](q, k, v, 0.25, False, mask), expected(q, k, v, 0.25, visible))


@pytest.mark.parametrize("name", PASSES)
def test_attention_to_everything(name: str) -> None:
    q, k, v = tensors(2, 4, 2, 9, 33)
    visible = torch.ones(2, 4, 9, 33, dtype=torch.bool)
    compare(PASSES[name](q, k, v, 0.25, False, None), expected(q, k, v, 0.25, visible))


@pytest.mark.parametrize("wide", [False, True], ids=["kernel", "blockwise"])
@pytest.mark.parametrize("m", [1, 2, 32, 33, 600])
def test_a_query_that_sees_no_key_gives_zeros_of_no_weight(m: int, wide: bool) -> None:
    q, k, v = tensors(2, 4, 2, 3, m)
    v = torch.cat([v, v], -1) if wide else v  # values of another width take the blockwise way
    mask = torch.zeros(2, 4, 1, m)
    mask[0, 1:3] = -math.inf
    mask[1] = -math.inf
    out, lse = flash(q, k, v, scale=0.25, mask=mask)
    for row, heads in ((0, slice(1, 3)), (1, slice(0, 4))):
        assert not out[row, heads].any()
        assert (lse[row, heads] == -math.inf).all()
    compare(
        (out[0, [0, 3]], lse[0, [0, 3]]),
        tuple(x[0, [0, 3]] for x in expected(q, k, v, 0.25, (mask == 0).expand(-1, -1, 3, -1))),
    )


def test_values_of_another_width() -> None:
    q, k, _ = tensors(1, 4, 2, 6, 6)
    v = torch.randn(1, 2, 6, 5)
    visible = torch.ones(6, 6, dtype=torch.bool).tril().expand(1, 4, 6, 6)
    compare(flash(q, k, v, scale=0.25, causal=True), expected(q, k, v, 0.25, visible))


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype, name: str) -> None:
    q, k, v = (x.to(dtype) for x in tensors(2, 4, 2, 70, 70))
    visible = torch.ones(70, 70, dtype=torch.bool).tril().expand(2, 4, 70, 70)
    out, lse = PASSES[name](q, k, v, 0.25, True, None)
    wanted = expected(q, k, v, 0.25, visible)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # Weights and output are each rounded once; the log-sum-exp is not.
    eps = torch.finfo(dtype).eps
    assert (out.double() - wanted[0]).abs().max() <= 2 * eps * v.abs().max()
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("split", [1, 10, 39])
def test_merging_two_passes_is_one_pass_over_the_union(split: int) -> None:
    q, k, v = tensors(2, 4, 2, 5, 40)
    one = flash(q, k[:, :, :split], v[:, :, :split], scale=0.25)
    other = flash(q, k[:, :, split:], v[:, :, split:], scale=0.25)
    compare(merge(one, other), expected(q, k, v, 0.25, torch.ones(2, 4, 5, 40, dtype=torch.bool)))


def test_merging_with_nothing_changes_nothing() -> None:
    q, k, v = tensors(2, 4, 2, 5, 40)
    one = flash(q, k, v, scale=0.25)
    nothing = flash(q, k, v, scale=0.25, mask=torch.full((2, 4, 1, 40), -math.inf))
    for actual, wanted in zip(merge(one, nothing), one, strict=True):
        assert torch.equal(actual, wanted)


def test_merging_survives_logits_of_any_size() -> None:
    q, k, v = tensors(1, 2, 1, 4, 20)
    one = flash(100 * q, k[:, :, :10], v[:, :, :10], scale=1.0)
    other = flash(100 * q, k[:, :, 10:], v[:, :, 10:], scale=1.0)
    visible = torch.ones(1, 2, 4, 20, dtype=torch.bool)
    compare(merge(one, other), expected(100 * q, k, v, 1.0, visible), atol=1e-3)


# -- variants ---------------------------------------------------------------------------------------------------------


def by_definition(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of soft-capped attention in float64; visible (n, m)."""
    group = q.shape[1] // k.shape[1]
    logits = 0.25 * (q.double() @ k.repeat_interleave(group, 1).double().mT)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~visible, -math.inf)
    return logits.softmax(-1) @ v.repeat_interleave(group, 1).double(), logits.logsumexp(-1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sliding", [1, 2, 100, SLIDING_BLOCK - 1, SLIDING_BLOCK, SLIDING_BLOCK + 1, 5000])
@pytest.mark.parametrize("n", [1, 7, SLIDING_BLOCK, 2 * SLIDING_BLOCK + 130])
def test_sliding_attention(n: int, sliding: int, softcap: float | None) -> None:
    q, k, v = tensors(2, 4, 2, n, n)
    ahead = torch.arange(n).unsqueeze(1) - torch.arange(n)
    compare(
        sliding_flash(q, k, v, scale=0.25, sliding=sliding, softcap=softcap),
        by_definition(q, k, v, (ahead >= 0) & (ahead < sliding), softcap),
    )


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_soft_capping_comes_after_the_shift_and_before_the_mask(causal: bool, shifted: bool) -> None:
    q, k, v = tensors(2, 4, 2, 150, 150)
    mean = torch.randn(1, 2, 1, 16)
    shift = (q.unflatten(1, (2, 2)) @ mean.unsqueeze(2).mT).flatten(1, 2) if shifted else None
    visible = torch.ones(150, 150, dtype=torch.bool)
    actual = flash(q, k - mean if shifted else k, v, scale=0.25, causal=causal, softcap=2.0, shift=shift)
    compare(actual, by_definition(q, k, v, visible.tril() if causal else visible, 2.0))
