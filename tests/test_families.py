"""Every family of models: its own attention, with what the cache evicts hidden, is what the cache computes.

Each family runs its real forward on a tiny random model. docs/models.md is made from what this file tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvwinnow import CompressedCache, KvwinnowError
from tests.models import IMAGE, KINDS, PLAIN, shown, tiny_model, tiny_tokens
from tests.running import CACHE, counts, held, logits, text
from tests.test_oracle_models import check_against_masks, extended, greedy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:all layers of this model see the latest:UserWarning"),
]

EVICTING = ("h2o:budget=10,sinks=2,recent=3,evict_every=3", "snapkv:budget=12,window=4,kernel=3,sinks=2")
OTHERS = [kind for kind in KINDS if kind not in PLAIN]
EVERY = pytest.mark.parametrize("kind", KINDS, ids=shown)


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("kind", OTHERS, ids=shown)
def test_after_eviction_a_family_says_what_it_says_under_masks(kind: str, policy: str) -> None:
    check_against_masks(tiny_model(kind), policy, 31, 19, 6)


@pytest.mark.parametrize("policy", ["full", "h2o:budget=100"])
@pytest.mark.parametrize("kind", OTHERS, ids=shown)
def test_a_budget_for_everything_gives_the_uncompressed_tokens(kind: str, policy: str) -> None:
    model = tiny_model(kind)
    ids, mask = tiny_tokens(30, 17, 1, seed=5)
    expected = greedy(model, ids, mask, 20)
    actual = greedy(model, ids, mask, 20, **{CACHE: CompressedCache(model, policy)})
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", OTHERS, ids=shown)
def test_a_prompt_in_chunks_gives_the_uncompressed_tokens(kind: str) -> None:
    model, lengths = tiny_model(kind), (30, 17, 4)
    ids, mask = tiny_tokens(*lengths, seed=6)
    cache = CompressedCache(model, "h2o:budget=100")
    with cache.prompt(length=lengths), torch.no_grad():
        for begin, end in ((0, 11), (11, 12), (12, 27), (27, 30)):
            seen = mask[:, :end]
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, begin:]
            out = model(ids[:, begin:end], attention_mask=seen, position_ids=places, **{CACHE: cache})
    begun = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    actual = greedy(model, begun, extended(mask, 31), 15, **{CACHE: cache})
    assert torch.equal(actual.sequences, greedy(model, ids, mask, 16).sequences)


@EVERY
def test_a_padded_row_says_what_it_says_alone(kind: str) -> None:
    model, lengths = tiny_model(kind), (34, 21, 5)
    ids, mask = tiny_tokens(*lengths, seed=7)
    policy = "h2o:budget=10,sinks=1"
    together = text(model, ids, mask, CompressedCache(model, policy))
    for row, length in enumerate(lengths):
        alone = CompressedCache(model, policy)
        assert together[row] == text(model, ids[row : row + 1, -length:], cache=alone)[0]


@EVERY
def test_every_codec_works(kind: str) -> None:
    """What the first layer attends to in decode is about what it attends to uncompressed, as near as the codec is."""
    model = tiny_model(kind, dim=32)
    ids, mask = tiny_tokens(40, 33, seed=8)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    said: list[torch.Tensor] = []
    layer = model.get_submodule(CompressedCache(model, "full").structure.names[0])
    hook = layer.register_forward_hook(lambda module, args, out: said.append(out[0][:, -1]))
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=places)
        for dtype, loss in (("fp32", 1e-5), ("bf16", 0.01), ("int8", 0.02), ("int4", 0.25)):
            cache = CompressedCache(model, "full", dtype=dtype)
            model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=places[:, :-1], **{CACHE: cache})
            model(ids[:, -1:], attention_mask=mask, position_ids=places[:, -1:], **{CACHE: cache})
            assert (said[-1] - said[0]).norm() <= loss * said[0].norm(), dtype
    hook.remove()


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "falcon, new", "phi3, sliding"], ids=shown)
def test_a_bfloat16_model_is_as_near_to_its_float32_self_as_without_the_cache(kind: str) -> None:
    model, half = tiny_model(kind, trained=700), tiny_model(kind, trained=700).to(torch.bfloat16)
    ids, _ = tiny_tokens(600, seed=10)  # more than one block of a sliding prompt
    with torch.no_grad():
        exact, plain = model(ids).logits, half(ids).logits.float()
        ours = half(ids, **{CACHE: CompressedCache(half, "full")}).logits.float()
    assert (ours - exact).norm() <= 1.2 * (plain - exact).norm()


@EVERY
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_bytes_are_those_predicted(kind: str, dtype: str) -> None:
    model = tiny_model(kind, dim=32)
    ids, mask = tiny_tokens(60, 50, seed=9)
    cache = CompressedCache(model, "snapkv:budget=40,window=8", dtype=dtype)
    assert text(model, ids, mask, cache, tokens=1)
    assert cache.nbytes() == cache.budgets.nbytes(40, batch=2)
    kept: Any = [{int(n) for n in (cache.positions(layer) >= 0).sum(-1).flatten()} for layer in range(len(cache))]
    assert kept == [{40 if window is None else window - 1} for window in cache.structure.sliding]


# -- vision-language models -------------------------------------------------------------------------------------------


def pictured(rows: int = 2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids of rows with one image of 2 x 2 merged patches each, and what else the model is given."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(2, 200, (rows, 20), generator=generator)
    image = torch.tensor([IMAGE + 2, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE + 3]).expand(rows, -1)
    ids = torch.cat([words[:, :7], image, words[:, 7:]], 1)
    patches = torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 4, 4]]).expand(rows, -1)
    return ids, {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}


def test_a_prompt_with_an_image_gives_the_uncompressed_tokens() -> None:
    model = tiny_model("qwen2_5_vl")
    ids, given = pictured()
    expected = text(model, ids, **given)
    without = text(model, ids[:, torch.arange(26) < 7])
    assert expected != without
    for policy in ("full", "snapkv:budget=100"):
        assert text(model, ids, cache=CompressedCache(model, policy), **given) == expected


def test_a_prompt_with_an_image_is_cut_to_its_budget() -> None:
    model = tiny_model("qwen2_5_vl")
    ids, given = pictured()
    cache = CompressedCache(model, "h2o:budget=12", dtype="int8")
    assert len(text(model, ids, cache=cache, **given)[0]) == 12
    assert counts(cache) == {12}
    row = [{**given, "pixel_values": given["pixel_values"][16 * i : 16 * i + 16]} for i in range(2)]
    alone = CompressedCache(model, "h2o:budget=12", dtype="int8")
    one = {name: value if name == "pixel_values" else value[:1] for name, value in row[0].items()}
    text(model, ids[:1], cache=alone, **one)
    assert held(cache, 1, 0) == held(alone, 1, 0)


def test_an_image_keeps_its_positions_whatever_the_model_reads_in_between(tmp_path: Path) -> None:
    model = tiny_model("qwen2_5_vl")
    ids, given = pictured()
    cache = CompressedCache(model, "full")
    text(model, ids, cache=cache, tokens=1, **given)
    asked = torch.cat([ids, ids[:, :5]], 1)
    expected = text(tiny_model("qwen2_5_vl"), asked, **{**given, "mm_token_type_ids": (asked == IMAGE).long()})
    text(model, tiny_tokens(30)[0])
    cache.save(tmp_path / "x")
    other = tiny_model("qwen2_5_vl")
    loaded = CompressedCache.load(tmp_path / "x", other)
    assert text(model, asked, cache=cache.fork()) == text(other, asked, cache=loaded) == expected
    one = cache.fork()
    one.batch_select_indices(torch.tensor([1]))
    text(model, tiny_tokens(30, 30, 30)[0])
    assert text(model, asked[1:], cache=one) == expected[1:]
    text(model, tiny_tokens(30)[0])
    plain = tiny_model("qwen2_5_vl")
    whole = logits(plain, asked, **{**given, "mm_token_type_ids": (asked == IMAGE).long()})[:, -1]
    torch.testing.assert_close(logits(model, ids[:, :5], cache)[:, -1], whole, atol=1e-4, rtol=1e-4)


# -- RoPE whose frequencies change with the length --------------------------------------------------------------------

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0],
        "original_max_position_embeddings": 40,
        "factor": 4.0,
    },
    "original_max_position_embeddings": 40,
}


def test_dynamic_rope_changes_with_the_length_as_it_does_uncompressed() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    for length in (20, 40):  # before the trained length, which generation crosses, and beyond it
        ids, mask = tiny_tokens(length, 11)
        # The module that rotates remembers the longest text it has seen, so each run takes a model of its own.
        fresh, other = (tiny_model(trained=32, rope_parameters=scaling) for _ in range(2))
        expected = greedy(fresh, ids, mask, 30)
        actual = greedy(other, ids, mask, 30, **{CACHE: CompressedCache(other, "h2o:budget=200")})
        assert torch.equal(actual.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [20, 60])
def test_longrope_on_either_side_of_its_switch(length: int) -> None:
    model = tiny_model("phi3", trained=160, **LONGROPE)
    ids, mask = tiny_tokens(length, 11)
    cache = CompressedCache(model, "h2o:budget=200")
    assert text(model, ids, mask, cache) == text(model, ids, mask)


def test_longrope_is_refused_where_generate_would_throw_the_cache_away() -> None:
    model = tiny_model("phi3", trained=160, **LONGROPE)
    ids, mask = tiny_tokens(35, 11)
    with pytest.raises(KvwinnowError, match="after 40 tokens this model's generate throws its cache away"):
        text(model, ids, mask, CompressedCache(model, "full"), tokens=10)
