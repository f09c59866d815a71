"""``generate(prefill_chunk_size=n)`` is a prompt declared and fed in chunks by hand."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, FULL_WIDTH, counts, held, logits, text, with_budget

BUDGETS: list[int | float | str] = [24, 0.5, "40KiB"]
GOES_ON = Version(transformers.__version__) >= Version("5.24")


def by_hand(
    model: PreTrainedModel, cache: CompressedCache, ids: Tensor, mask: Tensor, size: int, seen: int = 0
) -> list[list[int]]:
    """Feed the prompt inside ``cache.prompt``, then decode greedily."""
    with cache.prompt(length=mask[:, seen:].sum(1)):
        for start in range(seen, ids.shape[1], size):
            end = min(start + size, ids.shape[1])
            places = mask[:, :end].cumsum(1)[:, start:] - 1
            chunk = {"attention_mask": mask[:, :end], "position_ids": places}
            out = logits(model, ids[:, start:end], cache, **chunk)
    said = [out[:, -1:].argmax(-1)]
    for _ in range(11):
        mask = torch.cat([mask, torch.ones_like(said[-1])], dim=1)
        places = mask.sum(1, keepdim=True) - 1
        out = logits(model, said[-1], cache, attention_mask=mask, position_ids=places)
        said.append(out.argmax(-1))
    return torch.cat(said, dim=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("name", EVICTING)
def test_fault_03_chunks_of_generate_are_chunks_of_a_declared_prompt(
    name: str, budget: int | float | str, size: int
) -> None:
    """A prompt of 49 leaves a last chunk of one token with chunks of 16 and of 48."""
    model = tiny_model()
    ids, mask = tiny_tokens(49)
    cache, other = (CompressedCache(model, with_budget(name, budget)) for _ in range(2))
    assert text(model, ids, cache=cache, prefill_chunk_size=size) == by_hand(model, other, ids, mask, size)
    for layer in range(2):
        assert held(cache, layer, 0, 1) == held(other, layer, 0, 1)
    assert cache.nbytes() == other.nbytes()


@pytest.mark.parametrize("budget", BUDGETS[:2], ids=str)
@pytest.mark.parametrize("name", EVICTING)
def test_padded_rows_take_their_own_share_in_chunks(name: str, budget: int | float) -> None:
    """The second row's first token lies in the third chunk."""
    model = tiny_model()
    ids, mask = tiny_tokens(49, 14)
    cache, other = (CompressedCache(model, with_budget(name, budget)) for _ in range(2))
    assert text(model, ids, mask, cache, prefill_chunk_size=16) == by_hand(model, other, ids, mask, 16)
    for row in range(2):
        assert held(cache, 1, row, 0) == held(other, 1, row, 0)


@pytest.mark.parametrize("name", FULL_WIDTH)
def test_under_the_budget_chunks_say_what_one_piece_says(name: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(49, 14)
    plain = text(model, ids, mask)
    assert text(model, ids, mask, CompressedCache(model, with_budget(name, 64)), prefill_chunk_size=16) == plain


@pytest.mark.parametrize("budget", BUDGETS[:2], ids=str)
@pytest.mark.parametrize("name", ["window", "h2o", "hybrid", "snapkv"])
def test_a_further_turn_in_chunks(name: str, budget: int | float) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(40)
    cache, other = (CompressedCache(model, with_budget(name, budget)) for _ in range(2))
    said = text(model, ids, cache=cache)
    assert said == text(model, ids, cache=other)
    talk = torch.cat([ids, torch.tensor(said), tiny_tokens(30, seed=1)[0]], dim=1)
    if not GOES_ON:
        with pytest.raises(KvwinnowError, match=r"prefill_chunk_size=10.*feed them again.*cache\.prompt"):
            text(model, talk, cache=cache, prefill_chunk_size=10)
        return
    ours = text(model, talk, cache=cache, prefill_chunk_size=10)
    assert ours == by_hand(model, other, talk, torch.ones_like(talk), 10, seen=51)
    assert held(cache) == held(other)


def test_embeddings_in_chunks_are_refused_since_transformers_cannot_cut_them() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(49)
    cache = CompressedCache(model, "snapkv:budget=0.5,window=8")
    with pytest.raises(KvwinnowError, match=r"prefill_chunk_size=16.*inputs_embeds.*cache\.prompt"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), prefill_chunk_size=16, **{CACHE: cache})
    assert cache.nbytes() == 0


def test_an_error_in_a_chunk_leaves_no_declaration_behind() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(49)
    cache, calls = CompressedCache(model, "h2o:budget=0.5"), []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("stop")

    handle = model.base_model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        text(model, ids, cache=cache, prefill_chunk_size=16)
    handle.remove()
    with pytest.raises(KvwinnowError, match="interrupted"):
        text(model, ids, cache=cache)
    cache.reset()
    logits(model, ids[:, :20], cache)
    logits(model, ids[:, 20:21], cache)
    assert counts(cache) == {10}  # the prompt had 20 tokens, the one after it was decoded
