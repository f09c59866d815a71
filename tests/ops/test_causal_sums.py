"""Attention that keys receive from the latest queries: the oracle's sums, whatever the blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvwinnow.ops import Variant, causal_sums
from tests.oracle import masked_attention


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    count=st.integers(1, 150),
    queries=st.integers(1, 150),
    softcap=st.sampled_from([None, 4.0]),
    sinks=st.booleans(),
    logits=st.sampled_from([1, 2000, 2**21]),
    seed=st.integers(0, 2**16),
)
def test_sums_are_the_oracles(
    kv_heads: int, group: int, count: int, queries: int, softcap: float | None, sinks: bool, logits: int, seed: int
) -> None:
    torch.manual_seed(seed)
    queries = min(queries, count)
    q, k = 3 * torch.randn(queries, kv_heads * group, 8), torch.randn(kv_heads, count, 8)
    sink = torch.randn(kv_heads * group) if sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvwinnow.ops.latest.LOGITS", logits)
        sums = causal_sums(q, k, Variant(0.3, softcap, sinks=sink))
    visible = torch.arange(count) <= torch.arange(count - queries, count).unsqueeze(1)
    _, weights = masked_attention(
        q.transpose(0, 1), k, k, visible.expand(kv_heads, -1, -1), scale=0.3, softcap=softcap, sinks=sink
    )
    expected = weights.sum(1).view(kv_heads, group, count).mean(1)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-5)


def test_16_bit_keys_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(70, 4, 8).bfloat16(), torch.randn(2, 300, 8).bfloat16()
    assert torch.equal(causal_sums(q, k, Variant(0.3)), causal_sums(q.float(), k.float(), Variant(0.3)))
