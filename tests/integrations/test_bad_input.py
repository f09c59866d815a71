"""Every bad input gets one sentence that names the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvwinnow import H2O, CompressedCache, Full, KvwinnowError, SnapKV, StreamingLLM
from kvwinnow.errors import CacheStateError, CodecError, PolicyError, UnsupportedModelError, UnsupportedSetupError
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, logits, text


def check(error: pytest.ExceptionInfo[KvwinnowError], kind: type[KvwinnowError], *words: str) -> None:
    """One sentence of that kind, with all the words in it."""
    message = str(error.value)
    assert isinstance(error.value, ValueError)
    assert type(error.value) is kind
    assert "\n" not in message
    assert ". " not in message
    for word in words:
        assert word in message


# -- policies ---------------------------------------------------------------------------------------------------------

POLICIES: list[tuple[Any, tuple[str, ...]]] = [
    ("snapvk:budget=64", ("'snapvk'", "snapkv", "h2o")),
    ("snapkv:budgte=64", ("'budgte'", "budget", "window")),
    ("snapkv:budget", ("'budget'", "budget=VALUE")),
    ("snapkv:", ("'snapkv:'", "snapkv:parameter=value")),
    ("h2o:budget=64,budget=32", ("64", "32", "once")),
    ("full:budget=64", ("'budget'", "none")),
    ("h2o:budget=0", ("budget=0", "1 or more")),
    ("h2o:budget=-5", ("budget=-5", "1 or more")),
    ("h2o:budget=1.5", ("budget=1.5", "(0, 1]", "whole number")),
    ("h2o:budget=0.0", ("budget=0.0", "(0, 1]")),
    ("h2o:budget=nan", ("budget=nan", "(0, 1]")),
    ("h2o:budget=true", ("budget=True", "0.125", "64MiB")),
    ("h2o:budget=64XB", ("'64XB'", "MiB")),
    ("h2o:budget=0MiB", ("'0MiB'", "1B")),
    ("snapkv:budget=20", ("budget=20", "36", "raise the budget")),
    ("streamingllm:budget=4", ("budget=4", "5")),
    ("h2o:budget=10,sinks=4,recent=8", ("budget=10", "12")),
    ("h2o:evict_every=0", ("evict_every=0", "1 or more")),
    ("h2o:recent=-1", ("recent=-1", "0 or more")),
    ("snapkv:kernel=4", ("kernel=4", "3 or 5")),
    ("snapkv:pool=mean", ("'mean'", "max or avg")),
    ("hybrid:heavy_ratio=1.5", ("heavy_ratio=1.5", "[0, 1]")),
    (1024, ("1024", "int", "SnapKV(budget=1024)")),
    (Full, ("type", "SnapKV(budget=1024)")),
]


@pytest.mark.parametrize(("policy", "words"), POLICIES, ids=[str(policy) for policy, _ in POLICIES])
def test_a_policy_that_cannot_be_obeyed(policy: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(KvwinnowError) as error:
        CompressedCache(tiny_model(), policy)
    check(error, PolicyError, *words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SnapKV(budget=10), ("budget=10", "36")),
        (lambda: StreamingLLM(sinks=8, budget=8), ("budget=8", "9")),
        (lambda: H2O(budget=[1]), ("budget=[1]", "list")),  # type: ignore[arg-type]
        (lambda: H2O(budget=8, recent=2.5), ("recent=2.5", "whole number")),  # type: ignore[arg-type]
        (lambda: SnapKV(window=True), ("window=True", "whole number")),
    ],
)
def test_a_policy_object_that_cannot_be_obeyed(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(KvwinnowError) as error:
        make()
    check(error, PolicyError, *words)


# -- dtypes -----------------------------------------------------------------------------------------------------------

DTYPES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"dtype": "int3"}, ("'int3'", "int4", "int8")),
    ({"dtype": torch.int8}, ("torch.int8", "bf16")),
    ({"dtype": 4}, ("4", "int", "int4")),
    ({"k_dtype": "int4:group=5"}, ("group=5", "16")),
    ({"v_dtype": "int8:group=24"}, ("group=24", "16")),
    ({"dtype": "int4:group=0"}, ("group=0", "2 or more")),
    ({"dtype": "int4:grp=8"}, ("'grp'", "group")),
    ({"dtype": "int4:rotate=maybe"}, ("'maybe'", "true or false")),
    ({"dtype": "int4", "k_dtype": "int8"}, ("'int4'", "'int8'", "k_dtype and v_dtype")),
    ({"dtype": "int8", "v_dtype": "int4"}, ("'int8'", "'int4'", "k_dtype and v_dtype")),
]


@pytest.mark.parametrize(("given", "words"), DTYPES, ids=[str(given) for given, _ in DTYPES])
def test_a_dtype_that_cannot_store(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(KvwinnowError) as error:
        CompressedCache(tiny_model(), "full", **given)
    check(error, CodecError, *words)


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_window_as_wide_as_the_trained_length_hides_nothing() -> None:
    model = tiny_model("mistral", trained=128, sliding_window=128)
    ids, _ = tiny_tokens(100)
    assert text(model, ids, cache=CompressedCache(model, "full")) == text(model, ids)


@pytest.mark.parametrize("model", [None, "meta-llama/Llama-3.2-1B", torch.nn.Linear(2, 2)], ids=repr)
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(KvwinnowError) as error:
        CompressedCache(model, "full")
    check(error, UnsupportedModelError, type(model).__name__, "AutoModelForCausalLM.from_pretrained")


# -- calls ------------------------------------------------------------------------------------------------------------

Call = Callable[[PreTrainedModel, CompressedCache], object]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


def ids_of(length: int, rows: int = 1) -> torch.Tensor:
    return tiny_tokens(*[length] * rows)[0]


def fed(cache: CompressedCache, model: PreTrainedModel, declared: Any, length: int, rows: int = 1) -> None:
    with cache.prompt(length=declared):
        logits(model, ids_of(length, rows), cache)


def fed_nothing(cache: CompressedCache) -> None:
    with cache.prompt(length=3):
        pass


def nested(cache: CompressedCache) -> None:
    with cache.prompt(length=10), cache.prompt(length=3):
        pass


def reordered_inside(cache: CompressedCache) -> None:
    with cache.prompt(length=10):
        cache.reorder_cache(torch.tensor([0]))


FRESH: dict[str, tuple[Call, type[KvwinnowError], tuple[str, ...]]] = {
    "four-dimensional mask": (
        lambda model, cache: logits(model, ids_of(9), cache, attention_mask=ones(1, 1, 9, 9)),
        KvwinnowError,
        ("4-dimensional", "2-dimensional"),
    ),
    "mask that is a list": (
        lambda model, cache: logits(model, ids_of(3), cache, attention_mask=[[1, 1, 1]]),
        KvwinnowError,
        ("list", "2-dimensional"),
    ),
    "right padding": (
        lambda model, cache: logits(model, ids_of(4), cache, attention_mask=torch.tensor([[1, 1, 1, 0]])),
        KvwinnowError,
        ("hides tokens after", "padding_side = 'left'"),
    ),
    "hole in the mask": (
        lambda model, cache: logits(model, ids_of(4), cache, attention_mask=torch.tensor([[1, 0, 1, 1]])),
        KvwinnowError,
        ("hides tokens after", "left"),
    ),
    "mask too short": (
        lambda model, cache: logits(model, ids_of(9), cache, attention_mask=ones(1, 8)),
        KvwinnowError,
        ("(1, 8)", "(1, 9)"),
    ),
    "mask of other rows": (
        lambda model, cache: logits(model, ids_of(9), cache, attention_mask=ones(2, 9)),
        KvwinnowError,
        ("(2, 9)", "(1, 9)"),
    ),
    "prompt longer than trained": (
        lambda model, cache: logits(model, ids_of(513), cache),
        KvwinnowError,
        ("513", "512", "shorten"),
    ),
    "declared prompt longer than trained": (
        lambda model, cache: fed(cache, model, 600, 9),
        KvwinnowError,
        ("600", "512", "shorten"),
    ),
    "share of undeclared chunks": (
        lambda model, cache: [logits(model, ids_of(20), cache) for _ in range(2)],
        PolicyError,
        ("budget=0.5", "cache.prompt(length=n)", "tokens"),
    ),
    "fewer tokens than declared": (
        lambda model, cache: fed(cache, model, 10, 9),
        KvwinnowError,
        ("length=10", " 9 tokens were fed"),
    ),
    "more tokens than declared": (
        lambda model, cache: fed(cache, model, 10, 12),
        KvwinnowError,
        ("length=10", " 12 tokens were fed"),
    ),
    "a prompt inside another": (lambda model, cache: nested(cache), CacheStateError, ("(10,)", "`with` block")),
    "declared prompt of which nothing is fed": (
        lambda model, cache: fed_nothing(cache),
        KvwinnowError,
        ("length=3", " 0 tokens were fed"),
    ),
    "lengths for other rows": (
        lambda model, cache: fed(cache, model, [9, 9], 9, rows=3),
        KvwinnowError,
        ("[9, 9]", "2 lengths", "3 rows"),
    ),
    "length of no tokens": (lambda model, cache: fed(cache, model, 0, 9), KvwinnowError, ("length=0", "1 or more")),
    "length that is a float": (lambda model, cache: fed(cache, model, 9.0, 9), KvwinnowError, ("9.0", "tokens")),
    "length that is None": (lambda model, cache: fed(cache, model, None, 9), KvwinnowError, ("None", "tokens")),
    "length that is empty": (lambda model, cache: fed(cache, model, [], 9), KvwinnowError, ("[]", "tokens")),
    "output_attentions": (
        lambda model, cache: logits(model, ids_of(9), cache, output_attentions=True),
        KvwinnowError,
        ("output_attentions=True", "leave it out"),
    ),
    "training mode": (
        lambda model, cache: logits(model.train(), ids_of(9), cache),
        KvwinnowError,
        ("training mode", "model.eval()"),
    ),
    "no input": (lambda model, cache: model(**{CACHE: cache}), KvwinnowError, ("input_ids", "inputs_embeds")),
    "no token": (lambda model, cache: logits(model, ids_of(0), cache), KvwinnowError, ("no new token", "at least one")),
    "ids of one dimension": (
        lambda model, cache: logits(model, torch.arange(5), cache),
        KvwinnowError,
        ("(5,)", "(rows, tokens)", "unsqueeze(0)"),
    ),
    "layer out of range": (lambda model, cache: cache.positions(2), CacheStateError, ("layer 2", "0 to 1")),
    "layer far below": (lambda model, cache: cache.positions(-3), CacheStateError, ("layer -3", "0 to 1")),
    "positions with a gap": (
        lambda model, cache: logits(model, ids_of(3), cache, position_ids=torch.tensor([[0, 2, 3]])),
        KvwinnowError,
        ("position_ids", "by one", "leave them out"),
    ),
    "rows reordered inside a prompt": (
        lambda model, cache: reordered_inside(cache),
        CacheStateError,
        ("reorder_cache", "half fed"),
    ),
    "prefill chunks of no token": (
        lambda model, cache: text(model, ids_of(9), cache=cache, prefill_chunk_size=0),
        KvwinnowError,
        ("prefill_chunk_size=0", "1 token or more"),
    ),
    "a cache of generate's own": (
        lambda model, cache: text(model, ids_of(9), cache=cache, cache_implementation="static"),
        KvwinnowError,
        ("'static'", "leave one of them out"),
    ),
    "a paged cache": (
        lambda model, cache: text(model, ids_of(9), cache=cache, cache_implementation="paged"),
        KvwinnowError,
        ("'paged'", "leave one of them out"),
    ),
    "a foreign loop": (
        lambda model, cache: text(model, ids_of(9), cache=cache, custom_generate="transformers-community/dola"),
        KvwinnowError,
        ("'transformers-community/dola'", "leave it out"),
    ),
    "prompt lookup": (
        lambda model, cache: text(model, ids_of(9), cache=cache, prompt_lookup_num_tokens=2),
        KvwinnowError,
        ("assisted generation", "beam search"),
    ),
    "contrastive search": (
        lambda model, cache: text(model, ids_of(9), cache=cache, penalty_alpha=0.6, top_k=4),
        KvwinnowError,
        ("contrastive search", "beam search"),
    ),
}


@pytest.mark.parametrize("what", FRESH)
def test_a_call_that_a_fresh_cache_cannot_serve(what: str) -> None:
    call, kind, words = FRESH[what]
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=0.5")
    with pytest.raises(KvwinnowError) as error:
        call(model, cache)
    check(error, kind, *words)


def test_one_length_for_a_padded_batch() -> None:
    model = tiny_model()
    ids, mask = tiny_tokens(9, 4)
    cache = CompressedCache(model, "h2o:budget=0.5")
    with pytest.raises(KvwinnowError) as error, cache.prompt(length=9):
        logits(model, ids, cache, attention_mask=mask)
    check(error, KvwinnowError, "length=9", "one length per row")


@pytest.mark.parametrize(("size", "rows"), [("10B", 1), ("2KiB", 2)])
def test_bytes_that_hold_too_few_tokens(size: str, rows: int) -> None:
    model = tiny_model()
    cache = CompressedCache(model, f"hybrid:budget={size}")
    with pytest.raises(KvwinnowError) as error:
        logits(model, ids_of(50, rows), cache)
    check(error, PolicyError, repr(size), "5 tokens", f"{cache.budgets.nbytes(5, rows):,}", f"{rows} row", "at least")


USED: dict[str, tuple[Call, tuple[str, ...]]] = {
    "another batch": (lambda model, cache: logits(model, ids_of(4, 3), cache), ("1 rows", "3", "cache.reset()")),
    "mask of the new tokens alone": (
        lambda model, cache: logits(model, ids_of(4), cache, attention_mask=ones(1, 4)),
        ("(1, 4)", "30", "(1, 34)"),
    ),
    "another prompt": (
        lambda model, cache: text(model, tiny_tokens(40, seed=3)[0], cache=cache),
        ("30", "40", "cache.reset()"),
    ),
    "the same prompt again": (lambda model, cache: text(model, ids_of(30), cache=cache), ("30", "cache.reset()")),
    "the new tokens alone": (
        lambda model, cache: text(model, ids_of(4), cache=cache),
        ("30", "4", "whole conversation"),
    ),
    "another batch to generate": (
        lambda model, cache: text(model, ids_of(40, 2), cache=cache),
        ("row 1 ", "1 row(s)", "cache.reset()"),
    ),
    "positions of another prompt": (
        lambda model, cache: logits(model, ids_of(4), cache, position_ids=torch.arange(4).unsqueeze(0)),
        ("begin at 0", "30", "cache.reset()"),
    ),
    "a step at a position of another prompt": (
        lambda model, cache: logits(model, ids_of(1), cache, position_ids=torch.tensor([[29]])),
        ("begin at 29", "30", "cache.reset()"),
    ),
    "a turn beyond the trained length": (lambda model, cache: logits(model, ids_of(500), cache), ("530", "512")),
    "tokens taken back": (lambda model, cache: cache.crop(3), ("crop", "greedy")),
    "rows that are not there": (
        lambda model, cache: cache.reorder_cache(torch.tensor([0, 1])),
        ("[0, 1]", "rows 0 to 0"),
    ),
    "rows counted from the end": (
        lambda model, cache: cache.batch_select_indices(torch.tensor([-1])),
        ("[-1]", "rows 0 to 0"),
    ),
    "no row picked": (
        lambda model, cache: cache.batch_select_indices(torch.tensor([False])),
        ("[]", "one or more"),
    ),
    "rows that are no numbers": (lambda model, cache: cache.batch_select_indices(["a"]), ("rows 0 to",)),
    "no rows to reorder by": (lambda model, cache: cache.reorder_cache(None), ("rows None",)),
    "rows of two dimensions": (lambda model, cache: cache.reorder_cache(torch.tensor([[0]])), ("one-dimensional",)),
    "rows repeated no times": (lambda model, cache: cache.batch_repeat_interleave(0), ("repeats=0", "1 or more")),
}


@pytest.mark.parametrize("what", USED)
def test_a_call_that_a_used_cache_cannot_serve_leaves_it_as_it_was(what: str) -> None:
    call, words = USED[what]
    model = tiny_model()
    cache, beside = CompressedCache(model, "h2o:budget=12"), CompressedCache(model, "h2o:budget=12")
    for one in (cache, beside):
        logits(model, ids_of(30), one)
    with pytest.raises(KvwinnowError) as error:
        call(model, cache)
    check(error, type(error.value), *words)
    new = tiny_tokens(1, seed=5)[0]
    assert torch.equal(logits(model, new, cache), logits(model, new, beside))


def test_the_name_of_our_attention_is_not_for_setting_by_hand() -> None:
    model = tiny_model()
    model.config._attn_implementation = "kvwinnow"
    with pytest.raises(KvwinnowError) as error:
        logits(model, ids_of(5))
    check(error, CacheStateError, "'kvwinnow'", "give a CompressedCache")


def test_generation_beyond_the_trained_length_warns_once() -> None:
    model = tiny_model(trained=32)
    cache = CompressedCache(model, "h2o:budget=12")
    with pytest.warns(UserWarning, match="32 tokens") as caught:
        text(model, ids_of(30), cache=cache)
    assert len([warning for warning in caught if "trained" in str(warning.message)]) == 1


# -- the environment --------------------------------------------------------------------------------------------------


def test_instructions_that_are_no_level_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setenv("KVWINNOW_CPU_LEVEL", "fast")
    with pytest.raises(KvwinnowError) as error:
        CompressedCache(model, "full")
    check(error, UnsupportedSetupError, "KVWINNOW_CPU_LEVEL='fast'", "portable, avx2, avx512, amx, or off")
