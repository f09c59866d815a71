"""The native kernels of prefill scoring, at each level that this machine has, against float64 on the same inputs."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.codecs import BF16, FP32, Codec, Int4, Int8
from kvwinnow.ops import Chunk, Variant, Window, attention, causal_sums
from kvwinnow.ops.column_sums import column_sums
from kvwinnow.ops.cpu import level, library, scoring, storage
from kvwinnow.statistics import MASS, WINDOW, Statistics
from tests.ops.test_attention import holed, store
from tests.oracle import masked_attention
from tests.running import computing_on


def usable() -> list[str]:
    found = library.load()
    if isinstance(found, library.Absent):
        return []
    return [name for number, name in enumerate(level.LEVELS) if found.built & found.supported & 1 << number]


LEVELS = usable()
DTYPES = list(storage.FLOATS)
pytestmark = pytest.mark.skipif(not LEVELS, reason="there is no native library here")


@contextmanager
def forced(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(level.VARIABLE, name)
        yield


@dataclass
class Inputs:
    """Of the two operators. Attributes: see ``scoring._column_sums``."""

    q: Tensor
    k: Tensor
    shift: Tensor | None
    query_positions: Tensor
    key_positions: Tensor
    scale: float
    softcap: float = 0.0
    sliding: int = 0

    @property
    def rest(self) -> tuple[Tensor | None, Tensor, Tensor, float, float, int]:
        return self.shift, self.query_positions, self.key_positions, self.scale, self.softcap, self.sliding

    def sums(self, lse: Tensor) -> Tensor:
        return torch.ops.kvwinnow.column_sums(self.q, self.k, lse, *self.rest)

    def log_sum_exp(self) -> Tensor:
        return torch.ops.kvwinnow.log_sum_exp(self.q, self.k, *self.rest)

    def definition(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exp and column sums in float64."""
        batch, heads, m, dim = self.q.shape
        kv_heads = self.k.shape[1]
        q = self.q.double().view(batch, kv_heads, heads // kv_heads, m, dim)
        logits = q @ self.k.double().unsqueeze(2).mT
        if self.shift is not None:
            logits = logits + self.shift.double().view(*q.shape[:-1], 1)
        logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        key, query = self.key_positions[:, :, None, None], self.query_positions[:, None, None, :, None]
        visible = (key >= 0) & (key <= query)
        if self.sliding:
            visible &= key > query - self.sliding
        logits = logits.masked_fill(~visible, -torch.inf)
        lse = logits.logsumexp(-1)
        weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
        return lse.view(batch, heads, m), weights.sum((2, 3))


def made(
    *,
    dtype: torch.dtype,
    dim: int,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 1,
    queries: int,
    keys: int,
    softcap: float = 0.0,
    sliding: int = 0,
    shifted: bool = False,
    holes: bool = False,
) -> Inputs:
    """Keys in no order, about a fifth of them empty; queries at the last positions, the first of them of none."""
    q = (2 * torch.randn(batch, queries, kv_heads * group, dim)).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv_heads, keys, dim).to(dtype)
    where = torch.arange(keys, dtype=torch.int32).expand(batch, 1, -1)
    if holes:
        where = torch.rand(batch, kv_heads, keys).argsort(-1).int()
        where.masked_fill_(torch.rand(where.shape) < 0.2, -1)
    own = torch.arange(keys - queries, keys, dtype=torch.int32).expand(batch, -1).clone()
    own[:, : queries // 9] = -1
    shift = torch.randn(batch, kv_heads * group, queries) if shifted else None
    return Inputs(q, k, shift, own, where, dim**-0.5, softcap, sliding)


def check(inputs: Inputs, name: str) -> None:
    lse, sums = inputs.definition()
    with forced(name):
        own_lse, own_sums = inputs.log_sum_exp(), inputs.sums(lse.float())
    torch.testing.assert_close(own_lse.double(), lse, atol=2e-5, rtol=1e-6)
    # What is left out of a sum by rounding is as large as the largest logit's rounding.
    torch.testing.assert_close(own_sums.double(), sums, atol=1e-9, rtol=3e-5)
    assert not own_sums[sums == 0].any(), "what no query sees gets exactly nothing"


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    queries=st.integers(1, 150),
    keys=st.integers(1, 300),
    dim=st.integers(1, 16).map(lambda x: 16 * x),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 50.0]),
    sliding=st.sampled_from([0, 0, 1, 40, 299]),
    shifted=st.booleans(),
    holes=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sums_and_log_sum_exp_are_those_of_the_definition(
    name: str, dtype: torch.dtype, seed: int, **shape: int | float | bool
) -> None:
    torch.manual_seed(seed)
    check(made(dtype=dtype, **shape), name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "group", "dim"), [(2100, 2100, 2, 32), (32, 9000, 4, 32), (70, 4500, 3, 256)]
)
def test_many_keys_and_queries(name: str, dtype: torch.dtype, queries: int, keys: int, group: int, dim: int) -> None:
    """More than one panel of keys, and more than one turn of columns."""
    torch.manual_seed(0)
    check(made(dtype=dtype, dim=dim, group=group, queries=queries, keys=keys), name)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_equal_keys_tie_wherever_they_lie(name: str, dtype: torch.dtype, softcap: float) -> None:
    torch.manual_seed(0)
    inputs = made(dtype=dtype, dim=240, kv_heads=2, group=3, queries=37, keys=2500, softcap=softcap)
    inputs.key_positions = torch.zeros(1, 1, 2500, dtype=torch.int32)  # all of them seen by all
    places = [0, 1, 17, 31, 32, 600, 2047, 2048, 2480, 2499]
    inputs.k[:, :, places] = inputs.k[:, :, :1].clone()
    with forced(name):
        sums = inputs.sums(inputs.log_sum_exp())[:, :, places]
    assert torch.equal(sums, sums[:, :, :1].expand_as(sums))


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_threads_batch_or_heads(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = made(dtype=dtype, dim=64, batch=2, kv_heads=2, group=3, queries=90, keys=1300, holes=True)
    found = []
    for threads in (1, 2, 3):
        with computing_on(threads), forced(name):
            lse = inputs.log_sum_exp()
            found.append((lse, inputs.sums(lse)))
    for lse, sums in found[1:]:
        assert torch.equal(lse, found[0][0])
        assert torch.equal(sums, found[0][1])
    alone = Inputs(
        inputs.q[1:, 3:].contiguous(),
        inputs.k[1:, 1:].contiguous(),
        None,
        inputs.query_positions[1:],
        inputs.key_positions[1:, 1:],
        inputs.scale,
    )
    with forced(name):
        lse = alone.log_sum_exp()
        assert torch.equal(lse, found[0][0][1:, 3:])
        assert torch.equal(alone.sums(lse), found[0][1][1:, 1:])


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_that_see_nothing_add_nothing(name: str, dtype: torch.dtype) -> None:
    inputs = made(dtype=dtype, dim=32, kv_heads=2, group=2, queries=40, keys=70)
    inputs.query_positions.fill_(-1)
    inputs.query_positions[0, 5] = 3
    with forced(name):
        lse = inputs.log_sum_exp()
        sums = inputs.sums(lse)
    seen = torch.zeros(40, dtype=torch.bool).index_fill(0, torch.tensor(5), True)
    assert (lse[:, :, ~seen] == -torch.inf).all()
    assert lse[:, :, seen].isfinite().all()
    torch.testing.assert_close(sums[:, :, :4].sum(-1), torch.full((1, 2), 2.0))
    assert not sums[:, :, 4:].any()
    inputs.query_positions.fill_(-1)
    with forced(name):
        assert not inputs.sums(inputs.log_sum_exp()).any()


@pytest.mark.parametrize("name", [*LEVELS, level.OFF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_too_small_for_float32_are_none(name: str, dtype: torch.dtype) -> None:
    """Neither a denormal number, which takes a processor long, nor less than nothing."""
    q = torch.full((1, 2, 40, 32), 10.0, dtype=dtype)
    k = torch.zeros(1, 1, 64, 32, dtype=dtype)
    k[:, :, 0] = 10.0  # a logit of 3200 x scale
    places = torch.arange(64, dtype=torch.int32).unsqueeze(0)
    chunk = Chunk(k, k, places, (0,))
    slots = store(k[:, :, :0], k[:, :, :0], torch.zeros(1, 1, 0, dtype=torch.int32), FP32())
    for scale, tiny in ((0.026, False), (0.031, True)):
        with forced(name):
            lse = torch.full((1, 2, 40), 3200 * scale)
            sums = column_sums(q, places[:, 24:], lse, slots, chunk, Variant(scale)).chunk
        assert sums[0, 0, 0] == pytest.approx(40, rel=1e-4)
        assert (sums[0, 0, 1:] == 0).all() == tiny
        assert not ((sums > 0) & (sums < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_may_match_much_better_than_visible_ones(name: str, dtype: torch.dtype) -> None:
    """Their weights, if they had any, would be no floats."""
    torch.manual_seed(0)
    inputs = made(dtype=dtype, dim=64, group=2, queries=70, keys=90)
    inputs.q[:] = inputs.q[:, :, :1].clone()
    inputs.k[:, :, 40:] = 40 * inputs.q[:, :1, :1]
    inputs.query_positions[:] = torch.arange(70) % 40  # blocks of 32 hold keys of both kinds
    check(inputs, name)


def test_the_process_keeps_denormal_numbers() -> None:
    inputs = made(dtype=torch.bfloat16, dim=64, queries=40, keys=300)
    with forced(LEVELS[-1]):
        inputs.sums(inputs.log_sum_exp())
    assert (torch.full((100_000,), 1e-39) * 1.0 > 0).all()


@pytest.mark.parametrize("name", LEVELS)
def test_other_users_of_the_tile_registers_are_not_disturbed(name: str) -> None:
    torch.manual_seed(0)
    inputs = made(dtype=torch.bfloat16, dim=96, kv_heads=2, group=2, queries=100, keys=500)
    x = torch.randn(256, 256).bfloat16()
    product = x @ x
    with forced(name):
        lse = inputs.log_sum_exp()
        sums = inputs.sums(lse)
        for _ in range(10):
            assert torch.equal(x @ x, product)
            assert torch.equal(inputs.log_sum_exp(), lse)
            assert torch.equal(x @ x, product)
            assert torch.equal(inputs.sums(lse), sums)


@pytest.mark.parametrize("name", LEVELS)
def test_keys_are_read_where_they_lie(name: str) -> None:
    torch.manual_seed(0)
    together = torch.randn(1, 300, 8, 64).bfloat16()  # tokens, then 4 query, 2 key and 2 value heads
    q, k = together[:, 200:, :4].transpose(1, 2), together[:, :, 4:6].transpose(1, 2)
    own, where = torch.arange(200, 300, dtype=torch.int32), torch.arange(300, dtype=torch.int32)
    inputs = Inputs(q, k, None, own.unsqueeze(0), where.view(1, 1, -1).expand(1, 2, -1), 0.125)
    check(inputs, name)
    plain = Inputs(q.contiguous(), k.contiguous(), None, own.unsqueeze(0), where.view(1, 1, -1), 0.125)
    with forced(name):
        lse = inputs.log_sum_exp()
        assert torch.equal(lse, plain.log_sum_exp())
        assert torch.equal(inputs.sums(lse), plain.sums(lse))


@pytest.fixture
def before_the_edge() -> Iterator[Callable[[Tensor], Tensor]]:
    """Copies a tensor to where the byte after its last one cannot be read."""
    size = 64 * mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    middle = whole.data_ptr() + size
    assert protect(middle, size, 0) == 0

    def copied(x: Tensor) -> Tensor:
        return whole[size - x.nbytes : size].view(x.dtype).view(x.shape).copy_(x)

    yield copied
    protect(middle, size, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_nothing_is_read_beyond_the_last_key_or_query(
    name: str, dtype: torch.dtype, dim: int, before_the_edge: Callable[[Tensor], Tensor]
) -> None:
    inputs = made(dtype=dtype, dim=dim, kv_heads=1, group=2, queries=19, keys=69)
    k = inputs.k
    inputs.k = before_the_edge(k)
    check(inputs, name)
    inputs.k = k
    inputs.q = before_the_edge(inputs.q.contiguous())
    check(inputs, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_keep_the_rules_of_torch(dtype: torch.dtype) -> None:
    inputs = made(dtype=dtype, dim=32, batch=2, kv_heads=2, group=2, queries=20, keys=50, holes=True)
    checks = ("test_schema", "test_faketensor")
    with forced(LEVELS[-1]):
        lse = inputs.log_sum_exp()
        torch.library.opcheck(torch.ops.kvwinnow.log_sum_exp, (inputs.q, inputs.k, *inputs.rest), test_utils=checks)
        torch.library.opcheck(
            torch.ops.kvwinnow.column_sums, (inputs.q, inputs.k, lse, *inputs.rest), test_utils=checks
        )


def test_what_the_kernels_do_not_serve_torch_does() -> None:
    plain = Variant(0.3)
    x = torch.zeros(1, 1, 1, 16)
    assert scoring.serves(x, x, plain) == (os.environ.get(level.VARIABLE) != level.OFF)
    for q, variant in (
        (x[..., :8], plain),
        (x.double(), plain),
        (x.to("meta"), plain),
        (torch.zeros(1, 1, 1, 1040), plain),
        (x[:, :, :0], plain),
        (x, Variant(-0.3)),
        (x, Variant(0.3, softcap=-1.0)),
    ):
        assert not scoring.serves(q, q, variant)
    with forced(level.OFF):
        assert not scoring.serves(x, x, plain)


# -- what is called through the cache --------------------------------------------------------------


@pytest.mark.parametrize("codec", [FP32(), BF16(), Int8(), Int4()], ids=str)
@pytest.mark.parametrize("starts", [(0, 0), (0, 7)], ids=["plain", "padded"])
@pytest.mark.parametrize(
    ("softcap", "sliding", "sinks"),
    [(None, None, False), (None, None, True), (6.0, None, False), (None, 90, True), (6.0, 90, True)],
)
@pytest.mark.parametrize("statistics", [MASS, WINDOW(9)], ids=["mass", "window"])
def test_attention_reports_what_torch_reports(
    codec: Codec,
    starts: tuple[int, int],
    softcap: float | None,
    sliding: int | None,
    sinks: bool,
    statistics: Statistics,
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, count, n = 6, 2, 100, 130
    dtype = torch.bfloat16 if codec == BF16() else torch.float32
    q, (k, v) = (2 * torch.randn(2, heads, n, 64)).to(dtype), torch.randn(2, 2, kv_heads, count + n, 64).to(dtype)
    held = holed(2, kv_heads, count)
    slots = store(k[:, :, :count], v[:, :, :count], held, codec)
    places = torch.arange(count, count + n, dtype=torch.int32).repeat(2, 1)
    for row, start in enumerate(starts):
        places[row] = (places[row] - start).masked_fill(torch.arange(n) < start, -1)
    chunk = Chunk(k[:, :, count:], v[:, :, count:], places, starts)
    window = Window(q[:, :, -9:], places[:, -9:])
    variant = Variant(0.125, softcap, sliding, torch.randn(heads) if sinks else None)
    found = {}
    for name in (*LEVELS, level.OFF):
        with forced(name):
            _, observed = attention(q, slots, chunk, variant=variant, statistics=statistics, window=window)
        assert observed is not None
        found[name] = torch.cat([observed.slots, observed.chunk], 2)
    wanted = found.pop(level.OFF)
    assert wanted.sum() > 9
    for sums in found.values():
        torch.testing.assert_close(sums, wanted, atol=1e-6, rtol=1e-4)
        assert torch.equal(sums == 0, wanted == 0)


@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=40)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    count=st.integers(1, 150),
    queries=st.integers(1, 150),
    softcap=st.sampled_from([None, 4.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sums_of_the_latest_queries_are_the_oracles(
    name: str, kv_heads: int, group: int, count: int, queries: int, softcap: float | None, sinks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    queries = min(queries, count)
    q, k = 3 * torch.randn(queries, kv_heads * group, 16), torch.randn(kv_heads, count, 16)
    sink = torch.randn(kv_heads * group) if sinks else None
    with forced(name):
        sums = causal_sums(q, k, Variant(0.3, softcap, sinks=sink))
    visible = torch.arange(count) <= torch.arange(count - queries, count).unsqueeze(1)
    _, weights = masked_attention(
        q.transpose(0, 1), k, k, visible.expand(kv_heads, -1, -1), scale=0.3, softcap=softcap, sinks=sink
    )
    expected = weights.sum(1).view(kv_heads, group, count).mean(1)
    torch.testing.assert_close(sums.double(), expected, rtol=3e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEVELS)
def test_a_key_that_is_no_number_does_not_score_zero(name: str, dtype: torch.dtype) -> None:
    """Eviction would take just that key, and hide that a model has overflowed. Queries before it are not concerned."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 40, 64, generator=generator).to(dtype) for heads in (4, 2))
    k[0, 0, 12, 3] = torch.nan
    with forced(name):
        sums = causal_sums(q[0].transpose(0, 1), k[0], Variant(0.125))
    assert sums[0].isnan().all()
    assert not sums[1].isnan().any()
