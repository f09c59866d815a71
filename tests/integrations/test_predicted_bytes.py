"""For every family, policy and codec: each layer's bytes, told before the cache exists, are those of the real cache."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvwinnow import CompressedCache
from kvwinnow.cache.memory import PlannedLayer, layers_nbytes
from kvwinnow.codecs import CODECS
from kvwinnow.errors import UnsupportedModelError
from tests.integrations.test_memory import DTYPES
from tests.models import KINDS, shown, tiny_model, tiny_tokens
from tests.running import FULL_WIDTH, IN_BLOCKS, logits

pytestmark = pytest.mark.filterwarnings("ignore:all layers of this model see the latest:UserWarning")

POLICIES = {
    **FULL_WIDTH,
    "pyramid": "pyramidkv:budget=24,window=8,beta=5",
    "compose-pyramid": "compose:budget=24,prompt=pyramidkv(window=8),decode=tova(evict_every=7)",
    "compose-late": "compose:budget=24,prompt=full,decode=h2o",
    "share": "h2o:budget=0.3",
    "bytes": "streamingllm:budget=24KiB",
    **IN_BLOCKS,
    "blocks-pyramid": "blocks:policy=pyramidkv(budget=24,window=8,beta=5),multiple_of=8",
    "blocks-share": "blocks:policy=h2o(budget=0.3),multiple_of=7",
    "blocks-bytes": "blocks:policy=streamingllm(budget=48KiB)",
}
MOMENTS = (0, 1, 6)


def check(cache: CompressedCache, model: Any, prompt: int, rows: int) -> None:
    """Right after the prompt and at some moments of decoding, layer by layer."""
    planned: list[PlannedLayer] = []
    for step in range(max(MOMENTS) + 1):
        columns = 1 if step else prompt
        logits(model, tiny_tokens(*[columns] * rows, seed=step)[0], cache)
        planned = planned or cache.budgets.layers
        if step in MOMENTS:
            foretold = layers_nbytes(cache.policy, planned, batch=rows, prompt=prompt, new=step)
            assert foretold == tuple(layer.nbytes() for layer in cache.layers), step  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", KINDS, ids=shown)
def test_every_family_under_every_policy_takes_the_bytes_foretold(kind: str, policy: str) -> None:
    dtypes = list(DTYPES.values())
    number = list(KINDS).index(kind) + list(POLICIES.values()).index(policy)
    model = tiny_model(kind, dim=32)
    if number % 3 == 0:
        model = model.to(torch.bfloat16)
    try:
        cache = CompressedCache(model, policy, **dtypes[number % len(dtypes)])
    except UnsupportedModelError:
        assert policy.startswith("expected")  # a family whose rotation it cannot undo
        return
    check(cache, model, (60, 60, 7)[number % 3], 1 + number % 2)


# Blocks decide how many slots there are, and not what is in them: one policy in blocks tells as much as all.
ONCE = {
    name: policy for name, policy in POLICIES.items() if not name.startswith("blocks") or name == "blocks-streaming"
}


@pytest.mark.parametrize("policy", ONCE.values(), ids=ONCE)
@pytest.mark.parametrize(("k", "v"), list(itertools.product(CODECS, repeat=2)))
def test_every_pair_of_codecs_takes_the_bytes_foretold(k: str, v: str, policy: str) -> None:
    model = tiny_model(dim=32)
    check(CompressedCache(model, policy, k_dtype=k, v_dtype=v), model, 50, 1)


# PyramidKV goes by the tokens seen so far, so its layers' budgets, and with them slots, differ from chunk to chunk.
UNLAYERED = {name: policy for name, policy in POLICIES.items() if "pyramid" not in policy}


@pytest.mark.parametrize("chunk", [7, 16])
@pytest.mark.parametrize("policy", UNLAYERED.values(), ids=UNLAYERED)
def test_a_prompt_in_chunks_takes_the_bytes_of_one_in_one_piece(policy: str, chunk: int) -> None:
    model = tiny_model("gemma3" if chunk == 7 else "llama", layers=4)
    for prompt in (2, 23, 31, 34, 40, 64):
        cache = CompressedCache(model, policy, dtype="int4" if prompt % 2 else "fp32")
        with cache.prompt(length=prompt):
            for piece in tiny_tokens(prompt)[0].split(chunk, dim=1):
                logits(model, piece, cache)
        foretold = layers_nbytes(cache.policy, cache.budgets.layers, batch=1, prompt=prompt)
        assert foretold == tuple(layer.nbytes() for layer in cache.layers), prompt  # type: ignore[attr-defined]
