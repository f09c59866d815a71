"""What a layer will take, told before it exists, is what it takes, at every moment of its life."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvwinnow.cache import LayerCache, Step
from kvwinnow.cache.memory import LayerShape, PlannedLayer, budget_in_tokens, layers_nbytes, prefill_nbytes
from kvwinnow.codecs import CODECS, parse_codec
from kvwinnow.errors import PolicyError
from kvwinnow.ops import Variant
from kvwinnow.policies import Phase, Policy, parse

HEADS, KV_HEADS, DIM = 4, 2, 32

POLICIES = (
    "full",
    "slidingwindow:budget={budget},evict_every={slack}",
    "streamingllm:budget={budget},sinks=3,evict_every={slack}",
    "h2o:budget={budget},evict_every={slack}",
    "hybrid:budget={budget},evict_every={slack}",
    "snapkv:budget={budget},window=4,kernel=3,sinks=2",
    "tova:budget={budget},evict_every={slack}",
    "knorm:budget={budget},evict_every={slack}",
    "keydiff:budget={budget},evict_every={slack}",
    "compose:budget={budget},prompt=snapkv(window=4,sinks=2),decode=h2o(sinks=2,evict_every={slack})",
    "compose:budget={budget},prompt=full,decode=h2o(sinks=2,evict_every={slack})",
    "compose:budget={budget},prompt=snapkv(window=4,sinks=2),decode=full",
    "blocks:policy=h2o(budget={budget},evict_every={slack})",
    "blocks:policy=snapkv(budget={budget},window=4,kernel=3,sinks=2),multiple_of=7",
    "blocks:policy=streamingllm(budget={budget},evict_every={slack}),multiple_of=48",
    "blocks:policy=compose(budget={budget},prompt=full,decode=h2o(sinks=2,evict_every={slack}))",
)
CODEC_TEXTS = (*CODECS, "int4:group=8,rotate=false,centre=false", "fp4:style=mx", "int4:group=32")


def a_layer(policy: Policy, k_dtype: str, v_dtype: str, exact: int) -> LayerCache:
    return LayerCache(policy, parse_codec(k_dtype), parse_codec(v_dtype), exact=exact)


def feed(layer: LayerCache, n: int, seen: int, rows: int, dtype: torch.dtype) -> None:
    """The next ``n`` tokens of every row, ``seen`` of them after this step."""
    q = torch.ones(rows, HEADS, n, DIM, dtype=dtype)
    k = v = torch.randn(rows, KV_HEADS, n, DIM).to(dtype)
    positions = torch.arange(seen - n, seen, dtype=torch.int32).expand(rows, -1)
    phase = Phase.DECODE if n == 1 and seen > 1 else Phase.PROMPT
    limit = layer.policy.limit
    assert limit is None or isinstance(limit, int)
    layer.attend(q, k, v, Step(phase, positions, (0,) * rows, (seen,) * rows, (limit,) * rows), Variant(0.2))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(POLICIES), st.integers(6, 70), st.integers(1, 80), st.integers(1, 90), st.integers(0, 150),
    st.sampled_from(CODEC_TEXTS), st.sampled_from(CODEC_TEXTS), st.integers(1, 2), st.integers(4, 7),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
@example(POLICIES[3], 33, 70, 33, 150, "int4", "fp8", 1, 4, torch.float32)  # slack of more than a step of slots
@example(POLICIES[10], 20, 1, 90, 3, "bf16", "bf16", 2, 4, torch.float32)  # whole until a token is decoded
@example(POLICIES[5], 40, 1, 2, 2, "int4", "int4", 1, 4, torch.float32)  # fewer tokens than unquantised slots
def test_a_layer_takes_the_bytes_foretold_at_every_step(
    text: str, budget: int, slack: int, prompt: int, new: int, k: str, v: str, rows: int, exact: int, dtype: torch.dtype
) -> None:
    policy = parse(text.format(budget=budget, slack=slack))
    layer = a_layer(policy, k, v, exact)
    shape = LayerShape(HEADS, KV_HEADS, DIM, exact, dtype.itemsize)
    planned = [PlannedLayer(shape, (layer.k_codec, layer.v_codec))]
    feed(layer, prompt, prompt, rows, dtype)
    for step in range(new + 1):
        if step:
            feed(layer, 1, prompt + step, rows, dtype)
        # Looked at now and then: each prediction goes the whole way again.
        if step in (0, 1, 2, new) or step % 13 == 0:
            assert layers_nbytes(policy, planned, batch=rows, prompt=prompt, new=step) == (layer.nbytes(),)


@pytest.mark.parametrize(("budget", "slack"), [(31, 1), (63, 64), (50, 97)])
@pytest.mark.parametrize("text", POLICIES)
def test_a_layer_takes_the_bytes_foretold_after_a_long_way(text: str, budget: int, slack: int) -> None:
    policy = parse(text.format(budget=budget, slack=slack))
    layer = a_layer(policy, "int4", "int8", 4)
    planned = [PlannedLayer(LayerShape(HEADS, KV_HEADS, DIM, 4, 4), (layer.k_codec, layer.v_codec))]
    feed(layer, 120, 120, 1, torch.float32)
    for step in range(1, 601):
        feed(layer, 1, 120 + step, 1, torch.float32)
        if step > 540:
            assert layers_nbytes(policy, planned, batch=1, prompt=120, new=step) == (layer.nbytes(),), step


def test_a_million_decoded_tokens_are_not_walked_one_by_one() -> None:
    """Counted by calls of ``due``, not by the clock."""
    calls = 0

    class Counting(type(parse("h2o:budget=1000,evict_every=300"))):  # type: ignore[misc]
        def due(self, phase: Phase, lengths: object) -> int | None:
            nonlocal calls
            calls += 1
            return super().due(phase, lengths)  # type: ignore[no-any-return]

    codec = parse_codec("bf16")
    planned = [PlannedLayer(LayerShape(HEADS, KV_HEADS, DIM, 4, 2), (codec, codec))] * 80
    for budget in (1000, 900_000, 5_000_000):
        policy = Counting(budget=budget, evict_every=300)
        assert len(set(layers_nbytes(policy, planned, batch=1, prompt=400, new=1_000_000))) == 1
    assert calls < 500


def test_a_prompt_is_whole_in_one_layer_only() -> None:
    policy, codec = parse("snapkv:budget=64,window=8"), parse_codec("bf16")
    planned = [PlannedLayer(LayerShape(HEADS, KV_HEADS, DIM, 4, 2), (codec, codec))] * 5
    per_token = 2 * KV_HEADS * DIM * 2
    held = 5 * (96 * (per_token + KV_HEADS * 4) + HEADS * 8 * DIM * 2)
    assert sum(layers_nbytes(policy, planned, batch=1, prompt=1000)) == held
    assert prefill_nbytes(policy, planned, batch=1, prompt=1000) == held + 1000 * per_token
    assert prefill_nbytes(policy, planned, batch=1, prompt=1000, chunk=128) == held + 128 * per_token
    assert prefill_nbytes(policy, planned, batch=3, prompt=100, chunk=128) == 3 * (held + 100 * per_token)


def test_budgets_come_to_tokens() -> None:
    codec = parse_codec("bf16")
    planned = [PlannedLayer(LayerShape(HEADS, KV_HEADS, DIM, 4, 2), (codec, codec))] * 2
    tokens = {
        text: budget_in_tokens(parse(text), planned, batch=1, prompt=1000)
        for text in ("full", "h2o:budget=77", "h2o:budget=0.29", "snapkv:budget=0.001", "streamingllm:budget=64KiB")
    }
    # 64 KiB over 2 layers: 128 slots of 264 bytes and a position for each of 2 heads, less the slack of one.
    per_slot = 2 * (2 * KV_HEADS * DIM * 2 + KV_HEADS * 4)
    assert list(tokens.values()) == [None, 77, 290, 36, 64 * 1024 // per_slot - 1]
    with pytest.raises(PolicyError, match=r"budget='1KiB' \(1,024 bytes\) is too small: streamingllm keeps at least 5"):
        budget_in_tokens(parse("streamingllm:budget=1KiB"), planned, batch=1, prompt=10)


def test_sizes_are_known_without_torch() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'numpy')))\n"
        "from kvwinnow.cache.memory import *\nfrom kvwinnow.codecs import parse_codec\n"
        "from kvwinnow.policies import POLICIES\n"
        "for policy in POLICIES.values():\n"
        "    for codec in map(parse_codec, ('bf16', 'int8', 'int4', 'fp8', 'fp4')):\n"
        "        shape = LayerShape(32, 8, 128, 4, 2)\n"
        "        layers = [PlannedLayer(shape, (codec, codec)), PlannedLayer(shape, (codec, codec), 512)]\n"
        "        print(sum(layers_nbytes(policy(), layers, batch=1, prompt=9000, new=100)))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(told) == 13 * 5
    assert all(int(line) > 0 for line in told)
