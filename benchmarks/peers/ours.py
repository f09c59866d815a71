"""kvwinnow's CompressedCache."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from contract import Answer, Task, serve
from torch import Tensor
from torch_decoding import Kind, generate, loaded, random_tokens

import kvwinnow
from kvwinnow import H2O, CompressedCache, Full, Policy, SnapKV, ops

SHARE = 0.125
SETTINGS: dict[str, tuple[Policy, str | None]] = {
    "full": (Full(), None),
    "snapkv-8x": (SnapKV(budget=SHARE), None),
    "snapkv-8x-int4": (SnapKV(budget=SHARE), "int4"),
    "h2o-8x": (H2O(budget=SHARE), None),
}
COMPILED = "-compiled"
"""The ending of a setting whose decode step is compiled first."""


def fill(model: Any, cache: CompressedCache, count: int) -> None:
    """Have the cache take in a prompt of random keys and values, and its policy choose by random weights.

    All is done as for a real prompt but the layers' matrix products and the attention.
    """
    torch.manual_seed(0)
    k, v = random_tokens(model, count)
    q = torch.randn(1, model.config.num_attention_heads, count, k.shape[3], dtype=model.dtype)

    def attention(q: Tensor, slots: ops.Slots, chunk: ops.Chunk, **asked: Any) -> tuple[Tensor, ops.Observed]:
        kv_heads = chunk.keys.shape[1]
        return q, ops.Observed(torch.zeros(1, kv_heads, 0), torch.rand(1, kv_heads, q.shape[2]))

    ids, decoder = torch.zeros(1, count, dtype=torch.long), model.get_decoder()
    with mock.patch.object(ops, "attention", attention), cache.call(decoder, {"input_ids": ids}):
        assert cache._step is not None
        for layer in cache._layers():
            cache._follow(layer, (k.dtype, v.dtype))
            layer.attend(q, k, v, cache._step, ops.Variant(scale=k.shape[3] ** -0.5))


def run(task: Task) -> Answer:
    compiled = task.setting.endswith(COMPILED)
    name = task.setting.removesuffix(COMPILED)
    if name not in SETTINGS:
        raise ValueError(f"setting {task.setting!r} is none of {', '.join(SETTINGS)}, each with {COMPILED} or without")
    model = loaded(task)
    policy, dtype = SETTINGS[name]
    graphs = kvwinnow.compile_decode(model) if compiled else None
    kind = Kind(
        lambda: CompressedCache(model, policy, dtype=dtype),
        CompressedCache.nbytes,
        "cache.nbytes()",
        lambda cache, count: fill(model, cache, count),
    )
    answer = generate(model, kind, task, kvwinnow.__version__)
    if graphs is not None and graphs.steps < len(answer.tokens) - 1:
        raise RuntimeError(f"only {graphs.steps} decode steps ran compiled")
    return answer


if __name__ == "__main__":
    raise SystemExit(serve(run))
