"""Every way to generate that docs/generation.md names does what the page says of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, counts, held, logits, text, with_budget

PAGE = (Path(__file__).parents[2] / "docs/generation.md").read_text()


def rows_of(heading: str) -> list[str]:
    """The code in the first column of the table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.+?)` \|", section, flags=re.M)


WORKS, REFUSED = rows_of("Works"), rows_of("Refused")


class EvenOnly(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = torch.arange(scores.shape[-1]) % 2 == 1
        return scores.masked_fill(odd, -torch.inf)


class StopAt(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= 52)


class Numbers:
    """A tokenizer whose text of a token is its number."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(token)} " for token in torch.as_tensor(ids).flatten())


class Silent(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        pass


def loop(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """A decoding loop of one's own: the second best token each time."""
    given = {name: kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None}
    new, mask = input_ids, torch.ones_like(input_ids)
    if kwargs.get("attention_mask") is not None:
        mask = kwargs["attention_mask"]
    for _ in range(12):
        places = mask.cumsum(1)[:, -new.shape[1] :] - 1
        out = model(new, attention_mask=mask, position_ids=places, **given)
        given = {CACHE: out[CACHE]}
        new = out.logits[:, -1].topk(2).indices[:, 1:]
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        input_ids = torch.cat([input_ids, new], dim=1)
    return input_ids


def options_of(row: str) -> dict[str, Any]:
    names = {
        "processors": LogitsProcessorList([EvenOnly()]),
        "allowed": lambda row, ids: list(range(20, 90)),
        "criteria": StoppingCriteriaList([StopAt()]),
        "streamer": Silent(Numbers()),
        "loop": loop,
        "compile_config": CompileConfig(),
        "assistant": tiny_model(seed=1),
        "right_padded": torch.tensor([[1] * 44 + [0]] * 2),
    }
    options: dict[str, Any] = eval(f"dict({row})", names)
    return options


def generate(cache: CompressedCache | None, row: str, ids: Tensor, mask: Tensor) -> tuple[PreTrainedModel, Any]:
    model = tiny_model() if cache is None else cache._model()
    assert model is not None
    torch.manual_seed(5)
    given = {} if cache is None else {CACHE: cache}
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **options_of(row)}
    return model.generate(ids, **given, **options)


def tokens_of(out: Any) -> list[list[int]]:
    return (out if isinstance(out, Tensor) else out.sequences).tolist()  # type: ignore[no-any-return]


def rows_for(row: str) -> tuple[Tensor, Tensor]:
    """Two padded rows, or one where a streamer takes no more."""
    return tiny_tokens(45) if "streamer" in row else tiny_tokens(20, 45)


# -- the page's tables ------------------------------------------------------------------------------------------------


def test_the_page_has_its_tables() -> None:
    assert len(WORKS) >= 20
    assert len(REFUSED) >= 14


@pytest.mark.parametrize("row", WORKS)
@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_what_works_gives_the_tokens_of_no_cache_under_the_budget(name: str, row: str) -> None:
    ids, mask = rows_for(row)
    model = tiny_model()
    ours = generate(CompressedCache(model, with_budget(name, 80)), row, ids, mask)
    assert tokens_of(ours) == tokens_of(generate(None, row, ids, mask))


@pytest.mark.parametrize("row", WORKS)
def test_what_works_keeps_the_budget_when_it_evicts(row: str) -> None:
    ids, mask = rows_for(row)
    model = tiny_model()
    cache = CompressedCache(model, EVICTING["h2o"])
    again = CompressedCache(model, EVICTING["h2o"])
    said = tokens_of(generate(cache, row, ids, mask))
    assert said == tokens_of(generate(again, row, ids, mask))
    # A row of a 20-token prompt is full after four more; stopping criteria may come first.
    assert counts(cache) <= {24, 22, 23, 20, 21}
    assert max(counts(cache)) == 24
    assert cache.nbytes() == 2 * 2 * (24 + 1) * cache.batch_size * (2 * 16 * 4 + 4 + 4)


@pytest.mark.parametrize("row", REFUSED)
def test_fault_19_what_is_refused_is_refused_at_the_start_in_one_sentence(row: str) -> None:
    model = tiny_model()
    cache, layers = CompressedCache(model, "h2o:budget=24"), []
    model.base_model.layers[0].register_forward_pre_hook(lambda *_: layers.append(1))
    with pytest.raises(KvwinnowError) as error:
        generate(cache, row, *tiny_tokens(45, 45))
    assert "\n" not in str(error.value)
    assert ". " not in str(error.value)
    assert layers == []
    assert cache.nbytes() == 0
    assert text(model, tiny_tokens(20)[0], cache=cache, tokens=3) == text(model, tiny_tokens(20)[0], tokens=3)


def test_continuous_batching_does_not_take_the_cache() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "full")
    with pytest.raises(KvwinnowError, match=r"generate_batch.*ignore a CompressedCache"):
        model.generate_batch(tiny_tokens(9)[0].tolist(), **{CACHE: cache})


# -- what the tables cannot show --------------------------------------------------------------------------------------


def test_scores_logits_and_hidden_states_are_those_of_no_cache() -> None:
    row = "return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True"
    ids, mask = tiny_tokens(20, 45)
    plain, ours = generate(None, row, ids, mask), generate(CompressedCache(tiny_model(), "full"), row, ids, mask)
    for kind in ("scores", "logits"):
        for one, other in zip(ours[kind], plain[kind], strict=True):
            assert torch.allclose(one, other, atol=1e-4)
    for step, (one, other) in enumerate(zip(ours.hidden_states, plain.hidden_states, strict=True)):
        real = mask.bool() if step == 0 else torch.ones(2, 1, dtype=torch.bool)
        assert all(torch.allclose(a[real], b[real], atol=1e-4) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", ["full", EVICTING["h2o"], EVICTING["snapkv"]])
def test_a_streamer_in_a_thread_hands_out_the_text(policy: str) -> None:
    model, ids = tiny_model(), tiny_tokens(45)[0]
    expected = text(model, ids, cache=CompressedCache(model, policy))[0]
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
    cache = CompressedCache(model, policy)
    thread = threading.Thread(target=text, args=(model, ids), kwargs={"cache": cache, "streamer": streamer})
    thread.start()
    said = "".join(streamer)
    thread.join()
    assert said.split() == [str(token) for token in expected]


def test_an_end_that_comes_early_leaves_the_cache_at_it() -> None:
    model, ids = tiny_model(), tiny_tokens(45)[0]
    cache = CompressedCache(model, "h2o:budget=24")
    said = text(model, ids, cache=cache, stopping_criteria=StoppingCriteriaList([StopAt()]))
    assert len(said[0]) == 7
    assert cache.get_seq_length() == 51
    said = text(model, ids, cache=CompressedCache(model, "h2o:budget=24"), tokens=500, max_time=0.0)
    assert len(said[0]) == 1


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_inference_mode_and_no_grad_take_turns_on_one_cache(policy: str) -> None:
    model = tiny_model()
    cache, other = (CompressedCache(model, policy) for _ in range(2))
    talk, plain = tiny_tokens(40)[0], tiny_tokens(40)[0]
    for turn, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad)):
        with mode():
            said = model.generate(talk, max_new_tokens=6, num_beams=1 + turn % 2, do_sample=False, **{CACHE: cache})
        expected = model.generate(plain, max_new_tokens=6, num_beams=1 + turn % 2, do_sample=False, **{CACHE: other})
        assert said.tolist() == expected.tolist()
        more = tiny_tokens(9, seed=turn)[0]
        talk, plain = torch.cat([said.clone(), more], dim=1), torch.cat([expected, more], dim=1)


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 7, 12])], ids=str)
@pytest.mark.parametrize("name", ["window", "h2o", "snapkv"])
def test_logits_to_keep_changes_what_is_returned_and_nothing_else(name: str, keep: int | Tensor) -> None:
    model = tiny_model()
    cache, whole = (CompressedCache(model, EVICTING[name]) for _ in range(2))
    for seed, length in enumerate((40, 13)):
        ids = tiny_tokens(length, seed=seed)[0]
        every = logits(model, ids, whole)
        kept = logits(model, ids, cache, logits_to_keep=keep)
        assert torch.allclose(kept, every[:, keep if isinstance(keep, Tensor) else slice(-keep, None)], atol=1e-5)
    assert held(cache, 1, 0, 1) == held(whole, 1, 0, 1)


RIGHT: dict[str, Callable[[PreTrainedModel, CompressedCache, Tensor, Tensor], object]] = {
    "generate": lambda model, cache, ids, mask: text(model, ids, mask, cache),
    "generate, which finds the padding itself": lambda model, cache, ids, mask: model.generate(ids, **{CACHE: cache}),
    "beams": lambda model, cache, ids, mask: text(model, ids, mask, cache, num_beams=2),
    "chunks": lambda model, cache, ids, mask: text(model, ids, mask, cache, prefill_chunk_size=30),
    "chunks of padding alone": lambda model, cache, ids, mask: text(model, ids, mask, cache, prefill_chunk_size=20),
    "chunks whose padding is found": lambda model, cache, ids, mask: model.generate(
        ids, prefill_chunk_size=20, **{CACHE: cache}
    ),
    "forward": lambda model, cache, ids, mask: logits(model, ids, cache, attention_mask=mask),
    "a mask of bool": lambda model, cache, ids, mask: logits(model, ids, cache, attention_mask=mask == 1),
}


@pytest.mark.parametrize("way", RIGHT)
def test_fault_01_right_padding_is_refused_wherever_it_comes_from(way: str) -> None:
    ids, mask = tiny_tokens(20, 45)
    model = tiny_model()
    with pytest.raises(KvwinnowError, match="pad on the left"):
        RIGHT[way](model, CompressedCache(model, "h2o:budget=24"), ids.flip(1), mask.flip(1))


# -- a real model and its pipeline ------------------------------------------------------------------------------------

GREEDY = {"max_new_tokens": 6, "do_sample": False}
PROMPTS = ["The capital of France is", "Two plus two", "My name is Anna and I live in"]


@pytest.fixture
def pipe(smollm2: tuple[Any, Any]) -> Any:
    model, tokenizer = smollm2
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


@pytest.mark.smollm2
def test_a_pipeline_says_what_it_says_without_a_cache(pipe: Any) -> None:
    cache = CompressedCache(pipe.model, "h2o:budget=200")
    given = {CACHE: cache, **GREEDY}
    first = pipe(PROMPTS[0], **given)
    assert first == pipe(PROMPTS[0], **GREEDY)
    longer = first[0]["generated_text"] + " And the capital of Spain is"
    assert pipe(longer, **given) == pipe(longer, **GREEDY)
    with pytest.raises(KvwinnowError, match=r"call cache\.reset\(\) before another prompt"):
        pipe(PROMPTS[1], **given)
    cache.reset()
    assert pipe(PROMPTS, batch_size=3, **given) == pipe(PROMPTS, batch_size=3, **GREEDY)
    cache.reset()
    with pytest.raises(KvwinnowError, match=r"call cache\.reset\(\) before another prompt"):
        pipe(PROMPTS, batch_size=1, **given)


@pytest.mark.smollm2
def test_a_pipeline_goes_on_with_a_chat(pipe: Any) -> None:
    cache = CompressedCache(pipe.model, "h2o:budget=200")
    chat = [{"role": "user", "content": "Name two colours."}]
    for question in ("And a third one?", "Why?"):
        chat = pipe(chat, **{CACHE: cache}, **GREEDY)[0]["generated_text"]
        assert chat == pipe(chat[:-1], **GREEDY)[0]["generated_text"]
        chat = [*chat, {"role": "user", "content": question}]


@pytest.mark.smollm2
def test_fault_01_a_pipeline_that_pads_on_the_right_is_refused(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe.tokenizer, "padding_side", "right")
    cache = CompressedCache(pipe.model, "h2o:budget=200")
    with pytest.raises(KvwinnowError, match=r"padding_side = 'left'"):
        pipe(PROMPTS, batch_size=3, **{CACHE: cache}, **GREEDY)


@pytest.mark.smollm2
def test_a_stop_string_ends_the_text(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer([PROMPTS[0]], return_tensors="pt")
    options = {"stop_strings": ["Paris"], "tokenizer": tokenizer, **GREEDY}
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **{CACHE: CompressedCache(model, "h2o:budget=200")}, **options)
    assert ours.tolist() == plain.tolist()
    assert tokenizer.decode(ours[0]).endswith("Paris")
