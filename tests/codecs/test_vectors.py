"""Storage for slots: any of them can be overwritten alone, and nothing is ever quantised twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvwinnow.cache.memory import vectors_nbytes
from kvwinnow.codecs import parse_codec
from kvwinnow.codecs.vectors import Vectors

INTEGERS = ["int8", "int8:group=16", "int4", "int4:group=16,rotate=false", "int4:centre=false"]
FLOATS = ["fp8", "fp8:group=16", "fp4", "fp4:rotate=false,centre=false", "fp4:style=mx", "fp4:group=8,centre=false"]
QUANTISING = [*INTEGERS, *FLOATS]
CODECS = ["fp32", "bf16", "fp16", *QUANTISING]
BATCH, HEADS, SLOTS, DIM, EXACT = 2, 3, 12, 32, 4


def filled(
    codec: str, *, exact: int = EXACT, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Vectors, Tensor]:
    """Storage with a random vector in each slot, and those vectors (B, Hkv, S, D)."""
    torch.manual_seed(seed)
    vectors = Vectors.allocate(
        parse_codec(codec),
        (BATCH, HEADS, SLOTS, DIM),
        exact=exact,
        centred=True,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    x = (torch.randn(BATCH, HEADS, SLOTS, DIM) + 2).to(dtype)
    vectors.freeze(x, [0] * BATCH)
    rows = torch.arange(BATCH * HEADS).repeat_interleave(SLOTS)
    vectors.write_many(rows, torch.arange(SLOTS).repeat(BATCH * HEADS), x.flatten(0, 2))
    return vectors, x


def frozen(vectors: Vectors) -> list[Tensor]:
    """Every slot's bits: each tensor as (B, Hkv, its slots, width)."""
    return [part.clone() for part in (vectors.exact, *vectors.parts)]


def slots_of(vectors: Vectors) -> list[range]:
    edge = vectors.exact.shape[2]
    return [range(edge), *[range(edge, vectors.slots)] * len(vectors.parts)]


@pytest.mark.parametrize("slot", range(SLOTS))
@pytest.mark.parametrize("codec", CODECS)
def test_one_slot_is_overwritten_and_no_other_bit_changes(codec: str, slot: int) -> None:
    vectors, _ = filled(codec)
    before = frozen(vectors)
    new = torch.randn(BATCH, HEADS, 1, DIM)
    # Another slot in one head: the heads of a row are independent.
    where = torch.full((BATCH, HEADS, 1), slot)
    where[1, 2] = SLOTS - 1 - slot
    vectors.write_one(where, new)
    changed = torch.zeros(BATCH, HEADS, SLOTS, dtype=torch.bool).scatter(2, where, True)
    for was, now, slots in zip(before, frozen(vectors), slots_of(vectors), strict=True):
        same = (was == now).all(-1)
        assert same[~changed[:, :, list(slots)]].all()
    close = {"int4": 0.7, "fp4": 1.0, "fp8": 0.25}.get(codec.partition(":")[0], 0.05)
    index = where.unsqueeze(-1).expand(-1, -1, -1, DIM)
    stored = vectors.read(0, SLOTS).float().gather(2, index)
    torch.testing.assert_close(stored, vectors.store(new).float(), atol=close, rtol=0.01)


@pytest.mark.parametrize("codec", CODECS)
def test_one_slot_and_many_slots_are_written_alike(codec: str) -> None:
    one, _ = filled(codec)
    many, _ = filled(codec)
    new = torch.randn(BATCH, HEADS, 1, DIM)
    where = torch.randint(0, SLOTS, (BATCH, HEADS, 1), generator=torch.Generator().manual_seed(1))
    one.write_one(where, new)
    many.write_many(torch.arange(BATCH * HEADS), where.flatten(), new.flatten(0, 2))
    for a, b in zip(frozen(one), frozen(many), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("count", [1, 3, EXACT, EXACT + 3, SLOTS])
@pytest.mark.parametrize("codec", CODECS)
def test_the_first_slots_and_many_slots_are_written_alike(codec: str, count: int) -> None:
    first, _ = filled(codec)
    many, _ = filled(codec)
    new = torch.randn(BATCH, HEADS, count, DIM)
    first.write_first(new)
    rows = torch.arange(BATCH * HEADS).repeat_interleave(count)
    many.write_many(rows, torch.arange(count).repeat(BATCH * HEADS), new.flatten(0, 2))
    for a, b in zip(frozen(first), frozen(many), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", QUANTISING)
def test_the_first_slots_are_exact_up_to_the_models_dtype(codec: str, dtype: torch.dtype) -> None:
    vectors, x = filled(codec, dtype=dtype)
    # In stored space, where float32 arithmetic brought them, and rounded once to the model's dtype.
    assert vectors.exact.dtype == dtype
    assert torch.equal(vectors.exact, vectors.store(x)[:, :, :EXACT].to(dtype))
    restored = vectors.restore(vectors.exact.float())
    restored = restored if vectors.mean is None else restored + vectors.mean.unsqueeze(2)
    error = restored - x[:, :, :EXACT].float()
    assert error.abs().max() <= 2 * torch.finfo(dtype).eps * x.float().norm(dim=-1).max()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16"])
def test_formats_that_do_not_quantise_hold_all_slots_alike(codec: str) -> None:
    vectors, x = filled(codec)
    x = 1e5 * x
    vectors.write_many(
        torch.arange(BATCH * HEADS).repeat_interleave(SLOTS),
        torch.arange(SLOTS).repeat(BATCH * HEADS),
        x.flatten(0, 2),
    )
    (stored,) = vectors.codec.encode(x)
    assert vectors.exact.dtype == stored.dtype
    assert torch.equal(vectors.read(0, SLOTS), stored)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 12), (0, 4), (0, 2), (2, 4), (2, 9), (4, 12), (5, 9), (11, 12), (6, 6)]
)
@pytest.mark.parametrize("codec", CODECS)
def test_a_range_of_slots_reads_as_part_of_all(codec: str, start: int, stop: int) -> None:
    vectors, _ = filled(codec)
    assert torch.equal(vectors.read(start, stop), vectors.read(0, SLOTS)[:, :, start:stop])


@pytest.mark.parametrize("slots", [12, 40, 7, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_resizing_moves_bits(codec: str, slots: int) -> None:
    vectors, _ = filled(codec)
    before = frozen(vectors)
    vectors.resize(slots)
    assert vectors.slots == slots
    for was, now in zip(before, frozen(vectors), strict=True):
        count = min(was.shape[2], now.shape[2])
        assert torch.equal(was[:, :, :count], now[:, :, :count])
        assert not now[:, :, count:].any()


@pytest.mark.parametrize("codec", CODECS)
def test_resizing_in_another_order_moves_bits(codec: str) -> None:
    vectors, _ = filled(codec)
    edge = vectors.exact.shape[2]
    generator = torch.Generator().manual_seed(2)
    shuffled = torch.rand(BATCH, HEADS, SLOTS - edge, generator=generator).argsort(-1)[:, :, :5] + edge
    order = torch.cat([torch.arange(edge).expand(BATCH, HEADS, -1), shuffled], 2)
    before = vectors.read(0, SLOTS)
    vectors.resize(edge + 5, order)
    assert torch.equal(vectors.read(0, edge + 5), before.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, DIM)))


@pytest.mark.parametrize("codec", CODECS)
def test_a_row_is_a_view_of_the_same_memory(codec: str) -> None:
    vectors, _ = filled(codec)
    row = vectors.row(1)
    assert torch.equal(row.read(0, SLOTS), vectors.read(0, SLOTS)[1:])
    row.write_one(torch.full((1, HEADS, 1), 6), torch.ones(1, HEADS, 1, DIM))
    assert torch.equal(row.read(0, SLOTS), vectors.read(0, SLOTS)[1:])


@pytest.mark.parametrize("exact", [0, 3, 4, 100])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_predicted_bytes_are_those_of_the_storages(codec: str, centred: bool, exact: int) -> None:
    made, shape = parse_codec(codec), (BATCH, HEADS, SLOTS, DIM)
    vectors = Vectors.allocate(
        made, shape, exact=exact, centred=centred, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    real = sum(tensor.untyped_storage().nbytes() for tensor in vectors.tensors())
    assert real == vectors_nbytes(made, shape, exact=exact, centred=centred, itemsize=2)
