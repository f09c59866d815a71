"""Attention over slots and chunks: its statistics by definition, and its memory in proportion to the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvwinnow.cache import LayerCache, Step
from kvwinnow.codecs import FP32, Codec, Int4
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops import Chunk, Slots, Variant, Window, attention
from kvwinnow.policies import H2O, Phase, Policy, SlidingWindow, SnapKV
from kvwinnow.statistics import MASS, NONE, WINDOW
from tests.oracle import masked_attention

CPU = torch.device("cpu")


def store(k: Tensor, v: Tensor, positions: Tensor, codec: Codec) -> Slots:
    """Slots that hold these keys and values, (B, Hkv, S, D), at positions (B, Hkv, S)."""
    batch, heads, count, _ = k.shape
    rows = torch.arange(batch * heads).repeat_interleave(count)
    slots = torch.arange(count).repeat(batch * heads)
    made = []
    for x, centred in ((k, True), (v, False)):
        vectors = Vectors.allocate(codec, x.shape, exact=4, centred=centred, dtype=x.dtype, device=CPU)
        vectors.freeze(x, [0] * batch)
        vectors.write_many(rows, slots, x.flatten(0, 2))
        made.append(vectors)
    return Slots(*made, positions)


def holed(batch: int, heads: int, count: int) -> Tensor:
    """Random slots, about half of them empty, in no order; positions up to ``count``."""
    positions = torch.rand(batch, heads, count).argsort(-1).int()
    return positions.masked_fill(torch.rand(batch, heads, count) < 0.5, -1)


def by_definition(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, n, D) and weights (B, Hkv, n, N), mean over the group."""
    rows = [masked_attention(*row, scale) for row in zip(q, k, v, visible, strict=True)]
    weights = torch.stack([weight for _, weight in rows])
    return torch.stack([out for out, _ in rows]), weights.unflatten(1, (k.shape[1], -1)).mean(2)


@pytest.mark.parametrize("count", [1, 40, 1500])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 2), (8, 1)])
def test_decode_attends_to_occupied_slots_and_reports_their_weights(heads: int, kv_heads: int, count: int) -> None:
    torch.manual_seed(count)
    q = 2 * torch.randn(2, heads, 1, 16)
    k, v = torch.randn(2, 2, kv_heads, count, 16)
    positions = holed(2, kv_heads, count)
    positions[:, :, 0] = count
    out, observed = attention(q, store(k, v, positions, FP32()), variant=Variant(0.25), statistics=MASS)
    wanted, weights = by_definition(q, k, v, (positions >= 0).unsqueeze(2), 0.25)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)
    assert observed is not None
    torch.testing.assert_close(observed.slots.double(), weights[:, :, 0], atol=1e-6, rtol=1e-5)
    assert observed.chunk.shape == (2, kv_heads, 0)
    assert attention(q, store(k, v, positions, FP32()), variant=Variant(0.25))[1] is None


@pytest.mark.parametrize(("count", "n"), [(0, 5), (30, 1), (40, 200), (1500, 9), (5, 2100)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2)])
def test_a_chunk_attends_to_slots_and_causally_to_itself(heads: int, kv_heads: int, count: int, n: int) -> None:
    torch.manual_seed(n)
    q = 2 * torch.randn(1, heads, n, 8)
    k, v = torch.randn(2, 1, kv_heads, count + n, 8)
    held = holed(1, kv_heads, count)
    places = torch.arange(count, count + n, dtype=torch.int32).unsqueeze(0)
    slots = store(k[:, :, :count], v[:, :, :count], held, FP32())
    chunk = Chunk(k[:, :, count:], v[:, :, count:], places, (0,))
    visible = torch.cat([held, places.unsqueeze(1).expand(-1, kv_heads, -1)], 2).unsqueeze(2)
    visible = (visible >= 0) & (visible <= places[:, None, :, None])
    wanted, weights = by_definition(q, k, v, visible, 0.35)
    width = min(n, 6)
    window = Window(q[:, :, -width:], places[:, -width:])
    for statistics, first in ((MASS, 0), (WINDOW(width), n - width)):
        out, observed = attention(q, slots, chunk, variant=Variant(0.35), statistics=statistics, window=window)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)
        assert observed is not None
        sums = torch.cat([observed.slots, observed.chunk], 2)
        torch.testing.assert_close(sums.double(), weights[:, :, first:].sum(2), atol=1e-5, rtol=1e-5)
    assert attention(q, slots, chunk, variant=Variant(0.35), statistics=NONE)[1] is None


def test_weights_add_up_to_one_for_each_query() -> None:
    q, (k, v) = torch.randn(1, 4, 50, 8), torch.randn(2, 1, 2, 50, 8)
    chunk = Chunk(k, v, torch.arange(50, dtype=torch.int32).unsqueeze(0), (0,))
    slots = store(k[:, :, :0], v[:, :, :0], torch.zeros(1, 2, 0, dtype=torch.int32), FP32())
    _, observed = attention(q, slots, chunk, variant=Variant(0.35), statistics=MASS)
    assert observed is not None
    torch.testing.assert_close(observed.chunk.sum(-1), torch.full((1, 2), 50.0))


def test_padding_gives_zeros_and_gets_no_weight() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 2, 9, 8)
    places = torch.arange(9, dtype=torch.int32).expand(2, 9).clone()
    places[1] = torch.arange(-4, 5).clamp(min=-1)
    slots = store(k[:, :, :0], v[:, :, :0], torch.zeros(2, 2, 0, dtype=torch.int32), FP32())
    out, observed = attention(q, slots, Chunk(k, v, places, (0, 4)), variant=Variant(0.35), statistics=MASS)
    alone, own = attention(
        q[1:, :, 4:],
        slots.row(1),
        Chunk(k[1:, :, 4:], v[1:, :, 4:], places[1:, 4:], (0,)),
        variant=Variant(0.35),
        statistics=MASS,
    )
    assert observed is not None
    assert own is not None
    assert not out[1, :, :4].any()
    assert not observed.chunk[1, :, :4].any()
    torch.testing.assert_close(out[1:, :, 4:], alone)
    torch.testing.assert_close(observed.chunk[1:, :, 4:], own.chunk)


# -- memory --------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # An expanded view has the elements of its storage.
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("starts", [(0,), (7,)], ids=["plain", "padded"])
@pytest.mark.parametrize("codec", [FP32(), Int4()], ids=str)
@pytest.mark.parametrize("policy", [H2O(budget=256), SnapKV(budget=256)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("chunks", [1, 3])
def test_no_tensor_of_a_prompt_is_quadratic(chunks: int, policy: Policy, codec: Codec, starts: tuple[int]) -> None:
    def largest(n: int) -> int:
        heads, kv_heads, dim = 4, 2, 16
        cache = LayerCache(policy, codec, codec, exact=4)
        seen = 0
        with Largest() as most:
            for _ in range(chunks):
                q = torch.randn(1, heads, n, dim)
                k, v = torch.randn(1, kv_heads, n, dim), torch.randn(1, kv_heads, n, dim)
                positions = torch.arange(seen, seen + n, dtype=torch.int32).unsqueeze(0) - starts[0]
                positions = positions.masked_fill(torch.arange(n) < starts[0] * (seen == 0), -1)
                first = starts if seen == 0 else (0,)
                seen += n
                cache.attend(q, k, v, Step(Phase.PROMPT, positions, first, (seen - starts[0],), (256,)), Variant(0.25))
        return most.elements

    few, many = largest(2048), largest(4096)
    # A block of queries by a block of keys, 128 x 2048 for each of 4 heads, or the queries themselves.
    assert few <= 128 * 2048 * 4 < 2048 * 2048 * 4 // 8
    assert many <= 2 * few


@pytest.mark.parametrize("codec", [FP32(), Int4()], ids=str)
def test_decode_repeats_no_key_and_dequantises_by_blocks(codec: Codec) -> None:
    heads, kv_heads, dim, count = 16, 2, 64, 8192
    k, v = torch.randn(2, 1, kv_heads, count, dim)
    positions = torch.arange(count, dtype=torch.int32).expand(1, kv_heads, -1)
    slots = store(k, v, positions, codec)
    held = [t.untyped_storage().nbytes() // t.itemsize for x in (slots.keys, slots.values) for t in x.tensors()]
    with Largest() as most:
        out, _ = attention(torch.randn(1, heads, 1, dim), slots, variant=Variant(0.1), statistics=MASS)
    assert out.shape == (1, heads, 1, dim)
    # Nothing as large as the cache in floats times the group, and, if it is coded, no float copy of it at all.
    assert most.elements <= max(kv_heads * 1024 * dim, heads * count, *held)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_of_a_sliding_prompt_is_quadratic(softcap: float | None) -> None:
    heads, kv_heads, dim, sliding = 4, 2, 16, 256

    def largest(n: int) -> int:
        cache = LayerCache(SlidingWindow(budget=sliding - 1), FP32(), FP32(), exact=4, budget=sliding - 1)
        with Largest() as most:
            for seen in (0, n):
                q, k, v = torch.randn(1, heads, n, dim), *torch.randn(2, 1, kv_heads, n, dim)
                positions = torch.arange(seen, seen + n, dtype=torch.int32).unsqueeze(0)
                step = Step(Phase.PROMPT, positions, (0,), (seen + n,), (None,))
                cache.attend(q, k, v, step, Variant(0.25, softcap, sliding))
        return most.elements

    few, many = largest(2048), largest(4096)
    # A block of queries by the keys in its reach, 512 x (512 + 256), or the queries themselves.
    assert few <= max(512 * 768 * heads, 2048 * heads * dim * 2)
    assert many <= 2 * few


@pytest.mark.parametrize("codec", [FP32(), Int4()], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("count", "n", "sliding"), [(200, 300, 150), (1500, 140, 1300), (40, 9, 4), (30, 5, 1)])
def test_a_sliding_chunk_sees_of_the_slots_what_its_window_reaches(
    count: int, n: int, sliding: int, softcap: float | None, codec: Codec
) -> None:
    torch.manual_seed(n)
    heads, kv_heads = 4, 2
    q = 2 * torch.randn(2, heads, n, 32)
    k, v = torch.randn(2, 2, kv_heads, count + n, 32)
    sinks = torch.randn(heads)
    held = torch.arange(count, dtype=torch.int32).expand(2, kv_heads, -1)[:, :, torch.randperm(count)].contiguous()
    held[:, :, ::7] = -1
    places = torch.arange(count, count + n, dtype=torch.int32).expand(2, -1)
    slots = store(k[:, :, :count], v[:, :, :count], held, codec)
    if codec.quantises:  # attend to what is stored
        for x, vectors in ((k, slots.keys), (v, slots.values)):
            stored = vectors.restore(vectors.read(0, count))
            x[:, :, :count] = stored if vectors.mean is None else stored + vectors.mean.unsqueeze(2)
    chunk = Chunk(k[:, :, count:], v[:, :, count:], places, (0, 0))
    keys = torch.cat([held, places.unsqueeze(1).expand(-1, kv_heads, -1)], 2).unsqueeze(2)
    query = places[:, None, :, None]
    visible = (keys >= 0) & (keys <= query) & (keys > query - sliding)
    rows = [masked_attention(*row, 0.2, softcap, sinks) for row in zip(q, k, v, visible, strict=True)]
    variant = Variant(0.2, softcap, sliding, sinks)
    out, observed = attention(q, slots, chunk, variant=variant, statistics=MASS)
    torch.testing.assert_close(out.double(), torch.stack([out for out, _ in rows]), atol=2e-5, rtol=0)
    assert observed is not None
    weights = torch.stack([weight for _, weight in rows]).unflatten(1, (kv_heads, -1)).mean(2).sum(2)
    sums = torch.cat([observed.slots, observed.chunk], 2)
    torch.testing.assert_close(sums.double(), weights, atol=2e-5, rtol=1e-4)


def test_softmax_sinks_take_weight_and_give_no_value() -> None:
    q, (k, v) = torch.randn(1, 4, 1, 8), torch.randn(2, 1, 2, 6, 8)
    positions = torch.arange(6, dtype=torch.int32).expand(1, 2, -1)
    slots = store(k, v, positions, FP32())
    plain, weights = attention(q, slots, variant=Variant(0.3), statistics=MASS)
    for level, share in ((-100.0, 1.0), (100.0, 0.0)):
        sinks = torch.full((4,), level, dtype=torch.bfloat16)
        out, observed = attention(q, slots, variant=Variant(0.3, sinks=sinks), statistics=MASS)
        torch.testing.assert_close(out, share * plain)
        assert observed is not None
        assert weights is not None
        torch.testing.assert_close(observed.slots, share * weights.slots)
