"""A layer's fork against a deep copy of the layer: the same outputs, and nothing copied but what a fork writes."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.cache import LayerCache
from kvwinnow.cache.memory import LayerShape, layer_nbytes, moments_nbytes
from kvwinnow.codecs import parse_codec
from kvwinnow.ops.reference import SLOT_BLOCK
from tests.streams import LEAST, Call, Method, Stream, Turn, cases, search
from tests.test_oracle import attend, held

CODECS = ["fp32", "bf16", "fp8", "int8", "int4", "fp4", "fp4:style=mx"]


def new_cache(method: Method, stream: Stream, codecs: tuple[str, str]) -> LayerCache:
    return stream.cache(method, *map(parse_codec, codecs))


def storages(*caches: LayerCache) -> dict[int, int]:
    """Bytes of every distinct storage that the layers refer to, by its address; shared ones once."""
    found = {}
    for cache in caches:
        tensors = [*cache.running.values(), cache.window, *(cache.moments.tensors() if cache.moments else ())]
        if cache.slots is not None:
            tensors += [*cache.slots.keys.tensors(), *cache.slots.values.tensors(), cache.slots.positions]
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def content(cache: LayerCache) -> dict[str, Tensor]:
    """What each token that a head holds is stored as, whatever the slots: comparable between layouts."""
    assert cache.slots is not None
    positions = cache.slots.positions
    order = torch.where(positions < 0, 2**30, positions).argsort(-1)[:, :, : max(cache.kept)]
    index = order.unsqueeze(-1).expand(-1, -1, -1, cache.slots.keys.exact.shape[3])
    found = {"positions": positions.gather(2, order)}
    for name, vectors in (("keys", cache.slots.keys), ("values", cache.slots.values)):
        stored = vectors.read(0, vectors.slots).gather(2, index)
        found[name] = stored.masked_fill((found["positions"] < 0).unsqueeze(-1), 0.0)
    for kind, tensor in cache.running.items():
        found[kind.name] = tensor.gather(2, order).masked_fill(found["positions"] < 0, 0.0)
    return found


def foretold(cache: LayerCache, stream: Stream) -> int:
    """Bytes that the memory arithmetic gives for as many slots, shared or not."""
    assert cache.slots is not None
    shape = LayerShape(stream.heads, stream.kv_heads, stream.dim, exact=4, itemsize=4)
    codecs, slots = (cache.k_codec, cache.v_codec), cache.slots.positions.shape[2]
    queries = 0 if cache.window is None else cache.window.shape[2]
    moments = 0 if cache.moments is None else moments_nbytes(stream.rows, stream.heads, stream.dim)
    observing = stream.rows * stream.heads * queries * stream.dim * stream.dtype.itemsize
    return layer_nbytes(cache.policy, codecs, shape, batch=stream.rows, slots=slots) + observing + moments


def same(one: LayerCache, other: LayerCache) -> None:
    assert one.kept == other.kept
    a, b = content(one), content(other)
    assert torch.equal(a["positions"], b["positions"])
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-5)


@st.composite
def forked(draw: st.DrawFn, name: str) -> tuple[Method, Stream, tuple[str, str], list[int]]:
    method, stream = draw(cases(name, 2))
    calls = len(list(stream.calls()))
    codec = st.sampled_from(CODECS)
    forks = draw(st.lists(st.integers(0, calls - 1), min_size=1, max_size=3))
    return method, stream, (draw(codec), draw(codec)), forks


def follow(method: Method, stream: Stream, codecs: tuple[str, str], forks: list[int], tally: Counter[str]) -> None:
    """Give the same stream to a line of forks of forks and to a cache that is never forked.

    At each fork the donor is given something else, which its fork must not notice, nor the donor its fork's tokens.
    """
    line, plain = new_cache(method, stream, codecs), new_cache(method, stream, codecs)
    left: list[tuple[LayerCache, LayerCache]] = []
    for number, call in enumerate(stream.calls()):
        out = attend(line, call, stream)
        torch.testing.assert_close(out, attend(plain, call, stream), atol=1e-5, rtol=1e-5)
        same(line, plain)
        for donor, twin in left:
            louder = Call(call.step, call.q, call.k + 1, -call.v)
            torch.testing.assert_close(
                attend(donor, louder, stream), attend(twin, louder, stream), atol=1e-5, rtol=1e-5
            )
            same(donor, twin)
        if number in forks:
            left = [(line, copy.deepcopy(line))]
            line = line.fork()
            same(line, plain)
            tally["forks"] += 1
        assert line.nbytes() == sum(storages(line).values()) == foretold(line, stream)
        tally["shared"] += line.shared_nbytes() > 0


@pytest.mark.parametrize("name", LEAST)
def test_a_fork_goes_on_like_a_deep_copy_and_so_does_its_donor(name: str) -> None:
    tally = Counter[str]()
    search(forked(name), lambda case: follow(*case, tally), examples=25)
    assert tally["forks"] > 25
    assert tally["shared"] > 20


DOCUMENT = Stream(kv_heads=2, group=2, dim=32, turns=(Turn((70, 50), (70,), (40, 40), 0),), seed=3)
H2O = Method("h2o", {"sinks": 0, "recent": 4, "evict_every": 1})


def questions(seed: int, tokens: int = 6, decoded: int = 12) -> Stream:
    turn = Turn((tokens, tokens), (tokens,), (40, 40), decoded)
    return Stream(kv_heads=2, group=2, dim=32, turns=(DOCUMENT.turns[0], turn), seed=seed)


def ask(cache: LayerCache, stream: Stream) -> None:
    for call in list(stream.calls())[1:]:
        attend(cache, call, stream)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "method", [Method("full"), H2O, Method("snapkv", {"sinks": 2, "window": 3})], ids=lambda made: made.name
)
def test_forks_share_the_document_and_own_what_they_write(method: Method, codec: str) -> None:
    document = new_cache(method, DOCUMENT, (codec, codec))
    for call in DOCUMENT.calls():
        attend(document, call, DOCUMENT)
    whole = document.nbytes()
    forks = [document.fork() for _ in range(5)]
    assert document.slots is not None
    own = [document.slots.positions, *document.running.values(), document.slots.keys.exact, document.slots.values.exact]
    copied = sum(tensor.untyped_storage().nbytes() for tensor in own if tensor is not None)
    assert sum(storages(document, *forks).values()) == whole + 5 * copied
    for fork in forks:
        assert fork.nbytes() == whole
        assert fork.nbytes() - fork.shared_nbytes() == copied
    before = storages(document)
    for seed, fork in enumerate(forks):
        ask(fork, questions(seed))
    # The donor's memory is as it was, and each fork has its own small rest beside what all share.
    assert storages(document) == before
    shared = sum(tensor.untyped_storage().nbytes() for tensor in document.slots.keys.shared_tensors())
    shared += sum(tensor.untyped_storage().nbytes() for tensor in document.slots.values.shared_tensors())
    assert sum(storages(*forks).values()) == shared + sum(fork.nbytes() - fork.shared_nbytes() for fork in forks)
    assert all(fork.shared_nbytes() == shared for fork in forks)
    # 18 tokens and a step of slots at most, in place of the document's 40 or 70.
    assert document.slots.keys.seams == [document.slots.keys.slots]
    for fork in forks:
        assert fork.slots is not None
        assert fork.slots.keys.parts[0].shape[2] <= 18 + 32


@pytest.mark.parametrize("codec", ["fp32", "int4", "fp4"])
def test_evicted_slots_of_the_document_are_never_written_to(codec: str) -> None:
    document = new_cache(H2O, DOCUMENT, (codec, codec))
    for call in DOCUMENT.calls():
        attend(document, call, DOCUMENT)
    fork = document.fork()
    assert document.slots is not None
    shared = [part for place in document.slots.keys.shared for part in place]
    bits = [part.clone() for part in shared]
    ask(fork, questions(1, decoded=60))
    assert fork.slots is not None
    first, stop = fork.slots.keys.exact.shape[2], fork.slots.keys.seams[0]
    assert (fork.slots.positions[:, :, first:stop] < 0).any()
    assert fork.slots.positions[:, :, first:stop].max() < 70
    assert all(torch.equal(part, was) for part, was in zip(shared, bits, strict=True))
    assert all(len(held(fork, row, head)) == 40 for row in range(2) for head in range(2))


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_document_of_which_nothing_is_left_is_let_go(codec: str) -> None:
    method = Method("slidingwindow")
    document = new_cache(method, DOCUMENT, (codec, codec))
    for call in DOCUMENT.calls():
        attend(document, call, DOCUMENT)
    fork, twin = document.fork(), copy.deepcopy(document)
    for cache in (fork, twin):
        ask(cache, questions(1, tokens=30, decoded=90))
    assert fork.shared_nbytes() == 0
    assert fork.slots is not None
    assert not fork.slots.keys.shared
    same(fork, twin)
    assert fork.nbytes() <= twin.nbytes() + 2 * 2 * 32 * fork.slots.keys.codec.bytes_per_vector(32) * 2


def test_a_document_longer_than_a_block_is_read_in_views() -> None:
    """No block that is read crosses the seam, so that unquantised slots are read without a copy."""
    turn = Turn((2500,), (2500,), (40,), 0)
    stream = Stream(kv_heads=1, group=1, dim=4, turns=(turn,), unlimited=True)
    document = new_cache(Method("full"), stream, ("fp32", "fp32"))
    for call in stream.calls():
        attend(document, call, stream)
    fork = document.fork()
    fork._resize(2528 + 32)
    assert fork.slots is not None
    blocks = fork.slots.blocks(SLOT_BLOCK)
    assert blocks == [(0, 1024), (1024, 2048), (2048, 2528), (2528, 2560)]
    shared = fork.slots.keys.shared[0][0]
    for start, stop in blocks[:3]:
        assert fork.slots.keys.read(start, stop).data_ptr() == shared[:, :, start:].data_ptr()


def test_rows_without_a_token_so_far_freeze_their_mean_apart() -> None:
    first, second = Turn((40, 0), (40,), (40, 40), 0), Turn((40, 40), (40,), (40, 40), 0)
    stream = Stream(kv_heads=2, group=1, dim=32, turns=(first, second), seed=4)
    one, two = stream.calls()
    document = new_cache(Method("full"), stream, ("fp4", "fp4"))
    attend(document, one, stream)
    fork, twin = document.fork(), copy.deepcopy(document)
    louder = Call(two.step, two.q, 9 * two.k + 5, 9 * two.v)
    attend(document, louder, stream)
    torch.testing.assert_close(attend(fork, two, stream), attend(twin, two, stream), atol=1e-5, rtol=1e-5)
    same(fork, twin)


@pytest.mark.parametrize("evict_every", [1, 60])
@pytest.mark.parametrize("name", ["slidingwindow", "h2o"])
def test_a_fork_holds_its_tokens_while_the_document_goes(name: str, evict_every: int) -> None:
    """Also where the slots it has by then are more than the tokens at hand would ask for."""
    method = Method(name, {"evict_every": evict_every})
    turn = Turn((70, 50), (70,), (20, 20), 150)
    stream = Stream(kv_heads=2, group=2, dim=8, turns=(turn,), seed=3)
    document = new_cache(method, stream, ("fp32", "fp32"))
    first, *later = stream.calls()
    attend(document, first, stream)
    fork, twin = document.fork(), copy.deepcopy(document)
    for call in later:
        torch.testing.assert_close(attend(fork, call, stream), attend(twin, call, stream), atol=1e-5, rtol=1e-5)
        same(fork, twin)
    assert (fork.shared_nbytes() == 0) == (name == "slidingwindow")
