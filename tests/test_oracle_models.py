"""Whole models with a compressed cache against the uncompressed model, whose masks hide exactly what was evicted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow import CompressedCache
from tests.models import PLAIN, tiny_model, tiny_tokens

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

EVICTING = {
    "slidingwindow": "slidingwindow:budget=10",
    "slidingwindow in bursts": "slidingwindow:budget=10,evict_every=4",
    "streamingllm": "streamingllm:budget=10,sinks=3",
    "h2o": "h2o:budget=10",
    "h2o in bursts": "h2o:budget=10,sinks=2,recent=3,evict_every=3",
    "hybrid": "hybrid:budget=12,sinks=2,heavy_ratio=0.7",
    "snapkv": "snapkv:budget=12,window=4,kernel=3,sinks=2",
    "snapkv average": "snapkv:budget=12,window=6,kernel=5,pool=avg,sinks=0",
    "snapkv share": "snapkv:budget=0.5,window=2,kernel=3,sinks=1",
    "tova in bursts": "tova:budget=10,evict_every=3",
    "expected attention": "expectedattention:budget=12,sinks=2,future=20",
    "composed": "compose:budget=12,prompt=snapkv(window=4,kernel=3,sinks=2),decode=keydiff(recent=2)",
    "h2o in blocks": "blocks:policy=h2o(budget=10,recent=3),multiple_of=4",
    "snapkv in blocks": "blocks:policy=snapkv(budget=12,window=4,kernel=3,sinks=2),multiple_of=4",
    "streamingllm in blocks": "blocks:policy=streamingllm(budget=10,sinks=3,evict_every=5),multiple_of=3",
    "composed in blocks": "blocks:policy=compose(budget=12,prompt=snapkv(window=4,sinks=2),decode=h2o),multiple_of=4",
}
ROOMY = [
    "full",
    "slidingwindow:budget=100",
    "streamingllm:budget=100",
    "h2o:budget=100",
    "hybrid:budget=100",
    "snapkv:budget=100",
    "snapkv:budget=1.0,window=2,sinks=1",
    "expectedattention:budget=100",
    "compose:budget=100,prompt=knorm,decode=tova",
]


@dataclass(frozen=True)
class Before:
    """What a cache held before a forward call: the call's columns, and the positions of each layer."""

    begin: int
    end: int
    held: list[Tensor]


@contextlib.contextmanager
def recorded(model: PreTrainedModel, cache: CompressedCache) -> Iterator[list[Before]]:
    """Write down what ``cache`` holds before each forward call of ``model``."""
    calls: list[Before] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        begin = calls[-1].end if calls else 0
        columns = (args[0] if args else kwargs["input_ids"]).shape[1]
        held = [cache.positions(layer) for layer in range(len(cache))]
        calls.append(Before(begin, begin + columns, held))

    hook = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def visibility(calls: list[Before], layer: int, mask: Tensor, heads: int, sliding: int | None) -> Tensor:
    """(B, Hq, n, n) bool: each query sees what its KV head held before its call, and its call up to itself.

    In a sliding layer it sees of these the latest ``sliding`` tokens of its row, itself included.
    """
    rows, columns = mask.shape
    columns = calls[-1].end
    places = mask[:, :columns].cumsum(1) - 1
    kv_heads = calls[-1].held[layer].shape[1]
    visible = torch.zeros(rows, kv_heads, columns, columns, dtype=torch.bool)
    for call in calls:
        own = torch.ones(call.end - call.begin, call.end - call.begin, dtype=torch.bool).tril()
        visible[:, :, call.begin : call.end, call.begin : call.end] = own
        for row, positions in enumerate(call.held[layer]):
            for head, held in enumerate(positions):
                seen = torch.isin(places[row], held[held >= 0]) & (torch.arange(columns) < call.begin)
                visible[row, head, call.begin : call.end] |= seen
    visible &= mask[:, None, None, :columns].bool()
    if sliding is not None:
        visible &= (places.unsqueeze(2) - places.unsqueeze(1) < sliding).unsqueeze(1)
    visible |= torch.eye(columns, dtype=torch.bool)  # padding must see something, or it is NaN
    return visible.repeat_interleave(heads // kv_heads, 1)


def masked_logits(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, visible: list[Tensor], layers: tuple[str, ...]
) -> Tensor:
    """The uncompressed model over all tokens at once, the named attention layers under masks of their own."""

    def under(layer_mask: Tensor) -> Any:
        return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": layer_mask})

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(under(added), with_kwargs=True)
        for name, added in zip(layers, map(to_add, visible), strict=True)
    ]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits


def to_add(visible: Tensor) -> Tensor:
    """What a mask adds to logits, the form that every implementation of attention takes."""
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int, **kwargs: Any) -> Any:
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


def extended(mask: Tensor, columns: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], columns - mask.shape[1])], 1)


def check_against_masks(model: PreTrainedModel, policy: str, *lengths: int) -> None:
    """Two turns of generation, the second one padded too; tokens and logits must be those of the masked model."""
    cache = CompressedCache(model, policy)
    ids, mask = tiny_tokens(*lengths, seed=3)
    with recorded(model, cache) as calls:
        first = greedy(model, ids, mask, 14, past_key_values=cache)
        # The next prompt begins with the last token, which was generated but never fed; shorter ones are padded.
        said, said_mask = tiny_tokens(*[10, 4, 6][: len(lengths)], seed=4)
        said[torch.arange(len(lengths)), said_mask.argmax(1)] = first.sequences[:, -1]
        conversation = torch.cat([first.sequences[:, :-1], said], 1)
        mask = torch.cat([extended(mask, calls[-1].end), said_mask], 1)
        second = greedy(model, conversation, mask, 12, past_key_values=cache)
    assert all(held.ge(0).sum(-1).max() < calls[-1].end for held in calls[-1].held)

    columns = calls[-1].end
    mask = extended(mask, columns)
    structure = cache.structure
    visible = [visibility(calls, layer, mask, structure.heads, own) for layer, own in enumerate(structure.sliding)]
    logits = masked_logits(model, second.sequences[:, :columns], mask, visible, structure.names)
    for begin, answer in ((ids.shape[1], first), (conversation.shape[1], second)):
        expected = logits[:, begin - 1 : begin - 1 + len(answer.logits)]
        torch.testing.assert_close(torch.stack(answer.logits, 1), expected, atol=2e-4, rtol=1e-4)
        tokens = answer.sequences[:, begin : begin + len(answer.logits)]
        assert torch.equal(tokens, expected.argmax(-1))


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
@pytest.mark.parametrize("kind", PLAIN)
def test_generation_is_that_of_the_model_under_masks(kind: str, policy: str) -> None:
    check_against_masks(tiny_model(kind), policy, 31, 19, 6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 2), (8, 1)])
def test_generation_is_that_of_the_model_under_masks_in_every_group(heads: int, kv_heads: int) -> None:
    model = tiny_model(heads=heads, kv_heads=kv_heads, dim=8, layers=3)
    for policy in ("h2o:budget=10", "snapkv:budget=12,window=4,kernel=3,sinks=2"):
        check_against_masks(model, policy, 25, 40)


@pytest.mark.parametrize("policy", ROOMY)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_budget_for_everything_gives_the_uncompressed_tokens(kind: str, policy: str) -> None:
    model = tiny_model(kind)
    ids, mask = tiny_tokens(30, 17, 1, seed=5)
    expected = greedy(model, ids, mask, 20)
    actual = greedy(model, ids, mask, 20, past_key_values=CompressedCache(model, policy))
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ROOMY)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_budget_for_everything_gives_the_uncompressed_tokens_in_chunks(kind: str, policy: str) -> None:
    model, lengths = tiny_model(kind), (30, 17, 4)
    ids, mask = tiny_tokens(*lengths, seed=6)
    cache = CompressedCache(model, policy)
    with cache.prompt(length=lengths), torch.no_grad():
        for begin, end in ((0, 11), (11, 12), (12, 27), (27, 30)):
            chunk, seen = ids[:, begin:end], mask[:, :end]
            # As with any cache, a padded batch needs its positions in a plain call; only generate() makes them.
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, begin:]
            out = model(chunk, attention_mask=seen, position_ids=places, past_key_values=cache)
    expected = greedy(model, ids, mask, 16)
    begun = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    actual = greedy(model, begun, extended(mask, 31), 15, past_key_values=cache)
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_a_padded_batch_generates_what_each_row_generates_alone(policy: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(34, 21, 5, seed=7)
    together = greedy(model, ids, mask, 16, past_key_values=CompressedCache(model, policy)).sequences
    for row, start in enumerate((0, 13, 29)):
        own = slice(row, row + 1)
        cache = CompressedCache(model, policy)
        alone = greedy(model, ids[own, start:], mask[own, start:], 16, past_key_values=cache).sequences
        assert torch.equal(together[own, start:], alone)
