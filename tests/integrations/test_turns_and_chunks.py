"""A prompt in chunks obeys the budget as a prompt in one piece does; further turns go on where the last one ended."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvwinnow import CompressedCache
from kvwinnow.statistics import Kind
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, FULL_WIDTH, counts, held, logits, text, with_budget


def same_tokens(one: CompressedCache, other: CompressedCache) -> bool:
    """Whether two caches hold the same tokens in every layer, row and head."""
    rows = one.batch_size
    heads = one.structure.kv_heads
    places = [(layer, row, head) for layer in range(len(one)) for row in range(rows) for head in range(heads)]
    return all(held(one, *place) == held(other, *place) for place in places)


def feed(model: object, cache: CompressedCache, ids: Tensor, size: int) -> list[Tensor]:
    return [logits(model, chunk, cache) for chunk in ids.split(size, dim=1)]  # type: ignore[arg-type]


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 16, 40])
@pytest.mark.parametrize("name", FULL_WIDTH)
def test_chunks_under_the_budget_equal_one_piece(name: str, size: int) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(50)
    cache = CompressedCache(model, with_budget(name, 64))
    with cache.prompt(length=50):
        out = torch.cat(feed(model, cache, ids, size), dim=1)
    assert torch.allclose(out, logits(model, ids), atol=1e-4)
    assert text(model, torch.cat([ids, out[:, -1:].argmax(-1)], dim=1), cache=cache, tokens=7) == text(
        model, torch.cat([ids, out[:, -1:].argmax(-1)], dim=1), tokens=7
    )


@pytest.mark.parametrize("size", [1, 5, 24, 60])
@pytest.mark.parametrize("name", EVICTING)
def test_the_budget_holds_after_every_chunk_be_it_of_one_token(name: str, size: int) -> None:
    model = tiny_model()
    cache = CompressedCache(model, FULL_WIDTH[name])
    fed = 0
    with cache.prompt(length=70):
        for chunk in tiny_tokens(70)[0].split(size, dim=1):
            logits(model, chunk, cache)
            fed += chunk.shape[1]
            assert counts(cache) == {min(fed, 24)}


@pytest.mark.parametrize("name", ["window", "streaming"])
@pytest.mark.parametrize("size", [1, 9, 33])
def test_policies_of_positions_hold_in_chunks_what_they_hold_in_one_piece(name: str, size: int) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(70)
    whole, pieces = (CompressedCache(model, FULL_WIDTH[name]) for _ in range(2))
    logits(model, ids, whole)
    with pieces.prompt(length=70):
        feed(model, pieces, ids, size)
    assert same_tokens(whole, pieces)


def test_a_policy_that_evicts_at_the_end_alone_sees_the_whole_prompt_in_its_last_chunk() -> None:
    """The mass of chunks sums to the mass of one piece, as long as nothing was cut before."""
    model = tiny_model()
    ids, _ = tiny_tokens(60)
    whole, pieces = (CompressedCache(model, "h2o:budget=50") for _ in range(2))
    logits(model, ids, whole)
    feed(model, pieces, ids, 20)  # 40 tokens fit, the last 20 do not
    assert same_tokens(whole, pieces)
    for layer, other in zip(whole.layers, pieces.layers, strict=True):
        one, two = (cut.running[Kind.MASS].sort(-1).values for cut in (layer, other))
        assert torch.allclose(one, two, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "length", "budget"), [(1, 41, 40), (5, 45, 41), (5, 44, 40), (16, 47, 33), (23, 46, 30)]
)
@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_window_of_snapkv_spans_chunks(size: int, length: int, budget: int, pool: str, group: int) -> None:
    """Nothing is cut before the last chunk, whose window of 16 began in chunks before it."""
    model = tiny_model(heads=4, kv_heads=4 // group)
    ids, _ = tiny_tokens(length)
    policy = f"snapkv:budget={budget},window=16,kernel=3,pool={pool}"
    whole, pieces = (CompressedCache(model, policy) for _ in range(2))
    logits(model, ids, whole)
    *before, last = ids.split(size, dim=1)
    with pieces.prompt(length=length):
        feed(model, pieces, torch.cat(before, dim=1), size)
        assert counts(pieces) == {length - last.shape[1]}
        logits(model, last, pieces)
    assert counts(pieces) == {budget}
    assert same_tokens(whole, pieces)


def test_the_window_of_a_padded_row_spans_chunks() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(46, 44)
    whole, pieces = (CompressedCache(model, "snapkv:budget=40,window=16,kernel=3") for _ in range(2))
    logits(model, ids, whole, attention_mask=mask)
    for end in (7, 15, 23, 31, 39, 46):
        start = 0 if end == 7 else end - 8 if end != 46 else 39
        logits(model, ids[:, start:end], pieces, attention_mask=mask[:, :end])
    assert same_tokens(whole, pieces)


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("size", [1, 16, 30])
def test_a_share_of_a_declared_prompt_in_chunks_is_the_share_of_one_piece(share: float, size: int) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(60)
    whole, pieces = (CompressedCache(model, f"streamingllm:budget={share}") for _ in range(2))
    logits(model, ids, whole)
    with pieces.prompt(length=60):
        feed(model, pieces, ids, size)
    assert counts(whole) == counts(pieces) == {int(60 * share)}
    assert same_tokens(whole, pieces)


@pytest.mark.parametrize("name", EVICTING)
def test_a_share_in_chunks_of_a_padded_batch_is_that_of_each_row(name: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(80, 48)
    cache = CompressedCache(model, with_budget(name, 0.5))
    with cache.prompt(length=[80, 48]):
        for start in range(0, 80, 20):
            logits(model, ids[:, start : start + 20], cache, attention_mask=mask[:, : start + 20])
    assert [len(held(cache, 1, row)) for row in range(2)] == [40, 24]


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("sizes", [(20, 20, 20), (1, 30, 29), (59, 1)], ids=str)
def test_a_padded_batch_in_chunks_is_each_row_in_chunks(name: str, sizes: tuple[int, ...]) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(60, 33)
    cache, alone = (CompressedCache(model, FULL_WIDTH[name]) for _ in range(2))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    start = 0
    with cache.prompt(length=[60, 33]), alone.prompt(length=33):
        for size in sizes:
            end = start + size
            options = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
            out = logits(model, ids[:, start:end], cache, **options)
            if end > 27:
                own = logits(model, ids[1:, max(start, 27) : end], alone)
                assert torch.allclose(out[1:, -own.shape[1] :], own, atol=1e-4)
                assert all(held(cache, 1, 1, head) == held(alone, 1, 0, head) for head in range(2))
            start = end


def test_several_tokens_are_a_prompt_and_one_is_decoded() -> None:
    """H2O with evict_every=4 may run over its budget while decoding, and not in a prompt."""
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24,evict_every=4")
    logits(model, tiny_tokens(24)[0], cache)
    for kept in (25, 26, 27, 24, 25):
        logits(model, tiny_tokens(1)[0], cache)
        assert counts(cache) == {kept}
    logits(model, tiny_tokens(2)[0], cache)
    assert counts(cache) == {24}
    with cache.prompt(length=2):
        for token in tiny_tokens(2)[0].split(1, dim=1):
            logits(model, token, cache)
            assert counts(cache) == {24}


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVICTING)
def test_the_next_turn_begins_at_the_true_length(name: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, FULL_WIDTH[name])
    talk, _ = tiny_tokens(50)
    for turn in range(3):
        said = torch.tensor(text(model, talk, cache=cache, tokens=6))
        talk = torch.cat([talk, said], dim=1)
        # The last token said was chosen, and has not been fed yet.
        assert cache.get_seq_length() == talk.shape[1] - 1
        assert held(cache, 1, 0, 1)[-1] == talk.shape[1] - 2
        talk = torch.cat([talk, tiny_tokens(20, seed=turn + 1)[0]], dim=1)


@pytest.mark.parametrize("name", EVICTING)
def test_a_turn_through_generate_is_a_turn_through_forward_calls(name: str) -> None:
    model = tiny_model()
    cache, by_hand = (CompressedCache(model, FULL_WIDTH[name]) for _ in range(2))
    first, second = tiny_tokens(50)[0], tiny_tokens(20, seed=1)[0]
    said = torch.tensor(text(model, first, cache=cache, tokens=6))
    logits(model, first, by_hand)
    feed(model, by_hand, said[:, :-1], 1)
    talk = torch.cat([first, said, second], dim=1)
    answer = text(model, talk, cache=cache, tokens=6)[0]
    new = talk[:, -21:]
    for expected in answer:
        new = logits(model, new, by_hand)[:, -1:].argmax(-1)
        assert int(new) == expected
    assert same_tokens(cache, by_hand)


@pytest.mark.parametrize("name", EVICTING)
def test_the_budget_holds_in_every_turn(name: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, FULL_WIDTH[name])
    for turn in range(3):
        logits(model, tiny_tokens(40, seed=turn)[0], cache)
        assert counts(cache) == {24}
        feed(model, cache, tiny_tokens(5, seed=turn)[0], 1)


@pytest.mark.parametrize("name", ["window", "h2o", "snapkv"])
def test_a_share_grows_with_the_conversation(name: str) -> None:
    model = tiny_model()
    cache = CompressedCache(model, with_budget(name, 0.5))
    logits(model, tiny_tokens(60)[0], cache)
    assert counts(cache) == {30}
    feed(model, cache, tiny_tokens(4)[0], 1)
    logits(model, tiny_tokens(36)[0], cache)
    assert counts(cache) == {50}
    feed(model, cache, tiny_tokens(2)[0], 1)
    with cache.prompt(length=18):
        feed(model, cache, tiny_tokens(18)[0], 7)
    assert counts(cache) == {60}


@pytest.mark.parametrize("name", FULL_WIDTH)
def test_turns_of_a_padded_batch_are_those_of_each_row(name: str) -> None:
    model = tiny_model()
    lengths = [(40, 26), (9, 14), (21, 2)]
    batch = CompressedCache(model, FULL_WIDTH[name])
    alone = [CompressedCache(model, FULL_WIDTH[name]) for _ in range(2)]
    mask = torch.empty(2, 0, dtype=torch.int64)
    for turn, sizes in enumerate(lengths):
        ids, new = tiny_tokens(*sizes, seed=turn)
        mask = torch.cat([mask, new], dim=1)
        for step in range(4):
            columns = ids.shape[1]
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -columns:]
            out = logits(model, ids, batch, attention_mask=mask, position_ids=places)
            for row, cache in enumerate(alone):
                own_ids = ids[row : row + 1] if step else ids[row : row + 1, -sizes[row] :]
                own = logits(model, own_ids, cache)
                assert torch.allclose(out[row, -1], own[0, -1], atol=1e-4)
                assert all(held(batch, 1, row, head) == held(cache, 1, 0, head) for head in range(2))
            ids = out[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        mask = mask[:, :-1]


@pytest.mark.parametrize("length", [30, 5])
@pytest.mark.parametrize("name", FULL_WIDTH)
def test_a_row_that_is_hidden_in_a_decode_step_is_as_if_the_step_had_not_been(name: str, length: int) -> None:
    """Loops that serve several users hide the rows that have ended, or that wait, in the attention mask."""
    model = tiny_model()
    ids, mask = tiny_tokens(length, 31)
    batch, alone = (CompressedCache(model, FULL_WIDTH[name]) for _ in range(2))
    logits(model, ids, batch, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    logits(model, ids[1:], alone)
    tokens, _ = tiny_tokens(30, 30, seed=1)
    for step, token in enumerate(tokens.split(1, dim=1)):
        shown = step < 1 or step >= 28
        mask = torch.cat([mask, torch.tensor([[1], [int(shown)]])], dim=1)
        places = (mask.cumsum(-1) - 1)[:, -1:]
        out = logits(model, token, batch, attention_mask=mask, position_ids=places)
        if shown:
            own = logits(model, token[1:], alone)
            assert torch.allclose(out[1:], own, atol=1e-4)
        for head in range(2):
            assert held(batch, 1, 1, head) == held(alone, 1, 0, head)


def test_a_second_turn_without_a_mask_remembers_the_padding_of_the_first() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(30, 12)
    cache, alone = (CompressedCache(model, "h2o:budget=100") for _ in range(2))
    logits(model, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    logits(model, ids[1:, -12:], alone)
    more = tiny_tokens(5, 5, seed=1)[0]
    with torch.no_grad():
        out = model(more, position_ids=torch.stack([torch.arange(30, 35), torch.arange(12, 17)]), **{CACHE: cache})
    assert torch.allclose(out.logits[1:], logits(model, more[1:], alone), atol=1e-4)
