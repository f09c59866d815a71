"""The proof with a real model: ten questions to one digested document of 6,000 tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvwinnow import CompressedCache
from kvwinnow.evaluation.document import help_chapters, paragraphs
from tests.running import logits, text

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

QUESTIONS = [
    "What is an object?",
    "What does import do?",
    "Which types are mutable?",
    "What is a metaclass?",
    "When is an object deleted?",
    "What is a namespace?",
    "What does __slots__ do?",
    "What is a generator?",
    "How are names bound?",
    "What is a descriptor?",
]


def document(tokenizer: Any, tokens: int) -> Tensor:
    ids: Tensor = tokenizer("\n\n".join(paragraphs(help_chapters())), return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens
    return ids


def questions(tokenizer: Any, ids: Tensor) -> list[Tensor]:
    """The document and each question."""
    ends = [tokenizer(f"\n\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids for question in QUESTIONS]
    return [torch.cat([ids, end], 1) for end in ends]


@pytest.mark.parametrize(
    ("policy", "dtype", "tokens", "asked"),
    [("snapkv:budget=0.125", "fp32", 6000, 10), ("snapkv:budget=0.25", "int4", 1000, 3), ("full", "fp4", 600, 2)],
)
def test_questions_to_one_document_are_answered_as_from_the_original_cache(
    policy: str, dtype: str, tokens: int, asked: int, smollm2: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = smollm2
    ids = document(tokenizer, tokens)
    cache = CompressedCache(model, policy, dtype=dtype)
    logits(model, ids, cache, logits_to_keep=1)
    before = cache.nbytes()
    cache.save(tmp_path / "document.safetensors")
    loaded = CompressedCache.load(tmp_path / "document.safetensors", model)
    answers = []
    for prompt in questions(tokenizer, ids)[:asked]:
        answers.append(text(model, prompt, cache=copy.deepcopy(cache), tokens=5))
        assert text(model, prompt, cache=cache.fork(), tokens=5) == answers[-1]
        assert text(model, prompt, cache=loaded.fork(), tokens=5) == answers[-1]
    assert cache.nbytes() == loaded.nbytes() == before
    # The answers depend on the questions, and the document itself goes on as well.
    assert len({str(answer) for answer in answers}) > 1
    assert text(model, questions(tokenizer, ids)[0], cache=cache, tokens=5) == answers[0]
