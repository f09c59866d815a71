"""What is recorded is what the model's own eager attention says, for every kind of attention that is served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvwinnow import CompressedCache
from kvwinnow.errors import KvwinnowError, TraceError
from kvwinnow.integrations.transformers.structure import inspect_model
from kvwinnow.policies import Full
from kvwinnow.simulation import record as recording
from kvwinnow.simulation.record import prompt_steps, record
from kvwinnow.simulation.token_texts import token_texts
from tests.cli.conftest import byte_tokenizer
from tests.models import shown, tiny_model, tiny_tokens
from tests.running import logits, text

RECORDED = ["llama", "qwen3", "gpt_neox", "gpt2", "gpt2, scaled by layer", "falcon", "gemma2", "gemma3", "gpt_oss"]


def eager_weights(kind: str, ids: torch.Tensor) -> list[np.ndarray]:
    """(Hq, n, n) weights of every layer, as transformers' own eager attention gives them."""
    model: Any = tiny_model(kind, layers=4, attn_implementation="eager")
    with torch.no_grad():
        return [weights[0].double().numpy() for weights in model(ids, output_attentions=True).attentions]


@pytest.mark.parametrize("kind", RECORDED, ids=shown)
def test_sums_are_those_of_the_models_own_attention(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    ids, _ = tiny_tokens(77)
    trace = record(model, ids, new_tokens=5, vectors=True)
    assert trace.model is not None
    assert trace.vectors is not None
    assert len(trace.tokens) == 82
    assert trace.prompt == 77

    generated = text(model, ids, tokens=5)[0]
    assert [int(token) for token in trace.tokens] == [*ids[0].tolist(), *generated]
    whole = torch.tensor([[int(token) for token in trace.tokens]])
    weights = eager_weights(kind, whole)
    group = trace.model.heads // trace.model.kv_heads
    for number, layer in enumerate(trace.layers):
        heads = weights[layer]
        mean = heads.reshape(-1, group, *heads.shape[1:]).mean(1)
        for step, (first, last) in enumerate(trace.steps):
            np.testing.assert_allclose(trace.mass[step, number], mean[:, first:last].sum(1), atol=2e-5)
        for decoded in range(5):
            np.testing.assert_allclose(trace.vectors.head_mass[decoded, number], heads[:, 77 + decoded], atol=2e-5)


def test_layers_with_a_window_are_left_out() -> None:
    trace = record(tiny_model("gemma3", layers=4), tiny_tokens(30)[0], new_tokens=1)
    assert trace.layers == (1, 3)
    assert trace.mass.shape[1] == 2
    assert trace.model is not None
    assert trace.model.windows == (12, None, 12, None)


def test_a_model_of_windows_alone_is_refused() -> None:
    with pytest.raises(TraceError, match="latest 12 tokens only"):
        record(tiny_model("mistral, sliding"), tiny_tokens(30)[0])


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (1, [(0, 1)]),
        (2, [(0, 1), (1, 2)]),
        (5, [(0, 1), (1, 3), (3, 4), (4, 5)]),
        (8, [(0, 4), (4, 6), (6, 7), (7, 8)]),
    ],
)
def test_steps_end_where_windows_of_powers_of_two_begin(prompt: int, steps: list[tuple[int, int]]) -> None:
    assert prompt_steps(prompt) == steps


@pytest.mark.parametrize("length", [1, 2, 3, 33])
def test_short_prompts_are_recorded_too(length: int) -> None:
    trace = record(tiny_model(), tiny_tokens(length)[0], new_tokens=2, vectors=True)
    assert trace.steps.tolist() == [list(step) for step in prompt_steps(length)] + [
        [length, length + 1],
        [length + 1, length + 2],
    ]
    np.testing.assert_allclose(trace.mass.sum(3)[:, 0, 0], np.diff(trace.steps, axis=1)[:, 0], rtol=1e-5)


def test_keys_values_and_norms_are_the_models() -> None:
    model = tiny_model("llama, llama3 rope")
    ids, _ = tiny_tokens(50)
    trace = record(model, ids, new_tokens=0, vectors=True)
    cache = CompressedCache(model, Full())
    logits(model, ids, cache)
    vectors = trace.vectors
    assert vectors is not None
    assert trace.key_norm is not None
    for layer in range(2):
        slots = cache._layers()[layer].slots
        assert slots is not None
        keys, values = slots.keys.unstored()[0, :, :50], slots.values.unstored()[0, :, :50]
        np.testing.assert_allclose(vectors.keys[layer], keys.numpy(), atol=1e-5)
        np.testing.assert_allclose(vectors.values[layer], values.numpy(), atol=1e-5)
        np.testing.assert_allclose(trace.key_norm[layer], keys.norm(dim=-1).numpy(), rtol=1e-4)


def test_moments_are_those_that_the_cache_takes() -> None:
    model = tiny_model("llama, yarn rope")
    ids, _ = tiny_tokens(40)
    trace = record(model, ids, new_tokens=0, vectors=True)
    cache = CompressedCache(model, f"expectedattention:budget=24,sinks={recording.LEAD}")
    logits(model, ids, cache)
    facts = trace.vectors and trace.vectors.queries
    assert facts is not None
    assert facts.count == 40 - recording.LEAD
    assert facts.lead.shape == (2, 4, recording.LEAD, 16)
    for layer in range(2):
        moments = cache._layers()[layer].moments
        assert moments is not None
        np.testing.assert_allclose(facts.mean[layer], moments.mean[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(facts.products[layer], moments.products[0].numpy(), rtol=1e-3, atol=1e-3)


def test_the_answer_ends_with_its_end_token() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(20)
    third = text(model, ids, tokens=8)[0][2]
    model.generation_config.eos_token_id = third
    trace = record(model, ids, new_tokens=8)
    assert len(trace.tokens) <= 23
    assert int(trace.tokens[-1]) == third
    assert trace.steps[-1].tolist() == [len(trace.tokens) - 1, len(trace.tokens)]


def test_recording_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(20)
    before = text(model, ids)
    record(model, ids, new_tokens=3, vectors=True)
    assert text(model, ids) == before


def test_what_cannot_be_recorded_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(TraceError, match="one row"):
        record(model, tiny_tokens(8, 8)[0])
    with pytest.raises(TraceError, match="new_tokens=-1"):
        record(model, tiny_tokens(8)[0], new_tokens=-1)
    with pytest.raises(KvwinnowError, match="embedding table"):
        record(model, torch.tensor([[5000]]))


def test_the_estimate_is_what_a_trace_takes() -> None:
    model = tiny_model("gemma3", layers=4)
    for vectors in (False, True):
        trace = record(model, tiny_tokens(60)[0], new_tokens=4, vectors=vectors)
        arrays = [trace.mass, trace.key_norm]
        if trace.vectors is not None:
            arrays += [trace.vectors.keys, trace.vectors.values, trace.vectors.head_mass]
            facts = trace.vectors.queries
            assert facts is not None
            arrays += [facts.lead, facts.mean, facts.products]
        told, _ = recording.nbytes(inspect_model(model), 60, 4, itemsize=4, vectors=vectors)
        assert told == sum(array.nbytes for array in arrays if array is not None)


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    record(tiny_model(), tiny_tokens(9)[0], new_tokens=2, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 11), (5, 11), (7, 11), (8, 11), (9, 11), (10, 11), (11, 11)]


def test_texts_of_tokens_add_up_to_the_text() -> None:
    tokenizer = byte_tokenizer()
    said = "Größe: 5 €, 日本 🙂 end"
    texts = token_texts(tokenizer, tokenizer(said)["input_ids"])
    assert "".join(texts) == said
    assert texts[:2] == ("G", "r")
    assert texts[2:4] == ("", "ö")  # two bytes, two tokens


def test_bytes_that_are_no_character_are_shown_as_such() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("a€b")["input_ids"]
    texts = token_texts(tokenizer, [ids[0], ids[1], ids[4]])  # the first of three bytes alone
    assert len(texts) == 3
    assert "".join(texts).startswith("a")
    assert "".join(texts).endswith("b")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_small_models_take_two_bytes(dtype: torch.dtype) -> None:
    trace = record(tiny_model().to(dtype), tiny_tokens(12)[0], new_tokens=1, vectors=True)
    assert trace.vectors is not None
    assert trace.vectors.keys.dtype == np.float16
    assert trace.model is not None
    assert trace.model.itemsize == 2


def test_a_trace_knows_its_model() -> None:
    trace = record(tiny_model(kv_heads=2), tiny_tokens(8)[0], new_tokens=0, name="tiny")
    assert trace.model is not None
    assert (trace.model.name, trace.model.heads, trace.model.kv_heads, trace.model.dim) == ("tiny", 4, 2, 16)


def test_a_long_step_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = tiny_model(), tiny_tokens(60)
    whole = record(model, ids, new_tokens=2, vectors=True)
    monkeypatch.setattr(recording, "PIECE", 7)
    told: list[int] = []
    pieces = record(model, ids, new_tokens=2, vectors=True, progress=lambda done, total: told.append(done))
    assert told[:5] == [7, 14, 21, 28, 35]
    np.testing.assert_array_equal(pieces.steps, whole.steps)
    np.testing.assert_allclose(pieces.mass, whole.mass, atol=2e-5)
    assert whole.vectors is not None
    assert pieces.vectors is not None
    assert whole.vectors.queries is not None
    assert pieces.vectors.queries is not None
    assert pieces.vectors.queries.count == whole.vectors.queries.count == 60 - recording.LEAD
    np.testing.assert_allclose(pieces.vectors.queries.lead, whole.vectors.queries.lead, atol=1e-4)
    np.testing.assert_allclose(pieces.vectors.queries.mean, whole.vectors.queries.mean, atol=1e-4)
    np.testing.assert_allclose(pieces.vectors.head_mass, whole.vectors.head_mass, atol=2e-5)
