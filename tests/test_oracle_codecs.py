"""One layer's cache in every codec against the oracle, which attends to the values as they are stored."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor

from kvwinnow.cache import LayerCache
from kvwinnow.codecs import parse_codec
from kvwinnow.codecs.vectors import Vectors
from tests.oracle import hadamard
from tests.streams import Call, Method, Stream, Turn, search, streams
from tests.test_oracle import attend, compare_sets

PAIRS = [
    ("fp32", "fp32"),
    ("bf16", "fp16"),
    ("int8", "int8"),
    ("int8:group=16", "int4:group=32"),
    ("int4:group=64", "int4:group=16"),
    ("int4:group=32,rotate=false", "int8:group=32"),
    ("int4:group=16,centre=false", "int4:rotate=false"),
    ("int4", "fp32"),
    ("fp8", "fp8:group=16"),
    ("fp4", "fp4"),
    ("fp4:style=mx", "fp4:style=mx,rotate=false"),
    ("fp4:centre=false,group=32", "fp8"),
]

EVERY = ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "fp4:style=mx"]

# All keep the token just decoded, so that it can be read back.
METHODS = [
    Method("full"),
    Method("streamingllm", {"sinks": 2, "evict_every": 2}),
    Method("h2o", {"sinks": 1, "recent": 2, "evict_every": 1}),
    Method("hybrid", {"sinks": 2, "heavy_ratio": 0.5, "evict_every": 3}),
    Method("snapkv", {"sinks": 2, "window": 3, "kernel": 3, "pool": "max"}),
]

# All of these read vectors in one way, or not at all: fewer examples tell as much.
NEWER = [
    Method("tova", {"sinks": 1, "recent": 1, "evict_every": 1}),
    Method("knorm", {"sinks": 1, "recent": 1, "evict_every": 2}),
    Method("keydiff", {"sinks": 1, "recent": 1, "evict_every": 1}),
    Method("expectedattention", {"sinks": 2, "future": 5}),
    Method("pyramidkv", {"sinks": 2, "window": 3, "kernel": 3}),
    Method(
        "compose",
        {
            "prompt": Method("snapkv", {"sinks": 1, "window": 3, "kernel": 3}),
            "decode": Method("h2o", {"sinks": 1, "recent": 2, "evict_every": 1, "normalize": "age"}),
        },
    ),
]

LOSS = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.01, "int4": 0.15, "fp8": 0.04, "fp4": 0.15}
"""Most that a codec may change a vector of normal numbers, relative to its norm."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""Relative to the output's norm: float32's rounding; and bfloat16's, 2^-9 for each of the weights and the output."""


def unstored(vectors: Vectors) -> Tensor:
    """(B, Hkv, S, D) float64: all slots as vectors of the model, by the oracle's own transforms."""
    stored = vectors.read(0, vectors.slots).double()
    restored = hadamard(stored) if vectors.codec.rotates else stored
    return restored if vectors.mean is None else restored + vectors.mean.double().unsqueeze(2)


@dataclasses.dataclass
class Given:
    """All keys and values that one row was ever given, (Hkv, N, D) each."""

    keys: Tensor
    values: Tensor

    def add(self, call: Call) -> None:
        self.keys = torch.cat([self.keys, call.k[0].double()], 1)
        self.values = torch.cat([self.values, call.v[0].double()], 1)


def check_close(stored: Tensor, original: Tensor, codec: str) -> None:
    """Stored vectors are about what was given: (N, D) both."""
    # Centring may store vectors a few times longer than the original.
    loss = 3 * LOSS[codec] + 1e-6
    assert ((stored - original).norm(dim=-1) <= loss * (original.norm(dim=-1) + original.shape[-1] ** 0.5)).all()


def follow_stored(method: Method, stream: Stream, codecs: tuple[str, str], tally: Counter[str]) -> list[int]:
    """Drive cache and oracle side by side; the oracle takes over each vector as it is stored.

    Returns:
        The number of slots after each call.
    """
    cache, rows = stream.cache(method, *map(parse_codec, codecs)), stream.rows_alone(method)
    given = [Given(row.keys, row.values) for row in rows]
    allocated = []
    for call in stream.calls():
        out = attend(cache, call, stream)
        assert cache.slots is not None
        allocated.append(cache.slots.positions.shape[2])
        keys, values = unstored(cache.slots.keys), unstored(cache.slots.values)
        for index, row in enumerate(rows):
            own = call.alone(index)
            if own is None:
                continue
            given[index].add(own)
            k, v = own.k[0].double(), own.v[0].double()
            slots = [slots_of(cache, index, head) for head in range(row.kv_heads)]
            if not own.prompt:  # a decoded token is read as stored, by itself too
                last = [held[row.seen] for held in slots]
                k = torch.stack([keys[index, head, slot] for head, slot in enumerate(last)]).unsqueeze(1)
                v = torch.stack([values[index, head, slot] for head, slot in enumerate(last)]).unsqueeze(1)
            expected = row.step(own.q[0], k, v, prompt=own.prompt, budget=own.step.budgets[0], made=own.k[0])
            error = (out[index, :, call.step.starts[index] :].double() - expected).norm() / expected.norm()
            assert error <= TOLERANCE[stream.dtype]
            compare_sets(cache, index, row, tally)
            for head, held in enumerate(slots):
                tokens, places = list(held), list(held.values())
                check_close(keys[index, head, places], given[index].keys[head, tokens], cache.k_codec.name)
                check_close(values[index, head, places], given[index].values[head, tokens], cache.v_codec.name)
                row.store(head, tokens, keys[index, head, places], values[index, head, places])
    tally["cuts"] += sum(row.cuts for row in rows)
    return allocated


def slots_of(cache: LayerCache, row: int, head: int) -> dict[int, int]:
    """The slot of each token that one KV head holds."""
    assert cache.slots is not None
    return {token: slot for slot, token in enumerate(cache.slots.positions[row, head].tolist()) if token >= 0}


@pytest.mark.parametrize("method", [*METHODS, *NEWER], ids=lambda method: method.name)
@pytest.mark.parametrize("codecs", PAIRS, ids="/".join)
def test_outputs_are_the_oracles_on_the_stored_values(codecs: tuple[str, str], method: Method) -> None:
    tally: Counter[str] = Counter()
    strategy = streams(method, 2, dims=(64,))
    search(strategy, lambda stream: follow_stored(method, stream, codecs, tally), examples=3 if method in NEWER else 8)
    assert tally["near"] <= 0.01 * tally["cuts"], tally


@pytest.mark.parametrize("codecs", PAIRS, ids="/".join)
def test_outputs_stay_the_oracles_while_slots_grow_and_shrink(codecs: tuple[str, str]) -> None:
    budgets = (12, 16)
    turns = (Turn((50, 20), (30, 50), budgets, 75), Turn((5, 9), (9,), budgets, 40), Turn((3, 2), (2, 3), budgets, 3))
    stream = Stream(kv_heads=2, group=2, dim=64, turns=turns, seed=1)
    slots = follow_stored(METHODS[4], stream, codecs, Counter())
    assert max(slots) > 80
    assert slots[-1] < 64


SHORT = Stream(
    kv_heads=2,
    group=2,
    dim=32,
    turns=(Turn((26, 15), (14, 26), (12, 10), 6), Turn((5, 3), (5,), (12, 10), 2)),
    seed=2,
)


@pytest.mark.parametrize("values", EVERY)
@pytest.mark.parametrize("keys", EVERY)
def test_keys_and_values_may_be_stored_in_any_pair_of_formats(keys: str, values: str) -> None:
    tally = Counter[str]()
    follow_stored(METHODS[2], SHORT, (keys, values), tally)
    assert tally["cuts"] > 20
    assert not tally["near"]


@pytest.mark.parametrize("codec", EVERY)
@pytest.mark.parametrize("method", [*METHODS, Method("slidingwindow", {"evict_every": 2})], ids=lambda made: made.name)
def test_every_policy_evicts_in_every_codec(method: Method, codec: str) -> None:
    stream = dataclasses.replace(SHORT, unlimited=method.name == "full")
    tally = Counter[str]()
    follow_stored(method, stream, (codec, codec), tally)
    assert method.name == "full" or tally["cuts"] > 8
    assert not tally["near"]


@pytest.mark.parametrize("codec", ["int4", "fp4", "fp4:style=mx", "fp8"])
@pytest.mark.parametrize("dim", [16, 24, 40, 80, 96, 128])
def test_outputs_are_the_oracles_in_every_head_dimension(dim: int, codec: str) -> None:
    method = METHODS[2]
    search(
        streams(method, 3, dims=(dim,)),
        lambda stream: follow_stored(method, stream, (codec, codec), Counter()),
        examples=8 if codec == "int4" else 2,
    )


@pytest.mark.parametrize("method", [METHODS[1], METHODS[2], METHODS[4]], ids=lambda method: method.name)
@pytest.mark.parametrize("codecs", [("bf16", "bf16"), ("int8", "int4"), ("int4", "int4")], ids="/".join)
def test_outputs_are_the_oracles_for_a_bfloat16_model(codecs: tuple[str, str], method: Method) -> None:
    tally = Counter[str]()

    def check(stream: Stream) -> None:
        follow_stored(method, dataclasses.replace(stream, dtype=torch.bfloat16), codecs, tally)

    search(streams(method, 4, dims=(64,)), check, examples=6)
    assert tally["near"] <= 0.01 * tally["cuts"], tally
