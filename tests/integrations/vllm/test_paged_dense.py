"""The pool as the GPU back ends lay it out: what is written is read, and attention over it is the oracle's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.integrations.vllm.paged_dense import PagedDense
from kvwinnow.ops import Variant
from tests.oracle import masked_attention

BLOCKS, DIM = 9, 8


def pool(heads: int, block: int, token_major: bool) -> Tensor:
    """(blocks, Hkv, block, 2 D) of noise, in one of the two orders of memory that vLLM has."""
    if token_major:
        return torch.randn(BLOCKS, block, heads, 2 * DIM).transpose(1, 2)
    return torch.randn(BLOCKS, heads, block, 2 * DIM)


@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    block=st.sampled_from([4, 16]),
    length=st.integers(1, 40),
    queries=st.integers(1, 40),
    token_major=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=60)
def test_attention_over_what_was_written_is_the_oracles(
    heads: int, group: int, block: int, length: int, queries: int, token_major: bool, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    length = min(length, BLOCKS * block)
    queries = min(queries, length)
    cache = pool(heads, block, token_major)
    blocks = torch.randperm(BLOCKS)[: -(-length // block)]
    places = torch.arange(length)
    slots = blocks[places // block] * block + places % block
    keys, values = torch.randn(heads, length, DIM), torch.randn(heads, length, DIM)
    untouched = [index for index in range(BLOCKS) if index not in blocks.tolist()]
    before = cache[untouched].clone()
    paged = PagedDense(cache, Variant(0.3, softcap))
    paged.write(slots, keys, values)
    read_keys, read_values = paged.read(blocks)
    assert torch.equal(read_keys[:, :length], keys)
    assert torch.equal(read_values[:, :length], values)
    assert torch.equal(paged.keys(blocks).transpose(0, 1).flatten(1, 2), read_keys)
    assert torch.equal(cache[untouched], before)

    query, out = torch.randn(queries, heads * group, DIM), torch.zeros(queries, heads * group * DIM)
    paged.attend(query, out, blocks, length)
    seen = places <= torch.arange(length - queries, length).unsqueeze(1)
    expected, _ = masked_attention(
        query.transpose(0, 1), keys, values, seen.expand(heads, -1, -1), scale=0.3, softcap=softcap
    )
    torch.testing.assert_close(out.view(queries, -1, DIM).double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [255, 256, 257, 600])
def test_queries_beyond_one_block_of_them(queries: int) -> None:
    torch.manual_seed(queries)
    cache = torch.randn(50, 2, 16, 2 * DIM)
    paged, blocks = PagedDense(cache, Variant(0.4)), torch.randperm(50)
    keys, values = (part[:, :700] for part in paged.read(blocks))
    query, out = torch.randn(queries, 4, DIM), torch.zeros(queries, 4, DIM)
    paged.attend(query, out, blocks, 700)
    seen = torch.arange(700) <= torch.arange(700 - queries, 700).unsqueeze(1)
    expected, _ = masked_attention(query.transpose(0, 1), keys, values, seen.expand(2, -1, -1), scale=0.4)
    torch.testing.assert_close(out.double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
