"""Beam search: rows of the cache follow their beams, with everything a layer holds of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import KINDS, tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, FULL_WIDTH, ROLLING, counts, held, logits, text, with_budget

BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "returned": {"num_beams": 4, "num_return_sequences": 3},
    "sampled": {"num_beams": 3, "do_sample": True, "temperature": 1.5},
    "early": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(2, 40))},
    "chunks": {"num_beams": 2, "prefill_chunk_size": 16},
}


def beams(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: CompressedCache | None, **options: Any) -> Any:
    """Beam search with one seed: the output with its sequences and their scores."""
    torch.manual_seed(11)
    given = {} if cache is None else {CACHE: cache}
    settings = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    return model.generate(ids, attention_mask=mask, **given, **{**settings, **options})


def alone(
    model: PreTrainedModel, policy: str, row: Tensor, new: Tensor, **dtypes: Any
) -> tuple[float, CompressedCache]:
    """The log-probability of a continuation by a cache of its own, fed as generate feeds; and that cache."""
    cache = CompressedCache(model, policy, **dtypes)
    outputs = [logits(model, row.unsqueeze(0), cache)[:, -1]]
    outputs += [logits(model, token.view(1, 1), cache)[:, -1] for token in new[:-1]]
    chances = torch.cat(outputs).log_softmax(-1)
    return float(chances.gather(1, new.unsqueeze(1)).sum()), cache


# -- nothing evicted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FULL_WIDTH)
@pytest.mark.parametrize("way", BEAMS)
def test_fault_19_under_the_budget_beams_are_those_of_the_uncompressed_model(name: str, way: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(18, 33)
    plain = beams(model, ids, mask, None, **BEAMS[way])
    ours = beams(model, ids, mask, CompressedCache(model, with_budget(name, 64)), **BEAMS[way])
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert torch.allclose(ours.sequences_scores, plain.sequences_scores, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_19_beams_of_every_model(kind: str) -> None:
    model = tiny_model(kind)
    ids, mask = tiny_tokens(18, 33)
    plain = beams(model, ids, mask, None, num_beams=3)
    ours = beams(model, ids, mask, CompressedCache(model, "h2o:budget=64"), num_beams=3)
    assert ours.sequences.tolist() == plain.sequences.tolist()


# -- with eviction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", EVICTING)
def test_fault_19_each_evicted_beam_is_scored_as_if_it_were_alone(name: str, dtype: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(30, 45)
    cache = CompressedCache(model, EVICTING[name], dtype=dtype)
    out = beams(model, ids, mask, cache, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    assert max(counts(cache)) <= (24 + (4 if name in ROLLING else 9))
    for index, (sequence, score) in enumerate(zip(out.sequences, out.sequences_scores, strict=True)):
        row = ids[index // 3][mask[index // 3].bool()]
        expected, _ = alone(model, EVICTING[name], row, sequence[ids.shape[1] :], dtype=dtype)
        # A key between two codes may fall to either side: one step of one code has been seen to move a score by 2.1e-3.
        assert float(score) == pytest.approx(expected, abs={"fp32": 1e-4, "int8": 3e-3, "int4": 1e-3}[dtype])
    assert len({tuple(sequence.tolist()) for sequence in out.sequences}) == 6


@pytest.mark.parametrize("name", FULL_WIDTH)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_beam_goes_on_in_a_further_turn_as_if_it_were_alone(name: str, place: int) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(40)
    cache = CompressedCache(model, FULL_WIDTH[name])
    said = beams(model, ids, mask, cache, num_beams=3, num_return_sequences=3).sequences[place : place + 1]
    _, own = alone(model, FULL_WIDTH[name], ids[0], said[0, 40:])
    talk = torch.cat([said, tiny_tokens(11, seed=1)[0]], dim=1)
    assert cache.batch_size == 3
    assert text(model, talk, cache=cache) == text(model, talk, cache=own)
    assert cache.batch_size == 1
    for layer in range(2):
        assert held(cache, layer, 0, 1) == held(own, layer, 0, 1)


def test_one_conversation_goes_on_in_several_beams_and_samples() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(40)
    cache, own = (CompressedCache(model, "h2o:budget=24") for _ in range(2))
    talk = torch.cat([ids, torch.tensor(text(model, ids, cache=cache)), tiny_tokens(5, seed=1)[0]], dim=1)
    text(model, ids, cache=own)
    own.batch_repeat_interleave(3)
    expected = beams(model, talk.repeat(3, 1), torch.ones(3, 57), own, num_return_sequences=1, do_sample=True)
    sampled = beams(model, talk, torch.ones(1, 57), cache, num_return_sequences=3, do_sample=True)
    assert sampled.sequences.tolist() == expected.sequences.tolist()


def test_a_beam_that_is_no_longer_held_asks_for_a_reset() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(40)
    cache = CompressedCache(model, "h2o:budget=24")
    out = beams(model, ids, mask, cache, num_beams=3)
    other = out.sequences.clone()
    other[0, 41] = 199 - other[0, 41]
    before = cache.nbytes()
    with pytest.raises(KvwinnowError, match=r"3 row\(s\) of 48 tokens.*cache\.reset\(\)"):
        text(model, torch.cat([other, tiny_tokens(5)[0]], dim=1), cache=cache)
    assert (cache.batch_size, cache.nbytes()) == (3, before)
    cache.reset()
    assert beams(model, ids, mask, cache, num_beams=3).sequences.tolist() == out.sequences.tolist()


def test_a_refused_turn_drops_no_row() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(40)
    cache = CompressedCache(model, "h2o:budget=24")
    best = beams(model, ids, mask, cache, num_beams=3).sequences
    talk = torch.cat([best, tiny_tokens(5)[0]], dim=1)
    with pytest.raises(KvwinnowError, match="output_attentions"):
        text(model, talk, cache=cache, output_attentions=True, return_dict_in_generate=True)
    assert cache.batch_size == 3
    assert len(text(model, talk, cache=cache)) == 1


# -- rows by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "int4"])
@pytest.mark.parametrize("name", FULL_WIDTH)
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1], [0], [2, 2, 1, 0, 1]], ids=str)
def test_chosen_rows_go_on_as_they_would_have_alone(rows: list[int], name: str, dtype: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(30, 3, 45)
    cache = CompressedCache(model, FULL_WIDTH[name], dtype=dtype)
    logits(model, ids, cache, attention_mask=mask, position_ids=mask.cumsum(1) - 1)
    cache.batch_select_indices(torch.tensor(rows))
    mask = torch.cat([mask[rows], torch.ones(len(rows), 9, dtype=torch.int64)], dim=1)
    steps = tiny_tokens(*[9] * len(rows), seed=5)[0]
    outputs = []
    for start, end in ((45, 50), (50, 51)):
        places = mask[:, :end].cumsum(1)[:, start:] - 1
        new = steps[:, start - 45 : end - 45]
        outputs.append(logits(model, new, cache, attention_mask=mask[:, :end], position_ids=places))
    for row, source in enumerate(rows):
        own = CompressedCache(model, FULL_WIDTH[name], dtype=dtype)
        logits(model, ids[source : source + 1, -(30, 3, 45)[source] :], own)
        for new, out in zip((steps[row : row + 1, :5], steps[row : row + 1, 5:6]), outputs, strict=True):
            assert torch.allclose(out[row : row + 1], logits(model, new, own), atol=1e-4)
        assert held(cache, 1, row, 0) == held(own, 1, 0, 0)


def test_beams_that_keep_their_places_cost_nothing() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    logits(model, tiny_tokens(40, 40, 40)[0], cache)
    before = [layer.slots.keys.parts[0].data_ptr() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([0, 1, 2]))
    assert [layer.slots.keys.parts[0].data_ptr() for layer in cache.layers] == before


def test_rows_of_an_empty_cache_are_left_alone() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    cache.reorder_cache(torch.tensor([0, 1]))
    cache.batch_repeat_interleave(3)
    assert text(model, tiny_tokens(9)[0], cache=cache) == text(model, tiny_tokens(9)[0])


@pytest.mark.parametrize("dtype", ["fp32", "int4"])
@pytest.mark.parametrize("name", FULL_WIDTH)
def test_bytes_follow_the_rows(name: str, dtype: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, FULL_WIDTH[name], dtype=dtype)
    logits(model, tiny_tokens(40, 40)[0], cache)
    before = cache.nbytes()
    cache.batch_repeat_interleave(3)
    assert cache.nbytes() == 3 * before
    cache.batch_select_indices(torch.tensor([True, False] * 3))
    assert 2 * cache.nbytes() == 3 * before


@pytest.mark.parametrize("name", ["window", "h2o", "snapkv"])
def test_a_share_stays_each_rows_own(name: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(80, 40)
    cache = CompressedCache(model, with_budget(name, 0.5))
    logits(model, ids, cache, attention_mask=mask)
    cache.reorder_cache(torch.tensor([1, 0]))
    for seed in range(3):
        logits(model, tiny_tokens(1, 1, seed=seed)[0], cache)
    kept = [len(held(cache, 0, row, 0)) for row in range(2)]
    assert kept == ([23, 43] if name == "snapkv" else [20, 40])
