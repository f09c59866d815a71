"""``model.generate`` with a cache: the ways that work give the right tokens, the others are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import PLAIN, tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, FULL_WIDTH, counts, logits, text

NAMES = ["past_key_values"]
if Version(transformers.__version__) >= Version("5.24"):
    NAMES.append("cache")


# -- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("policy", ["full", "streamingllm", "h2o", "hybrid", "snapkv", "slidingwindow"])
def test_under_the_budget_every_model_says_what_it_says_without_a_cache(kind: str, policy: str) -> None:
    model = tiny_model(kind)
    ids, mask = tiny_tokens(11, 40)
    assert text(model, ids, mask, CompressedCache(model, policy)) == text(model, ids, mask)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_generate_is_a_prompt_and_single_steps(kind: str, policy: str) -> None:
    model = tiny_model(kind)
    ids, _ = tiny_tokens(50)
    cache, stepwise = CompressedCache(model, policy), CompressedCache(model, policy)
    new = ids
    for expected in text(model, ids, cache=cache)[0]:
        new = logits(model, new, stepwise)[:, -1:].argmax(-1)
        assert int(new) == expected
    for layer in range(2):
        assert torch.equal(cache.positions(layer), stepwise.positions(layer))


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_taken_under_every_name_transformers_gives_it(name: str) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(50)
    cache = CompressedCache(model, "h2o:budget=24")
    out = model.generate(ids, max_new_tokens=8, do_sample=False, **{name: cache})
    assert out[:, 50:].tolist() == text(model, ids, cache=CompressedCache(model, "h2o:budget=24"), tokens=8)
    assert counts(cache) == {24}
    cache.reset()
    with torch.no_grad():
        model(ids, **{name: cache})
    assert counts(cache) == {24}


@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_a_prompt_given_as_embeddings_says_what_its_tokens_say(policy: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(20, 45)
    cache = CompressedCache(model, policy)
    expected = text(model, ids, mask, CompressedCache(model, policy))
    options = {CACHE: cache, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    out = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **options)
    assert out.tolist() == expected


def test_a_conversation_goes_on_from_embeddings() -> None:
    model = tiny_model()
    ids, more = tiny_tokens(45)[0], tiny_tokens(10, seed=1)[0]
    cache, other = CompressedCache(model, "h2o:budget=24"), CompressedCache(model, "h2o:budget=24")
    embed = model.get_input_embeddings()
    said = text(model, ids, cache=other)
    said_too = model.generate(inputs_embeds=embed(ids), max_new_tokens=12, do_sample=False, **{CACHE: cache}).tolist()
    talk = torch.cat([ids, torch.tensor(said), more], dim=1)
    again = model.generate(inputs_embeds=embed(talk), max_new_tokens=12, do_sample=False, **{CACHE: cache}).tolist()
    assert (said_too, again) == (said, text(model, talk, cache=other))


def test_scores_and_the_cache_itself_are_returned() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(20, 45)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    cache = CompressedCache(model, "full")
    ours, plain = model.generate(ids, **{CACHE: cache}, **options), model.generate(ids, **options)
    assert ours.get(CACHE) is cache
    for one, other in zip(ours.logits, plain.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


# -- sampling, several sequences, ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "temperature": 0.7}, {"num_return_sequences": 3}], ids=str)
def test_sampling_with_one_seed_gives_the_sample_of_no_cache(options: dict[str, Any]) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(20, 45)
    samples = []
    for cache in (None, CompressedCache(model, "h2o:budget=200")):
        torch.manual_seed(7)
        samples.append(text(model, ids, mask, cache, do_sample=True, **options))
    assert samples[0] == samples[1]
    assert len(samples[1]) == 2 * options.get("num_return_sequences", 1)


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_each_of_several_sequences_is_held_as_if_it_were_alone(policy: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(20, 45)
    cache = CompressedCache(model, policy)
    torch.manual_seed(3)
    said = text(model, ids, mask, cache, do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in said}) == 6
    for index, row in enumerate(said):
        length = (20, 45)[index // 3]
        alone = CompressedCache(model, policy)
        logits(model, ids[index // 3, -length:].unsqueeze(0), alone)
        for token in row[:-1]:
            logits(model, torch.tensor([[token]]), alone)
        ours, theirs = cache.positions(1)[index].sort(-1).values, alone.positions(1)[0].sort(-1).values
        for head in range(2):
            assert ours[head][ours[head] >= 0].tolist() == theirs[head][theirs[head] >= 0].tolist()


@pytest.mark.parametrize("policy", ["full", "h2o:budget=100"])
def test_rows_that_ended_do_not_disturb_the_others(policy: str) -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(20, 45, 33)
    plain = text(model, ids, mask, tokens=20)
    ends = [plain[0][2], plain[1][6]]
    assert all(end not in plain[2] for end in ends)
    expected = text(model, ids, mask, tokens=20, eos_token_id=ends)
    assert expected[0][3:] == [0] * 17
    assert text(model, ids, mask, CompressedCache(model, policy), tokens=20, eos_token_id=ends) == expected


def test_generation_stops_when_all_rows_ended() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(45)
    plain = text(model, ids, tokens=20)[0]
    cache = CompressedCache(model, "h2o:budget=24")
    said = text(model, ids, cache=CompressedCache(model, "h2o:budget=24"), tokens=20)[0]
    assert said[:1] == plain[:1]
    stop = said.index(said[4])
    assert text(model, ids, cache=cache, tokens=20, eos_token_id=said[4])[0] == said[: stop + 1]
    assert cache.get_seq_length() == 45 + stop


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_sees_every_token() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(45)
    streamer = Collected()
    said = text(model, ids, cache=CompressedCache(model, "snapkv:budget=40"), streamer=streamer)
    assert torch.cat(streamer.pieces).tolist() == ids[0].tolist() + said[0]
    assert streamer.ended


# -- refused at the start ---------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "assisted generation": {"prompt_lookup_num_tokens": 3},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "dola generation": {"dola_layers": "low"},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beam search": {"num_beams": 2, "force_words_ids": [[5, 6]]},
}


def forwards(model: Any) -> list[int]:
    """Grows by one with every forward call of the model's decoder."""
    calls: list[int] = []
    model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("given_as", ["arguments", "config", "model's config"])
def test_ways_to_generate_that_are_not_served_are_refused_before_any_forward_call(way: str, given_as: str) -> None:
    model = tiny_model()
    cache, calls = CompressedCache(model, "full"), forwards(model)
    options: dict[str, Any] = {"do_sample": False, **REFUSED[way]}
    if given_as == "config":
        options = {"generation_config": GenerationConfig(**options)}
    elif given_as == "model's config":
        model.generation_config.update(**options)
        options = {}
    with pytest.raises(KvwinnowError, match=way) as caught:
        model.generate(tiny_tokens(9)[0], max_new_tokens=4, **{CACHE: cache}, **options)
    assert "greedy search, sampling or beam search" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert calls == []
    assert cache.nbytes() == 0


def test_an_assistant_model_is_refused_before_any_forward_call() -> None:
    model, assistant = tiny_model(), tiny_model(seed=1)
    cache, calls = CompressedCache(model, "full"), forwards(model)
    with pytest.raises(KvwinnowError, match="assisted generation"):
        text(model, tiny_tokens(9)[0], cache=cache, assistant_model=assistant)
    assert calls == []


def test_beams_of_the_models_config_may_be_overruled() -> None:
    model = tiny_model()
    model.generation_config.num_beams = 4
    ids, _ = tiny_tokens(20)
    assert text(model, ids, cache=CompressedCache(model, "full"), num_beams=1) == text(model, ids, num_beams=1)


def test_use_cache_false_beside_a_cache_is_refused() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "full")
    with pytest.raises(KvwinnowError, match="use_cache=False"):
        text(model, tiny_tokens(9)[0], cache=cache, use_cache=False)
    with pytest.raises(KvwinnowError, match="use_cache=False"):
        logits(model, tiny_tokens(9)[0], cache, use_cache=False)


def test_the_same_ways_still_work_without_our_cache() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(20)
    before = text(model, ids, num_beams=2)
    cache = CompressedCache(model, "full")
    text(model, ids, cache=cache)
    assert text(model, ids, num_beams=2) == before
    assert text(model, ids, assistant_model=tiny_model()) == text(model, ids)
